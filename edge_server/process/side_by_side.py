"""Pieces of work that each may wait, done at the same time."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)


def side_by_side(works: Sequence[Callable[[], None]], name: str) -> None:
    """Do all of them, each on a thread of its own but for the first; return when all are done.

    What one raises is logged, and costs the others nothing.

    Args:
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
            # There is no room for one more.
            mine.append(work)
        else:
            threads.append(thread)
    for work in mine:
        do(work)
    for thread in threads:
        thread.join()
