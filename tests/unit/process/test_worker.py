from __future__ import annotations

import threading
import time

import pytest

from edge_server.process.threads import Worker

LONG_S = 60.0


class Hang:
    """A tick that returns only when it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.let_go = threading.Event()

    def __call__(self, now: float) -> None:
        self.begun.set()
        self.let_go.wait(LONG_S)


def test_it_ticks_until_tick_returns_false_on_a_thread_of_its_name() -> None:
    ticks: list[float] = []
    names: set[str] = set()
    ended = threading.Event()

    def tick(now: float) -> bool:
        ticks.append(now)
        names.add(threading.current_thread().name)
        return len(ticks) < 3

    worker = Worker("three", tick, on_end=ended.set)
    worker.start()
    assert ended.wait(LONG_S)
    assert (len(ticks), names) == (3, {"three"})
    assert ticks == sorted(ticks)
    assert worker.failure is None


def test_stop_ends_a_wait_and_returns_when_the_thread_is_gone() -> None:
    waits = threading.Event()

    def tick(now: float) -> None:
        waits.set()
        worker.wait(LONG_S)

    worker = Worker("waits", tick)
    worker.start()
    assert waits.wait(LONG_S)
    worker.stop(LONG_S)
    assert not worker.alive


def test_it_can_stop_itself() -> None:
    ended = threading.Event()
    worker = Worker("itself", lambda _: worker.stop(), on_end=ended.set)
    worker.start()
    assert ended.wait(LONG_S)
    assert worker.failure is None


def test_one_that_never_started_stops_at_once_and_is_not_stuck() -> None:
    worker = Worker("idle", lambda _: None)
    worker.stop(LONG_S)
    assert not worker.alive
    assert not worker.stuck(time.monotonic() + LONG_S)


def test_an_error_ends_the_thread_and_is_kept_before_on_end() -> None:
    error = ValueError("no such lane")
    seen: list[BaseException | None] = []
    ended = threading.Event()

    def tick(now: float) -> None:
        raise error

    def on_end() -> None:
        seen.append(worker.failure)
        ended.set()

    worker = Worker("fails", tick, on_end=on_end)
    worker.start()
    assert ended.wait(LONG_S)
    assert seen == [error]


def test_an_error_in_on_end_is_a_failure_too() -> None:
    error = OSError("cannot close")

    def on_end() -> None:
        raise error

    worker = Worker("closes", lambda _: False, on_end=on_end)
    worker.start()
    worker.stop(LONG_S)
    assert worker.failure is error


def test_a_tick_past_its_deadline_is_stuck_until_it_returns() -> None:
    hang = Hang()
    worker = Worker("hangs", hang, deadline_s=10.0)
    before = time.monotonic()
    worker.start()
    assert hang.begun.wait(LONG_S)
    now = time.monotonic()
    assert not worker.stuck(before)
    assert not worker.stuck(before + 9)
    assert worker.stuck(now + 11)
    hang.let_go.set()
    worker.stop(LONG_S)
    assert not worker.stuck(now + 11)


def test_each_tick_is_progress() -> None:
    first, second = Hang(), Hang()
    hangs = iter([first, second])

    def tick(now: float) -> None:
        next(hangs)(now)

    worker = Worker("ticks", tick, deadline_s=10.0)
    worker.start()
    assert first.begun.wait(LONG_S)
    before = time.monotonic()
    assert worker.stuck(before + 10)
    first.let_go.set()
    assert second.begun.wait(LONG_S)
    assert not worker.stuck(before + 10)
    worker._stop.set()
    second.let_go.set()


def test_a_part_of_a_tick_may_have_a_limit_of_its_own() -> None:
    waiting, after = Hang(), Hang()

    def tick(now: float) -> None:
        with worker.allowing(100.0):
            waiting(now)
        after(now)

    worker = Worker("waits", tick, deadline_s=10.0)
    before = time.monotonic()
    worker.start()
    assert waiting.begun.wait(LONG_S)
    now = time.monotonic()
    assert not worker.stuck(before + 99)
    assert worker.stuck(now + 101)
    assert worker.limit_s == 100
    before = time.monotonic()
    waiting.let_go.set()
    assert after.begun.wait(LONG_S)
    now = time.monotonic()
    assert not worker.stuck(before + 9)
    assert worker.stuck(now + 11)
    assert worker.limit_s == 10
    worker.ask_to_stop()
    after.let_go.set()


def test_stop_does_not_wait_for_one_that_is_stuck() -> None:
    hang = Hang()
    worker = Worker("hangs", hang, deadline_s=0.0)
    worker.start()
    assert hang.begun.wait(LONG_S)
    begun = time.monotonic()
    worker.stop(LONG_S)
    assert time.monotonic() - begun < LONG_S / 2
    assert worker.alive
    hang.let_go.set()


@pytest.mark.parametrize("timeout_s", [0.0, 0.01])
def test_stop_waits_no_longer_than_it_may(timeout_s: float) -> None:
    hang = Hang()
    worker = Worker("slow", hang, deadline_s=LONG_S)
    worker.start()
    assert hang.begun.wait(LONG_S)
    worker.stop(timeout_s)
    assert worker.alive
    hang.let_go.set()
