"""Device memory with the events that order its reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.errors import InternalError
from edge_server.gpu.event import Event

if TYPE_CHECKING:
    from edge_server.gpu.device import Device
    from edge_server.gpu.stream import Stream


class Buffer:
    """Device memory whose accesses streams order by events; no thread waits.

    Args:
        owner: keeps the memory alive as long as this buffer lives.
    """

    def __init__(self, device: Device, pointer: int, nbytes: int, owner: object) -> None:
        self.device = device
        self.pointer = pointer
        self.nbytes = nbytes
        self._owner = owner
        self._ready = Event(device)
        self._written = False
        self._readers: list[Event] = []

    @property
    def ready(self) -> Event:
        """The event after which the buffer may be read.

        Raises:
            InternalError: `written` was not called.
        """
        if not self._written:
            raise InternalError(
                f"{self.device}: {self.nbytes} bytes are read that nothing was written to"
            )
        return self._ready

    def written(self, stream: Stream) -> None:
        """Record that the work which `stream` holds now writes the buffer."""
        self._ready.record(stream)
        self._written = True

    def read_by(self, event: Event) -> None:
        """Record that a reader is done after `event`, which may be recorded again later, but not
        withdrawn."""
        if event not in self._readers:
            self._readers.append(event)

    def reuse(self, stream: Stream) -> None:
        """Order `stream`'s next write after all readers, and after the last writer."""
        if self._written:
            if self._ready.stream is not stream:
                stream.wait(self._ready)
            for event in self._readers:
                stream.wait(event)
        self._readers.clear()
        self._written = False
