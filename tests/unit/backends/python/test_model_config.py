"""How `auto_complete_config` may complete a configuration: rules and texts are Triton's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from edge_server.backends.python.pb_utils.server import AutoCompleteConfig

if TYPE_CHECKING:
    from collections.abc import Callable

IN_FUNCTION = "in auto-complete-config function for model 'm'"
TENSOR = {"name": "x", "data_type": "TYPE_FP32", "dims": [4]}


def config(**fields: object) -> AutoCompleteConfig:
    return AutoCompleteConfig(
        json.dumps({"name": "m", "max_batch_size": 0, "input": [], "output": [], **fields})
    )


def test_an_empty_configuration_takes_everything() -> None:
    completed = config()
    completed.set_max_batch_size(8)
    completed.set_dynamic_batching()
    completed.add_input({**TENSOR, "optional": True})
    completed.add_output({"name": "y", "data_type": "TYPE_INT8", "dims": [-1]})
    completed.set_model_transaction_policy({"decoupled": True})
    assert completed.as_dict() == {
        "name": "m",
        "max_batch_size": 8,
        "dynamic_batching": {},
        "input": [{**TENSOR, "optional": True}],
        "output": [{"name": "y", "data_type": "TYPE_INT8", "dims": [-1]}],
        "model_transaction_policy": {"decoupled": True},
    }


def test_repeating_the_configuration_changes_nothing() -> None:
    completed = config(input=[TENSOR], model_transaction_policy={"decoupled": False})
    completed.add_input(TENSOR)
    completed.set_model_transaction_policy({"decoupled": False})
    assert completed.as_dict()["input"] == [TENSOR]


@pytest.mark.parametrize(
    ("fields", "act", "text"),
    [
        (
            {"max_batch_size": 4},
            lambda c: c.set_max_batch_size(2),
            "configuration specified max_batch_size 4, but in auto-complete-config function for "
            "model 'm' specified max_batch_size 2",
        ),
        (
            {"sequence_batching": {}},
            lambda c: c.set_dynamic_batching(),
            "Configuration specified scheduling_choice as 'sequence_batching', but "
            "auto-complete-config function for model 'm' tries to set scheduling_choice as "
            "'dynamic_batching'",
        ),
        (
            {},
            lambda c: c.add_input({**TENSOR, "colour": 1}),
            f"input 'x' {IN_FUNCTION} contains property other than 'name', 'data_type', 'dims' and "
            "'optional'.",
        ),
        (
            {},
            lambda c: c.add_output({**TENSOR, "optional": True}),
            f"output 'x' {IN_FUNCTION} contains property other than 'name', 'data_type' and "
            "'dims'.",
        ),
        (
            {},
            lambda c: c.add_input({"dims": [1]}),
            f"input {IN_FUNCTION} is missing 'name' property.",
        ),
        (
            {},
            lambda c: c.add_input({"name": "x", "dims": [1]}),
            f"input 'x' {IN_FUNCTION} is missing 'data_type' property.",
        ),
        (
            {},
            lambda c: c.add_output({"name": "y", "data_type": "TYPE_FP32"}),
            f"output 'y' {IN_FUNCTION} is missing 'dims' property.",
        ),
        (
            {"input": [TENSOR]},
            lambda c: c.add_input({**TENSOR, "data_type": "TYPE_INT8"}),
            "unable to load model 'm', configuration expects datatype TYPE_FP32 for input 'x', "
            "model provides TYPE_INT8",
        ),
        (
            {"output": [TENSOR]},
            lambda c: c.add_output({**TENSOR, "dims": [5]}),
            "model 'm', tensor 'x': the model expects dims [5] but the model configuration "
            "specifies dims [4]",
        ),
        (
            {"input": [{**TENSOR, "optional": True}]},
            lambda c: c.add_input({**TENSOR, "optional": False}),
            "model 'm', tensor 'x': the model expects optional False but the model configuration "
            "specifies optional True",
        ),
        (
            {},
            lambda c: c.set_model_transaction_policy({"decoupled": True, "other": 1}),
            f"model transaction property {IN_FUNCTION} contains property other than 'decoupled'.",
        ),
        (
            {"model_transaction_policy": {"decoupled": True}},
            lambda c: c.set_model_transaction_policy({"decoupled": False}),
            "trying to change decoupled property in auto-complete-config for model 'm', which is "
            "already set to 'True'.",
        ),
    ],
)
def test_a_contradiction_is_an_error_in_tritons_words(
    fields: dict[str, object], act: Callable[[AutoCompleteConfig], None], text: str
) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        act(config(**fields))
    assert str(raised.value) == text
