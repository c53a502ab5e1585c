"""BoundedProtocol: uvicorn's HTTP/1.1 connection, bounded in number, time, requests and bytes.

uvicorn itself closes neither a connection that is silent, nor one that has sent half a request,
nor one whose client does not read; a header may have any length, and a read any number of requests.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from edge_server.api.http.call import HttpCall

if TYPE_CHECKING:
    from asyncio import TimerHandle, Transport

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from edge_server.api.admission import ByteBudget

# What one round of the loop reads of a connection: the longest header as a rule. A frame of a
# WebSocket may have six bytes, and costs Python 15 us.
_READ_BYTES = 16 * 1024
_READ_FRAMES_BYTES = 2 * 1024
_DISCARD_BYTES = 256 * 1024
# Requests of one connection that are not answered; each costs 13 kB before anything of it runs.
_MOST_UNANSWERED = 32
# In which TLS says that it closes.
_FAREWELL_S = 0.1


class _OpenConnection(Protocol):
    def cut_off(self) -> None: ...


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits of all connections of one listener.

    Attributes:
        connections: one more ends the connection that has kept the server waiting longest.
        message_timeout_s: for a request's header, again for its body, and again for the client to
            read what was sent.
        header_bytes: of one request, its first line included.
        body_bytes: of one request.
        budget: counts the bodies of all requests in flight.
        waiting: the connections whose client has not sent a whole request, or has not closed its
            WebSocket, the longest first.
    """

    connections: int
    message_timeout_s: float
    header_bytes: int
    body_bytes: int
    budget: ByteBudget
    waiting: dict[_OpenConnection, None] = field(default_factory=dict, compare=False)


class _Unanswered(NamedTuple):
    """A request that is not answered yet; of a client's several, the first one runs."""

    cycle: RequestResponseCycle
    call: HttpCall


