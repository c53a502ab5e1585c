"""ByteBudget: limits the bytes of requests in memory, and returns freed memory to the kernel."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1024 * 1024
# Smaller messages are not counted: the number of calls bounds them, and counting slows each call.
COUNTED_FROM_BYTES = 64 * 1024
# After so many bytes at once the allocator may hold some hundred MiB of free memory.
_MANY_BYTES = 8 * MIB
_QUIET_S = 2.0
_MOST_UNREST_S = 10.0
# Interval at which a waiting thread checks whether to give up.
_LOOK_S = 0.2
_NOTHING = nullcontext()


class ByteBudget:
    """Counts the bytes of the messages in flight.

    A request that is alone is always accepted: only the limit on one message bounds it.

    Args:
        limit_bytes: of all messages together.

    Attributes:
        when_many: called when the owner must poll `memory_is_due` from now on.
    """

    def __init__(self, limit_bytes: int = 192 * MIB) -> None:
        self.limit_bytes = limit_bytes
        self.when_many: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._inside_bytes = 0
        # Times of the first and of the last large amount since memory was last due.
        self._many_from: float | None = None
        self._many_at = 0.0

    def hold(self, size_bytes: int) -> AbstractContextManager[None]:
        """Count `size_bytes` for a block.

        Raises:
            Unavailable: see `take`.
        """
        return _NOTHING if size_bytes < COUNTED_FROM_BYTES else self._hold(size_bytes)

    def take(self, size_bytes: int) -> None:
        """Count `size_bytes` until `give`.

        Raises:
            Unavailable: the bytes exceed the limit together with the requests in flight.
        """
        with self._changed:
            if not self._fits(size_bytes):
                self.note_many()
                raise Unavailable(
                    f"Exceeds maximum queue size: messages of {self._inside_bytes} bytes are in "
                    f"flight already, and of {self.limit_bytes} at most (grpc.max_pending_bytes); "
                    f"this one has {size_bytes}"
                )
            self._count(size_bytes)

    def take_when_it_fits(self, size_bytes: int, given_up: Callable[[], bool]) -> bool:
        """Wait for room and count the bytes until `give`; return False after `given_up`."""
        with self._changed:
            while not self._fits(size_bytes):
                if given_up():
                    return False
                self._changed.wait(_LOOK_S)
            self._count(size_bytes)
            return True

    def add(self, size_bytes: int) -> None:
        """Count `size_bytes` until `give`, even beyond the limit: they are already in memory."""
        with self._changed:
            self._count(size_bytes)

    def give(self, size_bytes: int) -> None:
        """Stop counting the bytes; from any thread."""
        with self._changed:
            self._inside_bytes -= size_bytes
            self._changed.notify_all()

    def note_many(self) -> None:
        """Note a large amount that is not counted, such as the bytes of a refused request."""
        self._many_at = time.monotonic()
        if self._many_from is None:
            self._many_from = self._many_at
            self.when_many()

    def memory_is_due(self, now: float) -> bool:
        """Return whether free memory should go back to the kernel: from time to time under load,
        and once more after the load has ended.

        A sequence of large requests uses the same memory again, and some more.
        """
        with self._changed:
            if self._many_from is None:
                return False
            if self._inside_bytes >= _MANY_BYTES:
                self._many_at = now
            if now - self._many_at > _QUIET_S:
                self._many_from = None
                return True
            if now - self._many_from > _MOST_UNREST_S:
                self._many_from = now
                return True
            return False

    @property
    def room_bytes(self) -> int:
        """The number of bytes that still fit."""
        return max(0, self.limit_bytes - self._inside_bytes)

    @property
    def waits_for_quiet(self) -> bool:
        """Whether `memory_is_due` will become True later."""
        return self._many_from is not None

    @contextmanager
    def _hold(self, size_bytes: int) -> Iterator[None]:
        self.take(size_bytes)
        try:
            yield
        finally:
            self.give(size_bytes)

    def _fits(self, size_bytes: int) -> bool:
        return not self._inside_bytes or self._inside_bytes + size_bytes <= self.limit_bytes

    def _count(self, size_bytes: int) -> None:
        self._inside_bytes += size_bytes
        if self._inside_bytes >= _MANY_BYTES:
            self.note_many()
