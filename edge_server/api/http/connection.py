"""Connections: a listener's clients, bounded in number, time and bytes. uvicorn parses what they
send, and bounds none of it: the transport that uvicorn sees is an `HttpConnection`."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from email.utils import formatdate
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    from starlette.types import ASGIApp

    from edge_server.api.http.server import Encryption
    from edge_server.settings import Http

# After a connection that cannot be accepted, as without a free file descriptor.
_RETRY_S = 0.5
# Interval at which deadlines are looked at.
_LOOK_S = 0.1
_READ_BYTES = 16 * 1024
_READ_BODY_BYTES = 256 * 1024
# Of what may be many small requests or frames, one round of the loop parses so much: a request
# costs 13 kB before anything of it runs, a frame 15 us.
_PART_BYTES = 1024
# A WebSocket's client that reads nothing for so long is gone; phones have pauses of seconds.
READ_S = 10.0
# In which TLS says that it closes.
_FAREWELL_S = 0.1
_LONGEST_MESSAGE_BYTES = 64 * 1024  # of a WebSocket's client


class Connections:
    """The connections to the socket `bound`; used on the loop's thread.

    Args:
        app: returns what serves them; called when the first client connects.
        encryption: of new connections; None encrypts none.
        limits: of each, and of their number: one more ends the one that has kept the server
            waiting longest.

    Attributes:
        open: those with a handshake that is not done included.
        waiting: those whose client has not sent a whole request, the longest first.
    """

    def __init__(
        self,
        bound: socket.socket,
        app: Callable[[], ASGIApp],
        encryption: Encryption | None,
        limits: Http,
    ) -> None:
        self.limits = limits
        self.timeout_s = limits.message_timeout_ms / 1e3
        self.open: set[HttpConnection] = set()
        self.waiting: dict[HttpConnection, None] = {}
        self.protocol: Callable[[HttpConnection], Any]
        self._bound = bound
        self._app = app
        self._encryption = encryption
        self._retry: asyncio.TimerHandle | None = None
        self._state: Any = None

    async def serve(self) -> None:
        """Accept connections until it is cancelled; then `end` the open ones."""
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        try:
            loop.add_reader(self._bound, came.set)
            await came.wait()
            self._load()
            loop.add_reader(self._bound, self._accept)
            while True:
                self._look(loop.time())
                await asyncio.sleep(_LOOK_S)
        finally:
            if self._retry is not None:
                self._retry.cancel()
            loop.remove_reader(self._bound)

    async def end(self, grace_s: float) -> None:
        """Close each connection with the answer to its present request; cut off what is left."""
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_s
        for each in tuple(self.open):
            each.shutdown()
        while (self.open or (self._state and self._state.tasks)) and loop.time() < until:
            self._look(loop.time())
            await asyncio.sleep(_LOOK_S / 10)
        for each in tuple(self.open):
            each.abort()

    def _load(self) -> None:
        """Import all that is served: not needed to start, nor where nobody asks over HTTP."""
        from uvicorn import Config  # noqa: PLC0415
        from uvicorn.server import ServerState  # noqa: PLC0415

        config = Config(
            self._app(),
            http="httptools",
            ws="websockets-sansio",
            ws_max_size=_LONGEST_MESSAGE_BYTES,
            ws_per_message_deflate=False,
            lifespan="off",
            interface="asgi3",
            # What goes wrong in a handler, the application logs; what clients do wrong, nobody.
            log_config=None,
            log_level="critical",
            access_log=False,
            # No proxy: ignore X-Forwarded-For.
            proxy_headers=False,
            # uvicorn counts whole seconds.
            timeout_keep_alive=max(1, self.limits.idle_timeout_ms // 1000),
        )
        config.load()
        self._state = state = ServerState()
        self.protocol = lambda connection: config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=state, app_state={"connection": connection}
        )

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            accepted, _ = self._bound.accept()
        except (BlockingIOError, ConnectionError):  # it is gone already
            return
        except OSError:
            loop.remove_reader(self._bound)
            self._retry = loop.call_later(_RETRY_S, loop.add_reader, self._bound, self._accept)
            return
        accepted.setblocking(False)
        if len(self.open) >= self.limits.max_connections:
            oldest = next(iter(self.waiting), None)
            if oldest is None:
                accepted.close()
                return
            oldest.abort()
        HttpConnection(self, accepted, self._encryption.context if self._encryption else None)

    def _look(self, now: float) -> None:
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        for each in tuple(self.open):
            if now > each.ends_at:
                each.abort()


class _Phase(Enum):
    """What is expected of a client, as far as the application has said."""

    HEADER = auto()  # of its next request, which may never come
    BODY = auto()
    ANSWER = auto()  # that it reads it; what it sends already stays unparsed
    SOCKET = auto()  # frames, at any time
    SOCKET_OVER = auto()  # that it closes the WebSocket, too


class HttpConnection(asyncio.BufferedProtocol, asyncio.Transport):
    """One client: the protocol of its transport, and the transport of uvicorn's protocols.

    It is cut off, without a response, where its client passes a limit. Of a client that does not
    read, nothing is read.

    What was read is parsed part by part, one in each round of the loop (`_parse`), while nothing
    is in the way (`_waits`); only then the next bytes are read (`_read_on`).
    """

    def __init__(
        self, others: Connections, accepted: socket.socket, context: ssl.SSLContext | None
    ) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._others = others
        self._transport: asyncio.Transport | None = None
        self._protocol: Any = None  # uvicorn's, of HTTP or of WebSockets
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._left = self._buffer[:0]  # has been read, and not parsed
        self._unconfirmed_bytes = 0  # were parsed, and nothing has come of them yet
        self._phase = _Phase.HEADER
        self._body_left: int | None = 0  # of a declared length; None is chunked
        self._is_held = False  # by uvicorn
        self._is_unread = False  # what was written, by the client
        self._is_parsing = self._is_paused = False
        self._when_lost: Callable[[], None] | None = None
        self._wrote_at = -math.inf
        self._sends_by = self._reads_by = math.inf
        others.open.add(self)
        self._await_client()
        self._opening = self._loop.create_task(self._open(accepted, context))

    @property
    def ends_at(self) -> float:
        """When it is cut off, by the loop's clock."""
        return min(self._sends_by, self._reads_by)

    def begin(self, when_lost: Callable[[], None] | None = None, *, body_bytes: int | None) -> None:
        """Note that the application serves a request, whose header is complete.

        Args:
            when_lost: is called where the connection ends before `end`.
            body_bytes: the length of the body that is to come; None is chunked.
        """
        self._unconfirmed_bytes = 0
        self._body_left = body_bytes
        self._when_lost = when_lost
        if body_bytes == 0:
            self._has_sent(_Phase.ANSWER)
            return
        self._phase = _Phase.BODY
        self._await_client()
        if body_bytes and body_bytes > _READ_BYTES:
            self._buffer = memoryview(bytearray(_READ_BODY_BYTES))  # `_left` keeps its own view

    def begin_web_socket(self) -> None:
        self._has_sent(_Phase.SOCKET)

    def receive(self, *, more: bool) -> None:
        """Note that a part of the body has come, and whether `more` is to come."""
        self._unconfirmed_bytes = 0
        if not more:
            self._has_sent(_Phase.ANSWER)

    def end(self) -> None:
        """Note that the request is answered, or the WebSocket no longer served."""
        self._when_lost = None
        if len(self._buffer) > _READ_BYTES:
            self._buffer = memoryview(bytearray(_READ_BYTES))
        if self in self._others.open:
            self._others.waiting[self] = None
        if self._phase is _Phase.SOCKET:
            # What its client had sent before is parsed for its farewell.
            self._phase = _Phase.SOCKET_OVER
            self._unconfirmed_bytes = 0
            self._sends_by = self._loop.time() + READ_S
        else:
            self._phase = _Phase.HEADER
            if self._unconfirmed_bytes:
                self._await_client()
        self._read_on()

    def shutdown(self) -> None:
        """Close the connection, or have its response be the last one."""
        if self._transport is None:
            self.abort()
        else:
            self._protocol.shutdown()

    # The transport of uvicorn's protocols.

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """WebSockets follow HTTP; not while a request is being answered."""
        cycle = self._protocol.cycle  # its task may not have begun
        self._protocol = protocol
        is_answered = cycle is None or cycle.response_complete
        if self._phase is not _Phase.HEADER or not is_answered:
            self.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default if self._transport is None else self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def pause_reading(self) -> None:
        self._is_held = True
        self._read_on()

    def resume_reading(self) -> None:
        self._is_held = False
        self._read_on()

    def write(self, data: Any) -> None:
        if self._transport is not None and self in self._others.open:
            self._wrote_at = self._loop.time()
            self._transport.write(data)

    def close(self) -> None:
        """Close it once what was written is sent. A client of TLS that is idle need not confirm
        the end; what was sent just now, it may still read."""
        read_by = self._wrote_at + self._others.timeout_s
        self._reads_by = min(self._reads_by, max(self._loop.time() + _FAREWELL_S, read_by))
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close it at once, whatever has not been sent."""
        self._forget()
        if self._transport is None:
            self._opening.cancel()
        else:
            self._transport.abort()

    # The protocol of its transport.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._protocol = self._others.protocol(self)
        self._protocol.connection_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        if self._when_lost is not None:
            self._when_lost()
        self._protocol.connection_lost(exc)

    def eof_received(self) -> None:
        self._protocol.eof_received()

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._phase is _Phase.HEADER and self._sends_by == math.inf:
            self._await_client()
        self._left = self._buffer[:nbytes]
        # A transport that is not paused would give all that has come, and others would wait.
        self._parse(pause=nbytes == len(self._buffer))

    def pause_writing(self) -> None:
        is_socket = self._phase in (_Phase.SOCKET, _Phase.SOCKET_OVER)
        timeout_s = READ_S if is_socket else self._others.timeout_s
        self._reads_by = min(self._reads_by, self._loop.time() + timeout_s)
        self._is_unread = True
        self._read_on()
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if not self.is_closing():
            self._reads_by = math.inf
        self._is_unread = False
        self._read_on()
        self._protocol.resume_writing()

    async def _open(self, accepted: socket.socket, context: ssl.SSLContext | None) -> None:
        try:
            # What a client does wrong is not worth a line.
            with suppress(OSError, asyncio.TimeoutError):
                await self._loop.connect_accepted_socket(lambda: self, accepted, ssl=context)
        finally:
            if self._transport is None:
                self._forget()
                accepted.close()

    @property
    def _waits(self) -> bool:
        """Whether nothing is parsed now: uvicorn, the client, or the present request is in the
        way, whose successors would pile up in uvicorn."""
        return self._is_held or self._is_unread or self._phase is _Phase.ANSWER

    def _parse(self, *, pause: bool = False) -> None:
        """Have a part of what was read parsed, and the rest in the next rounds of the loop."""
        self._is_parsing = False
        if self._left and not (self._waits or self.is_closing()):
            # The parser keeps a name or a value until it is complete, that of a trailer too.
            if self._unconfirmed_bytes > self._others.limits.max_header_bytes:
                self.abort()
                return
            many = _PART_BYTES
            if self._phase is _Phase.BODY:
                many = _READ_BYTES if self._body_left is None else max(many, self._body_left)
            part, self._left = bytes(self._left[:many]), self._left[many:]
            if self._phase is _Phase.BODY and self._body_left:
                self._body_left = max(0, self._body_left - len(part))
            if self._phase is not _Phase.SOCKET:
                self._unconfirmed_bytes += len(part)
            self._protocol.data_received(part)
        self._read_on(pause=pause)

    def _read_on(self, *, pause: bool = False) -> None:
        """Parse what is left, and then read, where uvicorn takes it and the client reads."""
        if self._transport is None or self.is_closing():
            return
        if (pause or (self._left and not self._waits)) and not self._is_parsing:
            self._is_parsing = True
            self._loop.call_soon(self._parse)
        pauses = self._is_held or self._is_unread or self._is_parsing or len(self._left) > 0
        if pauses is not self._is_paused:
            self._is_paused = pauses
            (self._transport.pause_reading if pauses else self._transport.resume_reading)()

    def _await_client(self) -> None:
        if self in self._others.open:
            self._others.waiting.setdefault(self)
        self._sends_by = self._loop.time() + self._others.timeout_s

    def _has_sent(self, phase: _Phase) -> None:
        """Note that the client has sent all that `phase` needs of it."""
        self._phase = phase
        self._others.waiting.pop(self, None)
        self._sends_by = math.inf

    def _forget(self) -> None:
        self._others.waiting.pop(self, None)
        self._others.open.discard(self)
