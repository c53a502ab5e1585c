"""Threads for work that ends, beside `Worker` for work that repeats.

Where the system refuses a thread, `run_parallel` and `side_by_side` do the work with the threads
that they got, or on the caller's; `start_thread` returns False, and its caller decides.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


def start_thread(name: str, work: Callable[[], object]) -> bool:
    """Start `work` on a daemon thread of its own; return False if the system refuses a thread."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:
        return False
    return True


def run_parallel(name: str, limit: int, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return `function(item)` for each item, in order, with up to `limit` calls at a time.

    The caller's thread waits, so that signals are handled meanwhile; it does the work itself where
    there is one item, or no other thread. After an exception the other items are still done; then
    the first exception is raised.

    Args:
        name: of the threads.
        limit: the number of threads.
        function: called on any of the threads.
        items: the arguments.
    """
    todo = deque(enumerate(items))
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while todo:
            try:
                index, item = todo.popleft()
            except IndexError:
                return
            try:
                results[index] = function(item)
            # The caller raises it.
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

    threads: list[threading.Thread] = []
    for _ in range(min(limit, len(todo)) if len(todo) > 1 else 0):
        thread = threading.Thread(target=work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            break
        threads.append(thread)
    if not threads:
        work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[index] for index in sorted(results)]


def side_by_side(works: Sequence[Callable[[], None]], name: str) -> None:
    """Run all functions, each on its own thread; return when all are done.

    An exception in one function is logged, and does not stop the others.

    Args:
        works: the functions.
        name: of the threads.
    """

    def do(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            log.exception("%s: failed", name)

    run_parallel(name, len(works), do, works)
