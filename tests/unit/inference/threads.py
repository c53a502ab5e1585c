"""A system that gives no threads, for tests."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def no_more_threads(after: int = 0) -> Iterator[None]:
    """The block gets `after` threads, then none, as where a limit on tasks is reached."""
    left = after
    start = threading.Thread.start

    def give(thread: threading.Thread) -> None:
        nonlocal left
        if not left:
            raise RuntimeError("can't start new thread")
        left -= 1
        start(thread)

    with mock.patch.object(threading.Thread, "start", give):
        yield
