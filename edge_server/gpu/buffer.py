"""Memory with what must be waited for before it is read, and before it is written again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.errors import InternalError
from edge_server.gpu.event import Event

if TYPE_CHECKING:
    from edge_server.gpu.device import Device
    from edge_server.gpu.stream import Stream


class Buffer:
    """Device memory in the order of streams: nobody waits for it on the CPU.

    Args:
        owner: keeps the memory alive for as long as this lives.
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
        """The event after which it may be read.

        Raises:
            InternalError: nobody has said `written`.
        """
        if not self._written:
            raise InternalError(
                f"{self.device}: {self.nbytes} bytes are read that nothing was written to"
            )
        return self._ready

    def written(self, stream: Stream) -> None:
        """All that `stream` holds now is what writes it."""
        self._ready.record(stream)
        self._written = True

    def read_by(self, event: Event) -> None:
        """Who reads it is through after `event`; it may be set anew later, but not taken back."""
        if event not in self._readers:
            self._readers.append(event)

    def reuse(self, stream: Stream) -> None:
        """Let `stream` write it next: after those who read it, and after who wrote it."""
        if self._written:
            if self._ready.stream is not stream:
                stream.wait(self._ready)
            for event in self._readers:
                stream.wait(event)
        self._readers.clear()
        self._written = False
