"""A one-slot mailbox between two threads, for data where only the newest item matters."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Keeps the newest item until a taker receives it or a newer item replaces it.

    `put` never waits for a taker. Each item is delivered at most once, to one taker; an item that
    is replaced before delivery counts in `dropped`.
    """

    def __init__(self) -> None:
        self._slot: deque[T] = deque(maxlen=1)
        self._changed = threading.Condition()
        self._dropped = 0
        self._closed = False

    def put(self, item: T) -> None:
        """Replace the waiting item by `item`; after `close` the new item is dropped."""
        with self._changed:
            if self._closed:
                self._dropped += 1
                return
            self._dropped += len(self._slot)
            self._slot.append(item)
            self._changed.notify()

    def take(self, timeout_s: float) -> T | None:
        """Return the newest undelivered item; wait up to `timeout_s` for one.

        Returns:
            None when no item arrived in time, and at once when the mailbox is closed and empty.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._slot or self._closed, timeout_s)
            return self._slot.popleft() if self._slot else None

    def close(self) -> None:
        """Wake all waiting takers; an item in the mailbox can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def dropped(self) -> int:
        """Number of items that were put and can never be taken."""
        return self._dropped

    @property
    def drained(self) -> bool:
        """The mailbox is closed and empty."""
        with self._changed:
            return self._closed and not self._slot
