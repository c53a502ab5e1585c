"""Who works on a model waits for whoever works on it already, and never for itself."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from support.waiting import TIMEOUT_S, wait_until

from edge_server.errors import Cancelled, Unavailable
from edge_server.lifecycle.loader import ModelLocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future


class Worker:
    """Holds names on a thread of its own until it is let go."""

    def __init__(
        self, model_locks: ModelLocks, pool: ThreadPoolExecutor, *names: str, within: str
    ) -> None:
        self.has = threading.Event()
        self._let_go = threading.Event()

        def work() -> None:
            with model_locks.hold(names, within):
                self.has.set()
                assert self._let_go.wait(TIMEOUT_S)

        self.future: Future[None] = pool.submit(work)

    def end(self) -> None:
        self._let_go.set()
        self.future.result(TIMEOUT_S)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as made:
        yield made


def holds(
    model_locks: ModelLocks, pool: ThreadPoolExecutor, *names: str, within: str = ""
) -> Worker:
    worker = Worker(model_locks, pool, *names, within=within)
    assert worker.has.wait(TIMEOUT_S)
    return worker


def waits(model_locks: ModelLocks, pool: ThreadPoolExecutor, name: str, within: str = "") -> Worker:
    worker = Worker(model_locks, pool, name, within=within)

    def is_waiting() -> bool:
        with model_locks._changed:
            return any(
                hold.names == {name} and hold not in model_locks._held.values()
                for hold in model_locks._all
            )

    wait_until(is_waiting)
    assert not worker.future.done()
    return worker


def test_each_waits_for_whoever_holds_one_of_its_names(pool: ThreadPoolExecutor) -> None:
    model_locks = ModelLocks()
    first = holds(model_locks, pool, "a", "b")
    second = waits(model_locks, pool, "b")
    assert not second.has.is_set()
    first.end()
    second.end()


def test_another_model_is_loaded_on_behalf_of_one_that_is_being_loaded(
    pool: ThreadPoolExecutor,
) -> None:
    model_locks = ModelLocks()
    with (
        model_locks.hold(["a"]),
        model_locks.hold(["b"], within="a"),
        model_locks.hold(["c"], within="b"),
    ):
        pass
    with model_locks.hold(["a", "b", "c"]):
        pass


@pytest.mark.parametrize("chain", ["a", "ab", "abc"])
def test_what_would_wait_for_itself_is_refused(chain: str) -> None:
    model_locks = ModelLocks()
    with ExitStack() as stack:
        outer = ""
        for name in chain:
            stack.enter_context(model_locks.hold([name], within=outer))
            outer = name
        with pytest.raises(Unavailable, match=f"model '{outer}' requests a, which would wait"):
            stack.enter_context(model_locks.hold(["a"], within=outer))
    with model_locks.hold(list(chain)):
        pass


def test_of_two_that_would_wait_for_each_other_the_second_is_refused(
    pool: ThreadPoolExecutor,
) -> None:
    model_locks = ModelLocks()
    first, second = holds(model_locks, pool, "a"), holds(model_locks, pool, "b")
    for_first = waits(model_locks, pool, "b", within="a")
    with (
        pytest.raises(Unavailable, match="model 'b' requests a"),
        model_locks.hold(["a"], within="b"),
    ):
        pass
    second.end()
    for_first.end()
    first.end()


def test_two_may_wait_for_the_same_third(pool: ThreadPoolExecutor) -> None:
    model_locks = ModelLocks()
    first, second = holds(model_locks, pool, "a"), holds(model_locks, pool, "b")
    for_first = holds(model_locks, pool, "c", within="a")
    for_second = waits(model_locks, pool, "c", within="b")
    for each in (for_first, for_second, first, second):
        each.end()


def test_who_waits_at_the_end_is_sent_away(pool: ThreadPoolExecutor) -> None:
    model_locks = ModelLocks()
    first = holds(model_locks, pool, "a")
    second = waits(model_locks, pool, "a")
    assert not model_locks.end(0.0)
    with pytest.raises(Unavailable, match="Server exiting"):
        second.future.result(TIMEOUT_S)
    first.end()
    assert model_locks.end(0.0)


class Request:
    """The cancellation of a request that waits for a load."""

    def __init__(self) -> None:
        self.cancelled = False
        self.waits = threading.Event()

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self.waits.set()

    def cancel(self) -> None:
        self.cancelled = True
        self._callback()


def test_a_cancelled_request_waits_no_more_and_is_blocks_nobody(
    pool: ThreadPoolExecutor,
) -> None:
    model_locks, request = ModelLocks(), Request()
    first = holds(model_locks, pool, "a")

    def ask() -> None:
        with model_locks.hold({"a", "b"}, cancellation=request):
            raise AssertionError("it was cancelled")

    waiting = pool.submit(ask)
    assert request.waits.wait(TIMEOUT_S)
    request.cancel()
    with pytest.raises(Cancelled, match="the load of a, b was cancelled before it began"):
        waiting.result(TIMEOUT_S)
    holds(model_locks, pool, "b").end()
    first.end()
    holds(model_locks, pool, "a").end()
    assert model_locks.end(TIMEOUT_S)


def test_a_request_that_is_cancelled_already_waits_for_nothing(pool: ThreadPoolExecutor) -> None:
    model_locks, request = ModelLocks(), Request()
    first = holds(model_locks, pool, "a")
    request.cancelled = True
    with pytest.raises(Cancelled), model_locks.hold({"a"}, cancellation=request):
        pass
    first.end()
