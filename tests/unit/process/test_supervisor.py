from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from edge_server.errors import InternalError, StageStuck
from edge_server.process.worker import Auxiliary, Worker, check_progress

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


class Part:
    """A part whose present worker a test replaces, and how often it was opened again."""

    def __init__(self, *workers: Worker) -> None:
        self.workers = list(workers)
        self.reopened = 0
        self.errors: list[Exception] = []

    def reopen(self) -> None:
        if self.errors:
            raise self.errors.pop()
        self.reopened += 1
        self.workers = [Worker("http", lambda _: None)]


def test_an_auxiliary_part_that_hangs_is_closed_and_opened_again(hanging: Worker) -> None:
    part = Part(hanging)
    auxiliary = Auxiliary("http", lambda: part.workers, part.reopen)
    later = time.monotonic() + 11
    auxiliary.check(later)
    assert auxiliary.fault == "", "one look proves nothing"
    auxiliary.check(later)
    assert auxiliary.fault == "worker lanes-road: no progress for more than 10 s"
    auxiliary.check(later + 0.5)
    assert auxiliary.fault, "its reason can be seen"
    auxiliary.check(later + 2.5)
    assert (auxiliary.fault, part.reopened) == ("", 1)


def test_one_that_died_is_opened_again_as_soon_as_the_system_lets_it() -> None:
    part = Part(ended("recorder", OSError("gone")))
    part.errors = [OSError("too many open files"), RuntimeError("can't start new thread")]
    auxiliary = Auxiliary("recorder", lambda: part.workers, part.reopen)
    now = time.monotonic()
    auxiliary.check(now)
    assert auxiliary.fault == "worker recorder: OSError('gone')"
    for seconds in (2.5, 8.0):
        auxiliary.check(now := now + seconds)
        assert auxiliary.fault
    auxiliary.check(now + 20)
    assert (auxiliary.fault, part.reopened) == ("", 1)


def test_while_two_threads_of_a_part_hang_no_third_is_started(hanging: Worker) -> None:
    part = Part(hanging)
    auxiliary = Auxiliary("http", lambda: part.workers, part.reopen)
    now = time.monotonic() + 11
    for seconds in (0.0, 0.0, 2.5):
        auxiliary.check(now := now + seconds)
    assert part.reopened == 1
    other, let_go = threading.Event(), threading.Event()

    def tick(now: float) -> bool:
        other.set()
        let_go.wait(LONG_S)
        return False

    second = Worker("http", tick, deadline_s=10.0)
    second.start()
    assert other.wait(LONG_S)
    part.workers = [second]
    for seconds in (20.0, 0.0, 100.0, 100.0):
        auxiliary.check(now := now + seconds)
    assert part.reopened == 1
    assert auxiliary.fault
    let_go.set()
    second.stop(LONG_S)
    auxiliary.check(now + 100)
    assert (auxiliary.fault, part.reopened) == ("", 2)
