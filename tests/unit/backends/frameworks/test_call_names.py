"""Triton's rules for the names of what a function takes and returns."""

from __future__ import annotations

import pytest

from edge_server.backends.frameworks.runner import (
    call_order,
    exported_call,
    name_of,
    result_of,
)


@pytest.mark.parametrize(
    ("names", "arguments", "order"),
    [
        (["b", "a"], ["a", "b"], ["a", "b"]),
        (["b"], ["a", "b"], ["b"]),
        (["INPUT__1", "INPUT__0"], ["a", "b"], ["INPUT__0", "INPUT__1"]),
        (["x__1", "y__0"], [], ["y__0", "x__1"]),
        (["second", "first"], ["a", "b"], ["second", "first"]),
        # One rule holds for all: one name that is no argument, and no name is taken for one.
        (["b", "other"], ["a", "b"], ["b", "other"]),
        (["b__1", "other"], ["a", "b"], ["b__1", "other"]),
    ],
)
def test_inputs_are_arguments_or_numbered_or_in_order(
    names: list[str], arguments: list[str], order: list[str]
) -> None:
    assert call_order(names, arguments) == order


@pytest.mark.parametrize(
    ("names", "arguments", "fault"),
    [
        (["INPUT__1", "INPUT__2"], ["a", "b"], "are not numbered 0 to 1"),
        (["INPUT__0", "OTHER__0"], ["a", "b"], "are not numbered 0 to 1"),
        (["a", "b", "c"], ["a", "b"], "3 inputs for a function of 2: a, b"),
    ],
)
def test_names_without_an_order_are_refused(
    names: list[str], arguments: list[str], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        call_order(names, arguments)


def test_an_exported_program_takes_places_and_names() -> None:
    assert exported_call(["KWARGS[scale]", "ARGS[1]", "ARGS[0]"]) == (
        ["ARGS[0]", "ARGS[1]"],
        {"scale": "KWARGS[scale]"},
    )
    assert exported_call(["INPUT__1", "INPUT__0"]) == (["INPUT__0", "INPUT__1"], {})


@pytest.mark.parametrize(
    ("name", "index", "found"),
    [
        ("OUTPUT__1", 0, 8),
        ("first", 0, 7),
        ("second", 1, 8),
        ("RESULT[1]", 0, 8),
    ],
)
def test_an_output_is_numbered_or_in_order(name: str, index: int, found: object) -> None:
    assert result_of((7, 8), index, name) == found


@pytest.mark.parametrize("name", ["RESULT", "RESULT[0]", "OUTPUT__0", "y"])
def test_a_result_without_others_is_the_first(name: str) -> None:
    assert result_of("tensor", 0, name) == "tensor"
    assert result_of(("tensor",), 0, name) == "tensor"


def test_a_list_of_texts_is_one_output() -> None:
    assert result_of(["a", "b"], 0, "OUTPUT__0") == ["a", "b"]


def test_of_a_dict_an_output_is_named_by_its_key() -> None:
    assert result_of({"y": 7}, 0, "RESULT[y]") == 7
    with pytest.raises(TypeError, match="has to return a tuple"):
        result_of({"y": 7}, 0, "y")


def test_an_output_that_is_not_there_is_named() -> None:
    for name in ("OUTPUT__2", "RESULT[2]", "RESULT[y]"):
        with pytest.raises(IndexError) as caught:
            result_of((7, 8), 0, name)
        assert str(caught.value) == f"output '{name}': the model has 2 results"


@pytest.mark.parametrize(
    ("names", "found"),
    [([], "INPUT__1"), (["a", "b"], "b"), (["x__1", "x__0"], "x__1"), (["a"], "INPUT__1")],
)
def test_a_tensor_without_a_name_has_the_configurations(names: list[str], found: str) -> None:
    assert name_of(names, 1, "INPUT") == found
