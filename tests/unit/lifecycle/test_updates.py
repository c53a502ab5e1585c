"""One model loads at a time, and one that hangs holds the others up for a while only."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from edge_server.errors import EdgeServerError, InternalError, ModelConfigError
from edge_server.inference.registry import ModelRegistry
from edge_server.lifecycle.loader import LoadSlot
from edge_server.lifecycle.records import ModelTable
from edge_server.lifecycle.updates import Updates
from edge_server.repository.change_detector import Change
from edge_server.repository.scan import ModelTree

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

TIMEOUT_S = 30.0


def test_one_loads_at_a_time() -> None:
    turn = LoadSlot(TIMEOUT_S)
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
            assert goes_on.wait(TIMEOUT_S)

    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
        hanging = pool.submit(hang)
        assert entered.wait(TIMEOUT_S)
        with turn.take("next"):
            goes_on.set()
            hanging.result(TIMEOUT_S)
            assert turn._holder == "next"
    assert "model hangs: still loads" in caplog.text
    assert turn._holder is None


def test_what_the_store_could_not_take_is_staged_again_and_a_broken_model_is_not(
    tmp_path: Path,
) -> None:
    faults: list[EdgeServerError] = [InternalError("no room")]
    failed: list[tuple[str, bool]] = []

    def stage(tree: ModelTree) -> None:
        raise faults[0]

    def fail(name: str, reason: str, digest: str, *, waits: bool) -> None:
        failed.append((reason, waits))

    # Nothing comes as far as to be loaded.
    loader: Any = SimpleNamespace(refuse=lambda name, error: None)
    deployments: Any = SimpleNamespace(
        table=ModelTable(ModelRegistry()),
        store=SimpleNamespace(stage=stage),
        count=lambda outcome: None,
        failed=fail,
    )
    updates = Updates(loader, deployments)
    changes = [Change("m", ModelTree("m", tmp_path))]
    for _ in range(3):
        began = time.monotonic()
        assert updates.carry_out(changes) == []
        assert failed.pop() == ("no room", True)
        assert not updates.retry(began)
    assert set(updates.retry(time.monotonic() + 3600)) == {"m"}
    faults[0] = ModelConfigError("broken")
    updates.carry_out(changes)
    assert failed.pop() == ("broken", False)
    assert not updates.retry(time.monotonic() + 7200)
