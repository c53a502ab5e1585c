"""A mark in a stream: reached when all work before it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_server.gpu.device import Device
    from edge_server.gpu.stream import Stream


class Event:
    """A mark that streams set and that streams and threads wait for; made by `Device.event`.

    It stands for where it was set last; one that never was counts as reached.

    Attributes:
        stream: in which it was set last.
    """

    def __init__(self, device: Device, *, timed: bool = False, spin: bool = False) -> None:
        self.device = device
        self.stream: Stream | None = None
        flags = device.driver.event_flags
        chosen = 0 if timed else int(flags.DISABLE_TIMING)
        if not spin:
            chosen |= int(flags.BLOCKING_SYNC)
        with device.current("make an event"):
            self._box = device.hold(self, device.driver.Event(chosen))

    def record(self, stream: Stream) -> Event:
        """Set the mark behind the work that `stream` holds now; this event."""
        with self.device.current("record an event"):
            self._box[0].record(stream.raw)
        self.stream = stream
        return self

    def wait(self) -> None:
        """Return when the mark is reached: this thread waits, not a stream.

        Raises:
            DeviceLost: work before it broke the device.
        """
        with self.device.current("wait for an event"):
            self._box[0].synchronize()

    def reached(self) -> bool:
        """Whether the mark is reached; never waits.

        Raises:
            DeviceLost: work before it broke the device.
        """
        with self.device.current("ask for an event"):
            done: bool = self._box[0].query()
        return done

    def ms_since(self, earlier: Event) -> float:
        """Device time between two timed events that are reached, in milliseconds."""
        with self.device.current("measure time"):
            passed_ms: float = self._box[0].time_since(earlier.raw)
        return passed_ms

    @property
    def raw(self) -> Any:
        """pycuda's, for this package only."""
        return self._box[0]
