"""A one-slot mailbox between two threads, for data where only the newest item matters."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Newest wins: holds the last item put until it is taken or replaced.

    `put` never waits for a taker. Each item is handed out at most once, to one taker; an item
    that is replaced before anyone took it is counted in `dropped`.
    """

    def __init__(self) -> None:
        self._slot: deque[T] = deque(maxlen=1)
        self._changed = threading.Condition()
        self._dropped = 0
        self._closed = False

    def put(self, item: T) -> None:
        """Replace whatever waits by `item`; after `close` the item itself is dropped."""
        with self._changed:
            if self._closed:
                self._dropped += 1
                return
            self._dropped += len(self._slot)
            self._slot.append(item)
            self._changed.notify()

    def take(self, timeout_s: float) -> T | None:
        """The newest item not taken yet, waiting up to `timeout_s` for one.

        None when nothing came in time, and at once when the mailbox is closed and empty.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._slot or self._closed, timeout_s)
            return self._slot.popleft() if self._slot else None

    def close(self) -> None:
        """Wake everyone who waits; an item that is there can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def dropped(self) -> int:
        """Items that were put and can never be taken."""
        return self._dropped

    @property
    def drained(self) -> bool:
        """Closed, and nothing left to take."""
        with self._changed:
            return self._closed and not self._slot
