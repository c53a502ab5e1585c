"""Run blocking functions in parallel."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)


def side_by_side(works: Sequence[Callable[[], None]], name: str) -> None:
    """Run all functions, each on its own thread except the first; return when all are done.

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

    threads: list[threading.Thread] = []
    mine = list(works[:1])
    for work in works[1:]:
        thread = threading.Thread(target=do, args=(work,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The system refused another thread; the work runs on this one.
            mine.append(work)
        else:
            threads.append(thread)
    for work in mine:
        do(work)
    for thread in threads:
        thread.join()
