from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from edge_server.errors import InternalError, StageStuck
from edge_server.process.worker import Worker, check_progress

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG_S = 60.0


@pytest.fixture
def hanging() -> Iterator[Worker]:
    """A worker in a tick that does not return."""
    begun, let_go = threading.Event(), threading.Event()

    def tick(now: float) -> None:
        begun.set()
        let_go.wait(LONG_S)

    worker = Worker("lanes-road", tick, deadline_s=10.0)
    worker.start()
    assert begun.wait(LONG_S)
    yield worker
    let_go.set()
    worker.stop(LONG_S)


def ended(name: str, error: Exception | None = None) -> Worker:
    """A worker whose thread is gone."""

    def tick(now: float) -> bool:
        if error is not None:
            raise error
        return False

    worker = Worker(name, tick)
    worker.start()
    worker.stop(LONG_S)
    return worker


def test_work_within_its_deadline_is_fine(hanging: Worker) -> None:
    check_progress([hanging], time.monotonic())


def test_one_that_hangs_among_others_is_named(hanging: Worker) -> None:
    workers = [Worker("idle", lambda _: None), ended("camera-road"), hanging]
    later = time.monotonic() + 11
    with pytest.raises(StageStuck, match=r"^worker lanes-road: no progress for more than 10 s$"):
        check_progress(workers, later, check_progress(workers, later))


def test_one_that_is_late_because_the_process_was_suspended_gets_time_for_its_tick() -> None:
    worker = Worker("mqtt", lambda _: time.sleep(0.01), deadline_s=10.0)
    worker.start()
    late = check_progress([worker], time.monotonic() + 11)
    assert late == [worker]
    assert check_progress([worker], time.monotonic(), late) == []
    worker.stop(LONG_S)


def test_one_that_has_come_to_its_end_is_fine() -> None:
    check_progress([ended("camera-road")], time.monotonic() + LONG_S)


def test_one_that_died_is_named_with_its_error(hanging: Worker) -> None:
    workers = [hanging, ended("mqtt", OSError("gone"))]
    with pytest.raises(InternalError, match=r"^worker mqtt: OSError\('gone'\)$"):
        check_progress(workers, time.monotonic())


def test_with_nobody_to_watch_all_is_well() -> None:
    check_progress([], time.monotonic())
