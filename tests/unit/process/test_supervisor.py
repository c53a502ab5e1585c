from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from edge_server.errors import InternalError, StageStuck
from edge_server.process.awake_time import AwakeTime
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


def looking(seconds: float, *, late_s: float = 0.0) -> AwakeTime:
    """The main loop's, which looks from now on so long, and is then late once."""
    awake, now = AwakeTime(1.0), time.monotonic()
    for number in range(round(2 * seconds) + 1):
        awake.look(now + number / 2)
    if late_s:
        awake.look(now + seconds + late_s)
    return awake


def test_work_within_its_deadline_is_fine(hanging: Worker) -> None:
    check_progress([hanging], looking(9.0))


def test_one_that_hangs_among_others_is_named(hanging: Worker) -> None:
    workers = [Worker("idle", lambda _: None), ended("camera-road"), hanging]
    with pytest.raises(StageStuck, match=r"^worker lanes-road: no progress for more than 10 s$"):
        check_progress(workers, looking(11.0))


def test_standstills_of_the_process_count_for_no_deadline(hanging: Worker) -> None:
    check_progress([hanging], looking(1.0, late_s=60.0))
    check_progress([hanging], looking(8.0, late_s=60.0))
    with pytest.raises(StageStuck, match="lanes-road"):
        check_progress([hanging], looking(10.0, late_s=60.0))


def test_one_that_has_come_to_its_end_is_fine() -> None:
    check_progress([ended("camera-road")], looking(LONG_S))


def test_one_that_died_is_named_with_its_error(hanging: Worker) -> None:
    workers = [hanging, ended("mqtt", OSError("gone"))]
    with pytest.raises(InternalError, match=r"^worker mqtt: OSError\('gone'\)$"):
        check_progress(workers, looking(0.0))


def test_with_nobody_to_watch_all_is_well() -> None:
    check_progress([], looking(0.0))
