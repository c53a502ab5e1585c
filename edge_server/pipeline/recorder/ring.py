"""Ring: the newest messages in memory, from which files are written."""

from __future__ import annotations

import threading
from collections import deque
from itertools import dropwhile
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.pipeline.recorder.messages import RecordedMessage


class RingEntry(NamedTuple):
    """Messages that belong together.

    Attributes:
        number: counts the entries.
        mono_ns: `time.monotonic_ns()` at which the recorder got them.
    """

    number: int
    mono_ns: int
    size_bytes: int
    messages: Sequence[RecordedMessage]


class Ring:
    """The entries of the last `keep_s`, and no more than `most_bytes`; safe from any thread.

    Attributes:
        size_bytes: of the entries.
    """

    def __init__(self, keep_s: float, most_bytes: int) -> None:
        self.size_bytes = 0
        self._keep_ns = round(keep_s * 1e9)
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._entries: deque[RingEntry] = deque()
        self._newest = 0

    def append(self, mono_ns: int, messages: Sequence[RecordedMessage]) -> None:
        size = sum(len(each.data) for each in messages)
        with self._lock:
            self._newest += 1
            self._entries.append(RingEntry(self._newest, mono_ns, size, messages))
            self.size_bytes += size
            oldest_ns = mono_ns - self._keep_ns
            while self._entries and (
                self._entries[0].mono_ns < oldest_ns or self.size_bytes > self._most_bytes
            ):
                self.size_bytes -= self._entries.popleft().size_bytes

    def after(self, number: int) -> list[RingEntry]:
        """Return the entries with greater numbers."""
        with self._lock:
            return list(dropwhile(lambda entry: entry.number <= number, self._entries))

    def before(self, mono_ns: int) -> int:
        """Return the number of the last entry before `mono_ns`, or of the one that was forgotten
        last."""
        with self._lock:
            number = self._newest - len(self._entries)
            for entry in self._entries:
                if entry.mono_ns >= mono_ns:
                    break
                number = entry.number
            return number
