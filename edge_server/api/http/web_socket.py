"""BoundedWebSocket: uvicorn's WebSocket connection, ended where its client does not read.

uvicorn itself answers pings without end, and closes a connection only once its client has read all
that was sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

if TYPE_CHECKING:
    import asyncio
    from asyncio import TimerHandle

    from edge_server.api.http.protocol import ConnectionLimits

# A client that reads nothing for so long is gone; phones have pauses of seconds.
READ_S = 10.0


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """One WebSocket.

    Args:
        limits: shared by the connections of a listener. A socket that nobody serves any more
            makes room for another.
    """

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._reading: TimerHandle | None = None
        self._ending: TimerHandle | None = None

    @property
    def holds(self) -> bool:
        return self.read_paused

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.waiting.pop(self, None)
        for timer in (self._reading, self._ending):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def cut_off(self) -> None:
        """Close the connection at once, whatever has not been sent."""
        self._limits.waiting.pop(self, None)
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reading is None:
            self._reading = self.loop.call_later(READ_S, self.cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def handle_ping(self) -> None:
        super().handle_ping()
        if not self.writable.is_set():
            # Its answers would pile up.
            self.transport.pause_reading()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        if not self.disconnected:
            self._limits.waiting[self] = None
            self._ending = self.loop.call_later(READ_S, self.cut_off)
