"""Work that waits is done together, and one that fails costs the others nothing."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import pytest

from edge_server.errors import ModelConfigError
from edge_server.process.threads import (
    GivenUp,
    Hangs,
    run_parallel,
    run_with_timeout,
    side_by_side,
    start_thread,
    while_wanted,
)

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT_S = 30.0


def test_all_run_at_the_same_time_and_are_waited_for() -> None:
    # None of them gets on before all have begun.
    together = threading.Barrier(8, timeout=30)
    done: list[int] = []

    def work(number: int) -> None:
        together.wait()
        done.append(number)

    side_by_side([lambda n=n: work(n) for n in range(8)], "work")
    assert sorted(done) == list(range(8))


def test_what_one_raises_is_logged_and_the_others_are_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("as asked")

    side_by_side([fail, lambda: done.append(1), fail, lambda: done.append(2)], "close-model")
    assert sorted(done) == [1, 2]
    assert caplog.text.count("close-model: failed") == 2
    assert "as asked" in caplog.text


def test_without_room_for_threads_the_work_is_done_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    side_by_side([lambda: done.append(1), lambda: done.append(2)], "work")
    assert done == [1, 2]
    assert run_parallel("work", 4, str, [1, 2, 3]) == ["1", "2", "3"]
    assert not start_thread("work", lambda: done.append(3))
    assert done == [1, 2]


def test_results_are_in_order_and_no_more_run_at_a_time_than_allowed() -> None:
    running, lock = [0, 0], threading.Lock()

    def work(number: int) -> int:
        with lock:
            running[0] += 1
            running[1] = max(running)
        threading.Event().wait(0.001)
        with lock:
            running[0] -= 1
        return 2 * number

    assert run_parallel("work", 3, work, range(20)) == list(range(0, 40, 2))
    assert running[1] <= 3
    assert run_parallel("work", 3, work, []) == []


def test_the_others_are_done_before_an_exception_is_raised() -> None:
    done: list[int] = []

    def work(number: int) -> None:
        if number == 1:
            raise ValueError("as asked")
        done.append(number)

    with pytest.raises(ValueError, match="as asked"):
        run_parallel("work", 2, work, range(5))
    assert sorted(done) == [0, 2, 3, 4]


def test_work_that_gets_on_is_waited_for() -> None:
    """Each step in its time, all of them together in more than that."""
    steps = 24

    def work(got_on: Callable[[], None]) -> int:
        for _ in range(steps):
            got_on()
            threading.Event().wait(0.1)
        return steps

    assert run_with_timeout("work", work, 2.0, late=pytest.fail) == steps


def test_what_it_raises_is_raised_and_an_exit_too() -> None:
    def leave(got_on: Callable[[], None]) -> None:
        sys.exit("a model that ends the process")

    def fail(got_on: Callable[[], None]) -> None:
        raise ModelConfigError("bad")

    with pytest.raises(SystemExit, match="ends the process"):
        run_with_timeout("work", leave, TIMEOUT_S, late=pytest.fail)
    with pytest.raises(ModelConfigError, match="bad"):
        run_with_timeout("work", fail, TIMEOUT_S, late=pytest.fail)


def test_what_goes_wrong_too_late_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    goes_on, ended = threading.Event(), threading.Event()

    def late() -> None:
        ended.set()
        raise ModelConfigError("cannot be closed")

    with pytest.raises(Hangs):
        run_with_timeout("validate-m", lambda _: goes_on.wait(TIMEOUT_S), 0.01, late=late)
    goes_on.set()
    assert ended.wait(TIMEOUT_S)
    for thread in threading.enumerate():
        if thread.name == "validate-m":
            thread.join(TIMEOUT_S)
    assert "validate-m: ended after its timeout, and closing its model failed" in caplog.text


def test_a_wait_for_work_that_is_not_wanted_ends_and_the_work_closes_what_it_holds_later() -> None:
    began, let_go, closed = threading.Event(), threading.Event(), threading.Event()

    def work(_: object) -> None:
        began.set()
        let_go.wait(60.0)

    def why_unwanted() -> str:
        return "a later change came" if began.is_set() else ""

    with while_wanted(why_unwanted):
        with pytest.raises(GivenUp, match="a later change came"):
            run_with_timeout("work", work, 60.0, late=closed.set)
        assert not closed.is_set()
        let_go.set()
        assert closed.wait(60.0)
    # Outside, nothing ends a wait.
    run_with_timeout("work", lambda _: None, 60.0, late=closed.clear)
    assert closed.is_set()
