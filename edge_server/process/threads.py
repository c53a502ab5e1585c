"""Threads for work that ends, beside `Worker` for work that repeats.

Where the system refuses a thread, `run_parallel` and `side_by_side` use those that they got, or the
caller's; `start_thread` returns False and `start_future` None; `run_with_timeout` raises.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from edge_server.errors import ModelLoadError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

# How often a long wait calls `require_wanted`.
LOOK_S = 0.1
_WHY_UNWANTED: ContextVar[Callable[[], str]] = ContextVar("why_unwanted", default=str)


class GivenUp(Unavailable):
    """The work was ended because its result is not wanted any more; the text says why."""


@contextmanager
def while_wanted(why_unwanted: Callable[[], str]) -> Iterator[None]:
    """Let the long waits of this thread inside the block end with `GivenUp`, once `why_unwanted`
    returns a reason."""
    before = _WHY_UNWANTED.set(why_unwanted)
    try:
        yield
    finally:
        _WHY_UNWANTED.reset(before)


def require_wanted() -> None:
    """Raises: GivenUp: the result of this thread's work is not wanted; see `while_wanted`."""
    if why := _WHY_UNWANTED.get()():
        raise GivenUp(why)


def start_thread(name: str, work: Callable[[], object]) -> bool:
    """Start `work` on a new daemon thread; return False if the system refuses a thread."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:
        return False
    return True


def start_future(name: str, work: Callable[[], R]) -> Future[R] | None:
    """Start `work` on a new daemon thread; None if the system refuses a thread. What this thread
    waits `while_wanted`, the new one does."""
    future: Future[R] = Future()
    context = copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            future.set_exception(error)

    return future if start_thread(name, run) else None


def run_parallel(
    name: str,
    limit: int,
    function: Callable[[T], R],
    items: Iterable[T],
    *,
    all_or_none: bool = False,
) -> list[R]:
    """Return `function(item)` for each item, in order, with up to `limit` calls at a time.

    The caller's thread waits; it does the work itself where there is one item, a limit of 1, or no
    other thread. After an exception the other items are still done, or, with `all_or_none`, not
    wanted any more (see `while_wanted`); then the first exception is raised.
    """
    before = _WHY_UNWANTED.get()

    def why_unwanted() -> str:
        failed = all_or_none and errors
        return before() or (f"another of them failed: {errors[0]}" if failed else "")

    todo = deque(enumerate(items))
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def work() -> None:
        with suppress(IndexError), while_wanted(why_unwanted):
            while True:
                index, item = todo.popleft()
                try:
                    if all_or_none:
                        require_wanted()
                    results[index] = function(item)
                # The caller raises it.
                except BaseException as error:  # noqa: BLE001
                    errors.append(error)

    count = min(limit, len(todo))
    count = count if count > 1 else 0
    started = [future for _ in range(count) if (future := start_future(name, work))]
    if not started:
        work()
    wait(started)
    if errors:
        raise errors[0]
    return [results[index] for index in sorted(results)]


def side_by_side(works: Sequence[Callable[[], None]], name: str) -> None:
    """Run all functions, each on its own thread; return when all are done.

    An exception in one function is logged, and does not stop the others.
    """

    def do(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            log.exception("%s: failed", name)

    run_parallel(name, len(works), do, works)


class Hangs(ModelLoadError):
    """The work made no progress for too long; the resources that it holds are still in use."""


def run_with_timeout(
    name: str,
    work: Callable[[Callable[[], None]], T],
    timeout_s: float,
    *,
    late: Callable[[], None],
) -> T:
    """Run `work` on a new thread; return its result or raise its exception.

    Args:
        work: receives a function to call at each sign of progress, which raises `GivenUp` once
            this call has ended.
        timeout_s: the longest time between two signs of progress, in seconds.
        late: called on that thread if the work ends after the timeout.

    Raises:
        Hangs: the work made no progress in time. It keeps running with all that it holds.
        GivenUp: see `require_wanted`; likewise.
        ModelLoadError: the system refuses a thread.
    """
    progress_s = time.monotonic()
    outcome: Future[T] = Future()

    def note_progress() -> None:
        nonlocal progress_s
        if outcome.cancelled():
            raise GivenUp(f"{name}: nothing waits for it any more")
        progress_s = time.monotonic()

    def run() -> None:
        settle: Callable[[], None]
        try:
            settle = partial(outcome.set_result, work(note_progress))
        # The waiting caller raises it, even a SystemExit of a model.
        except BaseException as error:  # noqa: BLE001
            settle = partial(outcome.set_exception, error)
        # False where the caller has given up.
        if outcome.set_running_or_notify_cancel():
            settle()
            return
        try:
            late()
        except Exception:
            log.exception("%s: ended after its timeout, and closing its model failed", name)

    if not start_thread(name, run):
        raise ModelLoadError("the system has no thread left for it")
    while (left_s := progress_s + timeout_s - time.monotonic()) > 0 or not outcome.cancel():
        if wait([outcome], min(LOOK_S, max(0.0, left_s))).done:
            return outcome.result()
        try:
            require_wanted()
        except GivenUp:
            if outcome.cancel():
                raise
    raise Hangs(f"it hangs: no progress for {timeout_s:g} s")
