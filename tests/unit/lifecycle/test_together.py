"""What serves together is kept together, in whatever order it was delivered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from unit.lifecycle.board import CONFIG, MAY_BREAK, Board

from edge_server.repository.change_detector import Change
from edge_server.repository.verdicts import GOOD, WAITS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.counted_backend import CountedBackend
    from support.model_folders import WriteModel

# Whoever calls it knows of that.
RENAMED = CONFIG.replace('"b"', '"c"') + MAY_BREAK


def ensemble(output: str) -> str:
    return (
        'platform: "ensemble" input { name: "x" data_type: TYPE_FP32 dims: 1 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 1 } '
        'ensemble_scheduling { step { model_name: "m" model_version: -1 '
        f'input_map {{ key: "a" value: "x" }} output_map {{ key: "{output}" value: "y" }} }} }}'
    )


@pytest.fixture
def board(
    tmp_path: Path, repository: Path, write_model: WriteModel, counted: CountedBackend
) -> Iterator[Board]:
    made = Board(tmp_path, repository, write_model)
    made.deliver(1)
    made.deliver(0, ensemble("b"), "e")
    yield made
    made.close()


def output_of_step(board: Board) -> str:
    (step,) = board.registry.snapshot.find("e").config.steps
    (name,) = step.output_map
    return name


@pytest.mark.parametrize("first", ["m", "e"])
def test_a_restart_has_the_ensemble_and_the_member_that_came_together(
    first: str, board: Board
) -> None:
    """Whichever of them came first was refused until the other one was there."""
    for name in (first, "m" if first == "e" else "e"):
        assert output_of_step(board) == "b"
        if name == "m":
            board.deliver(2, RENAMED)
        else:
            board.deliver(0, ensemble("c"), "e")
    for _ in range(2):
        assert board.serving() == 2
        assert output_of_step(board) == "c"
        board.start_again()


def test_what_comes_together_a_second_time_is_what_a_restart_has(board: Board) -> None:
    kept = board.table.get("e").serving_copy
    board.deliver(2, RENAMED)
    board.deliver(0, ensemble("c"), "e")
    assert board.table.get("e").serving_copy is not kept
    board.deliver(3, CONFIG + MAY_BREAK)
    assert output_of_step(board) == "c"
    board.deliver(0, ensemble("b"), "e")
    board.table.commit()
    assert output_of_step(board) == "b"
    board.start_again()
    assert (board.serving(), output_of_step(board)) == (3, "b")


@pytest.mark.parametrize("change", ["removed", "uses another"])
def test_a_member_that_was_refused_serves_once_no_ensemble_is_in_its_way(
    board: Board, change: str
) -> None:
    board.deliver(2, RENAMED)
    assert (board.serving(), board.table.get("m").outcome.outcome) == (1, WAITS)
    if change == "removed":
        board.carry_out(Change("e", None))
    else:
        board.deliver(3, CONFIG, "n")
        board.deliver(0, ensemble("b").replace('"m"', '"n"'), "e")
    assert (board.serving(), board.table.get("m").outcome.outcome) == (2, GOOD)
