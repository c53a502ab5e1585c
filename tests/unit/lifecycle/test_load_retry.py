"""A model whose load failed for a reason that may pass is loaded again, not in a loop."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
from unit.lifecycle.board import CONFIG, ENSEMBLE, LATER_S, TIMEOUT_S, Board

from edge_server.errors import InternalError, ModelConfigError, ModelLoadError, Unavailable
from edge_server.inference.registry import ModelState
from edge_server.repository.change_detector import Change
from edge_server.repository.verdicts import GOOD, LOADING, WAITS, QuarantineReleases

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.counted_backend import CountedBackend
    from support.model_folders import WriteModel


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
    assert "model m: loaded again: what it failed for may have passed" in caplog.messages
    assert board.serving() == 2
    assert board.reasons() == [""]
    assert [copy.digest for copy in board.store.history("m")] == [
        board.table.get("m").serving_copy.digest,
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


def test_what_a_start_that_was_stopped_did_not_load_is_not_refused(board: Board) -> None:
    board.memory(1)
    board.deliver(1)
    board.close()
    stop = threading.Event()
    stop.set()
    board.open(stop)
    assert (board.serving(), board.table.get("m").outcome.outcome) == (None, LOADING)
    board.start_again()
    assert board.serving() == 1


def test_what_served_last_and_does_not_start_at_a_start_is_loaded_again(
    board: Board, counted: CountedBackend
) -> None:
    board.memory(1)
    board.deliver(1)
    counted.fails["m"] = ModelLoadError("no GPU yet")
    board.start_again()
    assert board.serving() is None
    board.retry(after_s=0.0)
    assert counted.loads["m"] == 2, "the first pause is not over"
    board.retry()
    assert (board.serving(), board.reasons()) == (None, ["no GPU yet"])
    del counted.fails["m"]
    board.retry(after_s=2 * LATER_S)
    assert (board.serving(), board.reasons()) == (1, [""])
    board.retry(after_s=3 * LATER_S)
    assert counted.loads["m"] == 4


def test_an_ensemble_that_does_not_fit_its_member_at_a_start_is_good_once_it_serves(
    board: Board,
) -> None:
    board.memory(1)
    board.deliver(1)
    wider = f'{CONFIG} output {{ name: "c" data_type: TYPE_FP32 dims: 1 }}'
    board.deliver(2, wider)
    copy = board.table.get("m").serving_copy
    assert copy is not None
    board.deliver(1, ENSEMBLE.replace('map { key: "b"', 'map { key: "c"'), name="e")
    board.store.quarantine(copy.digest, "the daemon died 2 times", "m")
    board.start_again()
    record = board.table.get("e")
    assert board.serving() == 1
    assert (record.serving, record.outcome.outcome) == (None, WAITS)
    board.deliver(3, wider)
    assert record.serving is not None
    assert record.outcome.outcome == GOOD


@pytest.mark.parametrize("change", ["fails too", "waits", "broken", "in quarantine", "no room"])
def test_what_served_last_is_loaded_again_whatever_became_of_a_change(
    board: Board, counted: CountedBackend, change: str
) -> None:
    """A change that was refused, or on trial, before a restart is there after it."""
    board.memory(1)
    board.deliver(1)
    board.deliver(2)
    copy = board.table.get("m").serving_copy
    assert copy is not None
    board.store.quarantine(copy.digest, "rolled back: slow", "m")
    counted.fails["m"] = ModelLoadError("no GPU yet")
    board.start_again()
    assert board.serving() is None
    if change == "waits":
        counted.fails["m"] = Unavailable("too little memory")
    if change == "in quarantine":
        board.deliver(2)
    elif change == "no room":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(board.store, "stage", Mock(side_effect=InternalError("no space")))
            board.deliver(3)
    else:
        board.deliver(3, CONFIG + "nonsense" if change == "broken" else CONFIG)
    del counted.fails["m"]
    assert board.updates.retry(time.monotonic() + LATER_S) == (
        {"m"} if change == "no room" else set()
    )
    assert board.updates.wait_idle(TIMEOUT_S)
    assert board.serving() == 1


def test_a_new_model_that_does_not_start_is_not_loaded_again(
    board: Board, counted: CountedBackend
) -> None:
    board.memory(1)
    board.deliver(1)
    counted.fails["m"] = ModelLoadError("no GPU yet")
    board.deliver(2)
    board.retry()
    assert (board.serving(), counted.loads["m"]) == (1, 2)


def test_a_new_model_that_waits_for_what_the_board_lacks_now_is_loaded_again(
    board: Board, counted: CountedBackend
) -> None:
    board.memory(1)
    board.deliver(1)
    counted.fails["m"] = Unavailable("no execution context on GPU 0")
    board.deliver(2)
    assert (board.serving(), board.table.get("m").outcome.outcome) == (1, WAITS)
    board.retry(after_s=0.0)
    assert counted.loads["m"] == 2, "the first pause is not over"
    del counted.fails["m"]
    board.retry()
    assert (board.serving(), board.table.get("m").outcome.outcome) == (2, GOOD)
    board.retry(after_s=2 * LATER_S)
    assert counted.loads["m"] == 3


def test_what_served_last_and_is_wrong_by_now_is_not_loaded_again(
    board: Board, counted: CountedBackend
) -> None:
    board.memory(1)
    board.deliver(1)
    counted.fails["m"] = ModelConfigError("of a runtime that is gone")
    board.start_again()
    board.retry()
    assert (board.serving(), counted.loads["m"]) == (None, 2)


def test_what_cannot_be_staged_as_it_is_is_not_staged_again(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    board.memory(1)
    wrong = ModelConfigError("not as its manifest says")
    monkeypatch.setattr(board.store, "stage", Mock(side_effect=wrong))
    board.deliver(1)
    assert board.updates.retry(time.monotonic() + LATER_S) == set()


def test_a_removal_that_the_store_cannot_note_says_why(
    board: Board, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    board.deliver(1)
    broken = InternalError("Input/output error; check the disk")
    monkeypatch.setattr(board.store, "forget", Mock(side_effect=broken))
    board.carry_out(Change("m", None))
    assert board.serving() is None
    assert board.table.get("m").outcome.reason == str(broken)
    assert "Traceback" not in caplog.text


def test_content_in_quarantine_is_let_out_by_the_name_that_it_had_then(board: Board) -> None:
    board.deliver(1)
    copy = board.table.get("m").serving_copy
    assert copy is not None
    board.store.quarantine(copy.digest, "rolled back: slow", "m")
    board.deliver(1, name="n")
    (reason,) = [reason for reason in board.reasons() if reason]
    assert reason.endswith("let it out with `edge-server models release m`")
    QuarantineReleases(board.store.directory).leave(copy.digest)
    assert board.table.release_noted() == {"m", "n"}
    board.deliver(1, name="n")
    assert board.table.get("n").outcome.outcome == GOOD


def test_what_the_store_could_not_keep_serves_and_is_kept_once_the_disk_has_room(
    board: Board, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    board.deliver(1)
    full = Mock(side_effect=InternalError("No space left on device"))
    with monkeypatch.context() as while_full:
        while_full.setattr(board.store, "commit", full)
        board.deliver(2)
        board.table.commit()
    assert full.call_count == 2
    assert board.serving() == 2
    assert board.reasons() == [""]
    assert board.table.outcomes()["failed"] == 0
    record = board.table.get("m")
    assert record.outcome.outcome == WAITS
    assert record.outcome.reason == "a restart would not serve it: No space left on device"
    assert caplog.messages == ["model m: is not kept for a restart: No space left on device"]
    board.table.commit()
    assert record.outcome.outcome == GOOD
    board.start_again()
    assert board.serving() == 2


def test_what_passed_its_canary_is_kept_later_where_the_store_could_not_keep_it(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    board.deliver(1)
    record = board.table.get("m")
    record.last_good = None
    record.canary = Mock()
    with monkeypatch.context() as while_full:
        while_full.setattr(board.store, "commit", Mock(side_effect=InternalError("full")))
        board.table.commit()
    # Before the canary is over.
    board.table.commit()
    assert record.outcome.outcome == GOOD
    assert record.last_good is record.serving_copy
    record.canary = None
