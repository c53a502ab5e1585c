"""One model loads at a time, and one that hangs holds the others up for a while only."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from edge_server.lifecycle.updates import LoadSlot

if TYPE_CHECKING:
    import pytest

PATIENCE_S = 30.0


def test_one_loads_at_a_time() -> None:
    turn = LoadSlot(PATIENCE_S)
    inside = threading.Semaphore(1)

    def load(name: str) -> bool:
        with turn.take(name):
            alone = inside.acquire(blocking=False)
            # Long enough for another to come in.
            threading.Event().wait(0.002)
            if alone:
                inside.release()
            return alone

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(load, [str(number) for number in range(40)]))


def test_who_hangs_is_left_behind_and_does_not_end_anothers_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turn = LoadSlot(0.02)
    goes_on, entered = threading.Event(), threading.Event()

    def hang() -> None:
        with turn.take("hangs"):
            entered.set()
            assert goes_on.wait(PATIENCE_S)

    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
        hanging = pool.submit(hang)
        assert entered.wait(PATIENCE_S)
        with turn.take("next"):
            goes_on.set()
            hanging.result(PATIENCE_S)
            assert turn._holder == "next"
    assert "model hangs: still loads" in caplog.text
    assert turn._holder is None