class _Connection(Protocol):
    """What `BoundedReads` reads for."""

    @property
    def holds(self) -> bool:
        """Whether it takes nothing now."""
        ...

    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class BoundedReads(asyncio.BufferedProtocol):
    """Stands between a transport and a connection, which gets a short read in each round of the
    loop: a transport alone would give it all that has arrived, and the others would wait.

    Args:
        connection: for what is read.
        most_bytes: of one read.
        transport: of a connection that is made already.
    """

    def __init__(
        self, connection: _Connection, most_bytes: int, transport: Transport | None = None
    ) -> None:
        self._connection = connection
        self._transport = transport
        self._buffer = memoryview(bytearray(most_bytes))

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # of a stream
        self._transport = transport
        cast("BoundedProtocol", self._connection).connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        transport = self._transport
        self._connection.data_received(bytes(self._buffer[:nbytes]))
        if nbytes == len(self._buffer) and transport is not None and not transport.is_closing():
            transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_on)

    def eof_received(self) -> None:
        self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def _read_on(self) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing() and not self._connection.holds:
            transport.resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """One connection; it is cut off, without a response, where its client passes a limit.

    Args:
        limits: shared by the connections of a listener.

    Attributes:
        reads: the transport's protocol, which reads for this one.
    """

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reads = BoundedReads(self, _READ_BYTES)
        self._limits = limits
        self._in_header = True
        self._header_bytes = 0  # parsed
        self._unparsed_bytes = 0  # what arrived since the last request or part of a body
        self._call: HttpCall | None = None
        self._unanswered: deque[_Unanswered] = deque()
        self._sending: TimerHandle | None = None
        self._reading: TimerHandle | None = None
        self._responded_at = -math.inf  # by the loop's clock

    @property
    def holds(self) -> bool:
        return self.flow.read_paused

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn's
        limits = self._limits
        if len(self.connections) >= limits.connections:
            oldest = next(iter(limits.waiting), None)
            if oldest is None:
                transport.abort()
            else:
                oldest.cut_off()
        super().connection_made(transport)
        limits.waiting[self] = None
        self._await_client()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timers()
        self._limits.waiting.pop(self, None)
        # uvicorn tells the last request alone, and never starts those that wait.
        for place, (cycle, call) in enumerate(self._unanswered):
            cycle.disconnected = True
            cycle.message_event.set()
            call.cancel()
            if place:
                call.release()
        self._unanswered.clear()
        super().connection_lost(exc)

    def cut_off(self) -> None:
        """Close the connection at once, whatever has not been sent."""
        self._limits.waiting.pop(self, None)
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._sending is None and self in self._limits.waiting:
            self._await_client()
        # The parser keeps a name or a value until it is complete, however long it grows, that of a
        # trailer too. The last read may have more than the header.
        self._unparsed_bytes += len(data)
        if self._unparsed_bytes >= self._limits.header_bytes + _READ_BYTES:
            self.cut_off()
            return
        super().data_received(data)
        call = self._call
        if call is not None and not self._in_header and call.left:
            self.transport.set_protocol(_BodyReader(self, call))

    def on_message_begin(self) -> None:
        if len(self._unanswered) >= _MOST_UNANSWERED:
            self.cut_off()
        super().on_message_begin()
        self._header_bytes = 0
        if self._sending is None:
            self._await_client()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():
            return
        self._in_header = False
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            self.send_400_response("Only HTTP/1.0 and HTTP/1.1 are served.")
            return
        length = _body_length(self.headers)
        if self.parser.should_upgrade() and self._should_upgrade():
            if length != 0 or self._unanswered:
                self.send_400_response("A WebSocket begins without a body, and after all answers.")
                return
            self._call = None
            super().on_headers_complete()
            return
        self._call = call = HttpCall(length, self._limits.body_bytes, self._limits.budget)
        call.put_into(cast("dict[str, Any]", self.scope))
        try:
            super().on_headers_complete()
        except BaseException:  # the address is none
            call.release()
            raise
        self._unanswered.append(_Unanswered(self.cycle, call))
        self._await_client()

    def on_body(self, body: bytes) -> None:
        """Keep the body in one buffer; uvicorn would keep copies, and pause the client for them."""
        self._unparsed_bytes = 0
        call = self._call
        if call is None or self.transport.is_closing() or self.cycle.response_complete:
            return
        call.add(body)
        if call.refusal is not None:
            self.cycle.message_event.set()

    def body_read(self) -> None:
        """Go on after a body that the parser has not seen: with a parser of its own."""
        self.transport.set_protocol(self.reads)
        self.parser = httptools.HttpRequestParser(self)
        self.on_message_complete()

    def on_message_complete(self) -> None:
        self._in_header = True
        self._unparsed_bytes = 0
        if not self.transport.is_closing():
            self._client_has_sent()
            if self._call is not None:
                self._call.complete()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        self._responded_at = self.loop.time()
        super().on_response_complete()
        if self.transport.is_closing():
            # What was sent must still reach the client.
            self._await_client()
        elif not self.pipeline:
            self._limits.waiting[self] = None

    def handle_websocket_upgrade(self) -> None:
        if self.transport.is_closing():  # it was refused
            return
        self._forget_timers()
        self._limits.waiting.pop(self, None)
        if self.transport.is_closing():
            return
        named = dict(self.headers)
        # What is no handshake (RFC 6455, 4.2.1) would be waited for for ever.
        if (
            self.scope["method"] == "GET"
            and self.scope["http_version"] == "1.1"
            and b"sec-websocket-key" in named
            and not named.keys() & {b"content-length", b"transfer-encoding"}
        ):
            super().handle_websocket_upgrade()
            made = self.transport.get_protocol()
            self.transport.set_protocol(
                BoundedReads(cast("_Connection", made), _READ_FRAMES_BYTES, self.transport)
            )
        else:
            self.send_400_response("Invalid WebSocket handshake.")

    def shutdown(self) -> None:
        """Close the connection, or have its response be the last one. A client of TLS that is idle
        need not confirm the end; what was sent, it may still read."""
        super().shutdown()
        if self.transport.is_closing():
            read_by = self._responded_at + self._limits.message_timeout_s
            self._await_client(max(_FAREWELL_S, read_by - self.loop.time()))

    def timeout_keep_alive_handler(self) -> None:
        self.cut_off()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reading is None:
            self._reading = self.loop.call_later(self._limits.message_timeout_s, self.cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _count(self, length: int) -> None:
        self._header_bytes += length
        if self._header_bytes > self._limits.header_bytes:
            self.cut_off()

    def _await_client(self, timeout_s: float | None = None) -> None:
        if self._sending is not None:
            self._sending.cancel()
        if timeout_s is None:
            timeout_s = self._limits.message_timeout_s
        self._sending = self.loop.call_later(timeout_s, self.cut_off)

    def _client_has_sent(self) -> None:
        self._limits.waiting.pop(self, None)
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _forget_timers(self) -> None:
        for timer in (self._sending, self._reading):
            if timer is not None:
                timer.cancel()
        self._sending = self._reading = None


class _BodyReader(asyncio.BufferedProtocol):
    """Takes the place of a connection's protocol while the rest of a large body arrives: the kernel
    writes it where it stays. Through the parser each byte would be copied twice."""

    def __init__(self, connection: BoundedProtocol, call: HttpCall) -> None:
        self._connection = connection
        self._call = call
        self._left = call.left
        self._discarded = memoryview(b"")

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        if self._call.left:
            return self._call.missing
        # The request has been answered already.
        self._discarded = self._discarded or memoryview(bytearray(_DISCARD_BYTES))
        return self._discarded[: self._left]

    def buffer_updated(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._call.left:
            self._call.advance(nbytes)
        if not self._left:
            self._connection.body_read()

    def eof_received(self) -> None:
        self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


def _body_length(headers: list[tuple[bytes, bytes]]) -> int | None:
    """Return the declared length of a body, 0 without one; None of a chunked one. The parser has
    seen to it that they are valid."""
    length = 0
    for name, value in headers:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            length = int(value)
    return length


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
