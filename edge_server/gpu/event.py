"""A CUDA event: reached when all earlier work in its stream is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_server.gpu.device import Device
    from edge_server.gpu.stream import Stream


class Event:
    """A mark that streams record, and that streams and threads wait for; made by `Device.event`.

    The event stands for its last record; an event never recorded counts as reached.

    Attributes:
        stream: the stream of the last record.
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
        """Record the event behind the work that `stream` holds now; return the event."""
        with self.device.current("record an event"):
            self._box[0].record(stream.raw)
        self.stream = stream
        return self

    def wait(self) -> None:
        """Block this thread until the event is reached.

        Raises:
            DeviceLost: earlier work broke the device.
        """
        with self.device.current("wait for an event"):
            self._box[0].synchronize()

    def reached(self) -> bool:
        """Return whether the event is reached; never waits.

        Raises:
            DeviceLost: earlier work broke the device.
        """
        with self.device.current("ask for an event"):
            done: bool = self._box[0].query()
        return done

    def ms_since(self, earlier: Event) -> float:
        """Return the device time between two reached, timed events, in milliseconds."""
        with self.device.current("measure time"):
            passed_ms: float = self._box[0].time_since(earlier.raw)
        return passed_ms

    @property
    def raw(self) -> Any:
        """pycuda's event, for this package only."""
        return self._box[0]
