from __future__ import annotations

import hashlib
import os
import threading
import time
from math import inf
from typing import TYPE_CHECKING

import pytest
from support.waiting import wait_until

from edge_server.errors import InternalError, StageStuck
from edge_server.process.threads import (
    Auxiliary,
    AwakeTime,
    Worker,
    check_progress,
    processor_waits_s,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG_S = 60.0
# A tenth of it more or less decides nothing, so late may a busy machine be.
DEADLINE_S = 100.0


@pytest.fixture
def hanging() -> Iterator[Worker]:
    """A worker in a tick that does not return."""
    begun, let_go = threading.Event(), threading.Event()

    def tick(now: float) -> None:
        begun.set()
        let_go.wait(LONG_S)

    worker = Worker("lanes-road", tick, deadline_s=DEADLINE_S)
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


def looking(seconds: float, *, late_s: float = 0.0) -> AwakeTime:
    """The main loop's, which looks from now on so long, and is then late once."""
    awake, now = AwakeTime(1.0), time.monotonic()
    for number in range(round(2 * seconds) + 1):
        awake.look(now + number / 2)
    if late_s:
        awake.look(now + seconds + late_s)
    return awake


def test_work_within_its_deadline_is_fine(hanging: Worker) -> None:
    check_progress([hanging], looking(90.0))


def test_one_that_hangs_among_others_is_named(hanging: Worker) -> None:
    workers = [Worker("idle", lambda _: None), ended("camera-road"), hanging]
    with pytest.raises(StageStuck, match=r"^worker lanes-road: no progress for more than 100 s$"):
        check_progress(workers, looking(110.0))


def test_standstills_of_the_process_count_for_no_deadline(hanging: Worker) -> None:
    check_progress([hanging], looking(10.0, late_s=600.0))
    check_progress([hanging], looking(80.0, late_s=600.0))
    with pytest.raises(StageStuck, match="lanes-road"):
        check_progress([hanging], looking(100.0, late_s=600.0))


def test_time_without_a_processor_counts_for_no_deadline(hanging: Worker) -> None:
    """From half of the deadline on; any thread of the process, as the one that is late may wait for
    another. One has waited 1000 s before."""
    waits_s = {1: 1000.0, 2: 0.0, 3: 10.0}

    def hangs_after(seconds: float) -> bool:
        return hanging.hangs(looking(seconds), lambda: dict(waits_s))

    assert not hangs_after(60.0)
    waits_s |= {1: 1010.0, 2: 200.0, 4: 10_000.0}
    del waits_s[3]
    assert not hangs_after(290.0)
    assert hangs_after(310.0)


def test_the_kernel_counts_how_long_a_thread_waits_for_a_processor() -> None:
    """Two threads that compute share one processor; one that sleeps waits for none."""
    one = min(os.sched_getaffinity(0))

    def compute(now: float) -> None:
        os.sched_setaffinity(0, {one})
        hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 20_000)

    workers = [Worker(f"hash-{number}", compute) for number in range(2)]
    for worker in workers:
        worker.start()
    ids = [thread.native_id for thread in threading.enumerate() if "hash-" in thread.name]
    let_go = threading.Event()
    sleeper = threading.Thread(target=let_go.wait)
    sleeper.start()
    asleep = sleeper.native_id
    assert asleep is not None
    before_s = processor_waits_s()[asleep]  # until it slept
    wait_until(lambda: all(processor_waits_s()[each] > 0.1 for each in ids), LONG_S)
    now_s = processor_waits_s()
    assert now_s[asleep] - before_s < min(now_s[each] for each in ids)
    let_go.set()
    sleeper.join()
    for worker in workers:
        worker.stop(LONG_S)


def test_one_that_has_come_to_its_end_is_fine() -> None:
    check_progress([ended("camera-road")], looking(LONG_S))


def test_one_that_died_is_named_with_its_error(hanging: Worker) -> None:
    workers = [hanging, ended("mqtt", OSError("gone"))]
    with pytest.raises(InternalError, match=r"^worker mqtt: OSError\('gone'\)$"):
        check_progress(workers, looking(0.0))


def test_with_nobody_to_watch_all_is_well() -> None:
    check_progress([], looking(0.0))


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


class MainLoop:
    """One that looks at an auxiliary part, and between two looks is never asleep."""

    def __init__(self, auxiliary: Auxiliary) -> None:
        self._auxiliary = auxiliary
        self._awake = AwakeTime(inf)
        self._now = time.monotonic()
        self._awake.look(self._now)

    def look(self, *after_s: float) -> str:
        """Look after each of these pauses; the part's fault then."""
        for seconds in after_s:
            self._now += seconds
            self._awake.look(self._now)
            self._auxiliary.check(self._now, self._awake)
        return self._auxiliary.fault


def test_an_auxiliary_part_that_hangs_is_closed_and_opened_again(hanging: Worker) -> None:
    part = Part(hanging)
    loop = MainLoop(Auxiliary("http", lambda: part.workers, part.reopen))
    assert loop.look(90) == ""
    assert loop.look(20) == "worker lanes-road: no progress for more than 100 s"
    assert loop.look(0.5), "its reason can be seen"
    assert (loop.look(2), part.reopened) == ("", 1)


def test_one_that_died_is_opened_again_as_soon_as_the_system_lets_it() -> None:
    part = Part(ended("recorder", OSError("gone")))
    part.errors = [OSError("too many open files"), RuntimeError("can't start new thread")]
    loop = MainLoop(Auxiliary("recorder", lambda: part.workers, part.reopen))
    assert loop.look(0) == "worker recorder: OSError('gone')"
    for seconds in (2.5, 8.0):
        assert loop.look(seconds)
    assert (loop.look(20), part.reopened) == ("", 1)


def test_while_two_threads_of_a_part_hang_no_third_is_started(hanging: Worker) -> None:
    part = Part(hanging)
    loop = MainLoop(Auxiliary("http", lambda: part.workers, part.reopen))
    loop.look(110, 2.5)
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
    assert loop.look(20, 100, 100)
    assert part.reopened == 1
    let_go.set()
    second.stop(LONG_S)
    assert (loop.look(100), part.reopened) == ("", 2)
