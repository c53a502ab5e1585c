"""Waits end in time; threads for steps are never waited for, and gone after close."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from support.callers import Caller
from support.waiting import TIMEOUT_S
from unit.inference.threads import no_more_threads

from edge_server.errors import Cancelled, DeadlineExceeded, Unavailable
from edge_server.inference.line import StepThreads, Waiter

if TYPE_CHECKING:
    from collections.abc import Callable


class Step:
    """A task that calls `do`; over from the start where it is reported what to do when dropped."""

    def __init__(
        self, do: Callable[[], object] = lambda: None, dropped: Callable[[], None] | None = None
    ) -> None:
        self.run = do
        self._dropped = dropped

    def run_later(self) -> None: ...

    def is_over(self) -> bool:
        return self._dropped is not None

    def dropped(self) -> None:
        assert self._dropped is not None
        self._dropped()


def test_a_task_is_refused_while_every_thread_has_one() -> None:
    threads, release, began = StepThreads(2), threading.Event(), threading.Semaphore(0)

    def task() -> None:
        began.release()
        release.wait(TIMEOUT_S)

    assert [threads.try_run(Step(task)) for _ in range(3)] == [True, True, False]
    for _ in range(2):
        assert began.acquire(timeout=TIMEOUT_S)
    in_line = threading.Event()
    threads.run(Step(in_line.set))
    assert not in_line.is_set()
    release.set()
    assert in_line.wait(TIMEOUT_S)
    threads.close()


def test_a_task_that_raises_costs_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    threads, ran = StepThreads(1), threading.Event()

    def task() -> None:
        raise ValueError("odd")

    threads.run(Step(task))
    threads.run(Step(ran.set))
    assert ran.wait(TIMEOUT_S)
    threads.close()
    assert "step: a task raised" in caplog.text


def test_after_close_nothing_is_taken_but_what_must_run_runs() -> None:
    threads, ran_on = StepThreads(1), list[str]()
    ran = threading.Event()
    assert threads.try_run(Step(ran.set))
    assert ran.wait(TIMEOUT_S)
    threads.close()
    assert not threads.try_run(Step())
    late = threading.Event()
    threads.run(Step(lambda: (ran_on.append(threading.current_thread().name), late.set())))
    assert late.wait(TIMEOUT_S)
    assert ran_on == ["step-late"]
    assert not any(thread.is_alive() for thread in threads._threads)


def test_what_is_over_leaves_the_queue_while_every_thread_has_a_task() -> None:
    threads, release, began = StepThreads(1), threading.Event(), threading.Event()
    ran, dropped = threading.Event(), threading.Event()

    def task() -> None:
        began.set()
        release.wait(TIMEOUT_S)

    threads.run(Step(task))
    assert began.wait(TIMEOUT_S)
    threads.run(Step(ran.set))
    threads.run(Step(dropped=dropped.set))
    assert threads.drop_dead()
    assert dropped.is_set()
    release.set()
    assert ran.wait(TIMEOUT_S)
    assert not threads.drop_dead()
    threads.close()


def test_a_thread_that_cannot_be_started_is_not_counted() -> None:
    threads, ran = StepThreads(2), threading.Event()
    with no_more_threads():
        assert not threads.try_run(Step())
        with pytest.raises(Unavailable, match="no thread is left"):
            threads.run(Step())
    threads.run(Step(ran.set))
    assert ran.wait(TIMEOUT_S)
    threads.close()


def test_a_thread_that_waits_gets_what_it_is_given() -> None:
    lock = threading.Lock()
    waiter = Waiter[str](lock)

    def give() -> None:
        with lock:
            waiter.give("one")

    with lock:
        threading.Thread(target=give).start()
        assert waiter.wait(time.monotonic() + TIMEOUT_S, "late") == "one"


def test_a_wait_ends_at_its_deadline() -> None:
    lock = threading.Lock()
    with lock, pytest.raises(DeadlineExceeded, match="late"):
        Waiter[str](lock).wait(time.monotonic() + 0.01, "late")


def test_a_wait_ends_once_its_caller_has_cancelled_and_no_later() -> None:
    lock, one, other = threading.Lock(), Caller(), Caller()
    waiter, served = Waiter[str](lock, one), Waiter[str](lock, other)
    with lock:
        threading.Thread(target=one.cancel).start()
        with pytest.raises(Cancelled):
            waiter.wait(time.monotonic() + TIMEOUT_S, "late")
        served.give("one")
        assert served.wait(None, "late") == "one"
    other.cancel()
