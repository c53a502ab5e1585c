"""How long a camera waits for its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_server.cameras.reader import DriverCall


@dataclass(frozen=True)
class Limits:
    """How long a camera waits for its source, in seconds.

    Attributes:
        first_frame: opening and the first frame together.
        silent: without a frame until the camera has stalled, or three periods if they are longer.
        silent_at_first: the same before the period is known.
        read: a call that reads a later frame, or six periods if they are longer.
        close: a call that closes the source.
        gap: see `FrameInspection`.
    """

    first_frame: float = 10.0
    silent: float = 0.3
    silent_at_first: float = 1.0
    read: float = 2.0
    close: float = 2.0
    gap: float = 0.5

    def silence(self, period_s: float | None) -> float:
        """Return how long no frame may come; `period_s` is None before it is known."""
        return self.silent_at_first if period_s is None else max(3 * period_s, self.silent)

    def call(
        self, call: DriverCall, reader_since: float, *, first: bool, period_s: float | None
    ) -> float:
        """Return how long `call` may last.

        Args:
            call: of a reader that began at `reader_since`.
            reader_since: monotonic, in seconds.
            first: no frame has come yet.
            period_s: of the frames; None before it is known.
        """
        if call.name == "close":
            return self.close
        if call.name == "open":
            return self.first_frame
        if first:
            # Opening took its part of the time.
            return max(self.read, self.first_frame - (call.since - reader_since))
        return max(self.read, 6 * (period_s or 0.0))


LIVE = Limits()
# A disk may be busy for seconds.
RECORDED = Limits(silent=1.0, silent_at_first=3.0, read=10.0, close=10.0)
