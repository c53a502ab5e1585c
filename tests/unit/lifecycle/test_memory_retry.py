"""What there was no memory for is loaded when there is, told once and not tried in a loop."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from edge_server.inference.snapshot import ModelState
from edge_server.repository.change_detector import Change
from tests.unit.lifecycle.board import CONFIG, Board

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.unit.conftest import WriteModel
    from tests.unit.lifecycle.conftest import CountedBackend


@pytest.fixture
def board(
    tmp_path: Path, repository: Path, write_model: WriteModel, counted: CountedBackend
) -> Iterator[Board]:
    made = Board(tmp_path, repository, write_model)
    yield made
    made.close()


def test_it_is_loaded_when_there_is_memory(board: Board, caplog: pytest.LogCaptureFixture) -> None:
    board.memory(1)
    board.deliver(1)
    assert board.serving() == 1
    board.memory(0)
    board.deliver(2)
    assert board.serving() == 1
    assert "too little memory" in board.reasons()[0]
    caplog.clear()
    for _ in range(3):
        board.retry()
    # Nor is it tried as long as there is none, nor told again.
    assert caplog.messages == []
    board.memory(1)
    with caplog.at_level(logging.INFO):
        board.retry()
    assert "model m: there is memory for it by now: loaded again" in caplog.messages
    assert board.serving() == 2
    assert board.reasons() == [""]
    assert [copy.digest for copy in board.store.history("m")] == [
        board.deployment_state.serving("m").digest,  # type: ignore[union-attr]
        board.store.history("m")[1].digest,
    ]
    caplog.clear()
    board.retry()
    assert caplog.messages == []


def test_memory_that_comes_and_goes_makes_no_loop(board: Board, counted: CountedBackend) -> None:
    board.memory(0)
    board.deliver(1)
    board.memory(1)
    board.retry(after_s=0.0)
    assert board.serving() is None, "the first pause is not over"
    board.retry(after_s=5.0)
    assert board.serving() == 1


def test_what_came_meanwhile_counts(board: Board) -> None:
    board.memory(0)
    board.deliver(1)
    board.memory(1)
    board.deliver(2)
    board.retry()
    assert board.serving() == 2
    board.memory(0)
    board.deliver(3)
    board.carry_out(Change("m", None))
    board.memory(1)
    board.retry()
    assert board.serving() is None


def test_another_fault_is_not_tried_again(board: Board, caplog: pytest.LogCaptureFixture) -> None:
    board.memory(0)
    board.deliver(1)
    board.memory(1)
    board.deliver(2, CONFIG + "nonsense")
    caplog.clear()
    board.retry()
    assert caplog.messages == []


def test_what_served_last_and_found_no_memory_at_a_start_comes_when_there_is(board: Board) -> None:
    board.memory(1)
    board.deliver(1)
    board.memory(0)
    board.start_again()
    (entry,) = board.registry.snapshot.entries.values()
    assert entry.state is ModelState.UNAVAILABLE
    board.memory(1)
    board.retry()
    assert board.serving() == 1
