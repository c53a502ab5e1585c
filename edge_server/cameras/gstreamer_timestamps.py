"""CaptureTime times from the timestamps of a camera."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from edge_server.cameras.frame import CaptureClock

_S = 1_000_000_000
# The smallest transit of the last minute is taken as the transit of an undelayed frame: the
# camera's clock drifts by about a millisecond in that time (20 ppm).
_WINDOW_NS = 60 * _S
_BUCKET_NS = 5 * _S
# No frame is older: a stalled source is opened again long before.
_OLDEST_NS = 10 * _S
# What an honest timestamp may be ahead of the arrival, as clocks differ.
_AHEAD_NS = _S // 2


class CaptureTime(NamedTuple):
    """When a frame was captured: CLOCK_MONOTONIC, never later than the arrival."""

    mono_ns: int
    clock: CaptureClock


class TimestampMapper:
    """Maps the timestamps of one opened camera to CLOCK_MONOTONIC.

    CaptureTime times of consecutive frames never run backwards. A timestamp that jumps or runs
    backwards is counted, its frame gets the arrival time, and later timestamps count from there.

    Attributes:
        faults: number of timestamps that jumped or ran backwards.

    Args:
        clock: `sensor` for timestamps that are CLOCK_MONOTONIC; `rtp` for timestamps that only have
            the camera's pace, from any beginning; `arrival` ignores timestamps.
    """

    def __init__(self, clock: Literal["sensor", "rtp", "arrival"]) -> None:
        self.faults = 0
        self._clock = clock
        self._last_stamp_ns: int | None = None
        self._last_ns = 0
        self._ntp_offset_ns: int | None = None
        # The smallest transit of each bucket: its beginning, and nanoseconds.
        self._transits: deque[tuple[int, int]] = deque()

    def map(self, arrival_ns: int, stamp_ns: int | None, ntp_ns: int | None = None) -> CaptureTime:
        """Return the capture time of a frame that arrived at `arrival_ns`.

        Args:
            arrival_ns: CLOCK_MONOTONIC.
            stamp_ns: the frame's timestamp; None where it has none.
            ntp_ns: the camera's NTP time of this frame as CLOCK_MONOTONIC; None where it gave none.
        """
        if self._clock == "arrival" or stamp_ns is None:
            return self._captured(arrival_ns, arrival_ns, "arrival")
        last, self._last_stamp_ns = self._last_stamp_ns, stamp_ns
        if (last is not None and stamp_ns <= last) or self._jumped(arrival_ns, stamp_ns):
            self.faults += 1
            self._transits.clear()
            self._ntp_offset_ns = None
            if self._clock == "rtp":
                self._transits.append((arrival_ns, arrival_ns - stamp_ns))
            return self._captured(arrival_ns, arrival_ns, "arrival")
        if self._clock == "sensor":
            return self._captured(stamp_ns, arrival_ns, "sensor")
        capture_ns = stamp_ns + self._smallest_transit(arrival_ns, arrival_ns - stamp_ns)
        if ntp_ns is not None:
            # A camera without time server is off by hours; its NTP time is of no use then.
            plausible = arrival_ns - _OLDEST_NS <= ntp_ns <= arrival_ns + _AHEAD_NS
            self._ntp_offset_ns = ntp_ns - stamp_ns if plausible else None
        if self._ntp_offset_ns is not None:
            return self._captured(stamp_ns + self._ntp_offset_ns, arrival_ns, "ntp")
        return self._captured(capture_ns, arrival_ns, "rtp")

    def _jumped(self, arrival_ns: int, stamp_ns: int) -> bool:
        if self._clock == "sensor":
            transit_ns = arrival_ns - stamp_ns
        elif self._transits:
            transit_ns = arrival_ns - stamp_ns - min(least for _, least in self._transits)
        else:
            return False
        return not -_AHEAD_NS <= transit_ns <= _OLDEST_NS

    def _smallest_transit(self, arrival_ns: int, transit_ns: int) -> int:
        transits = self._transits
        if not transits or arrival_ns - transits[-1][0] >= _BUCKET_NS:
            transits.append((arrival_ns, transit_ns))
        elif transit_ns < transits[-1][1]:
            transits[-1] = (transits[-1][0], transit_ns)
        while arrival_ns - transits[0][0] > _WINDOW_NS:
            transits.popleft()
        return min(least for _, least in transits)

    def _captured(self, capture_ns: int, arrival_ns: int, clock: CaptureClock) -> CaptureTime:
        self._last_ns = max(self._last_ns, min(capture_ns, arrival_ns))
        return CaptureTime(self._last_ns, clock)
