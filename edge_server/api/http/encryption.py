"""TLS of the listeners: certificates that are renewed, handshakes bounded in number and time."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from edge_server.api.certificates import CertificateWatch

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from edge_server.api.certificates import CertificateFiles
    from edge_server.settings import Tls

# After a connection that cannot be accepted, as without a free file descriptor.
_RETRY_S = 0.5


class Encryption:
    """The certificates of a listener; renewed files are what new connections see.

    Attributes:
        context: for the next connection.
    """

    def __init__(self, name: str, tls: Tls) -> None:
        self._watch = CertificateWatch(tls, f"{name}.tls")
        self._loaded = self._watch.shown
        self.context = _context_of(self._loaded)

    def renew(self) -> None:
        """Read the files again; what is not valid leaves the certificates as they are."""
        self._watch.renewed()
        if (shown := self._watch.shown) is not self._loaded:
            # Without a free file descriptor, the next call tries again.
            with suppress(OSError):
                # A context keeps every authority that it was ever given, also one that is gone now.
                self.context = _context_of(shown)
                self._loaded = shown


def _context_of(files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    files.load_into(context)
    return context


def bound_handshakes(loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
    """Have servers of `loop` whose `ssl` is an `Encryption` be `_HandshakeServer`s, with as many
    handshakes as their backlog has connections: uvicorn has no setting for either bound."""
    create = loop.create_server

    async def create_server(factory: Callable[[], asyncio.Protocol], **options: Any) -> Any:
        encryption = options.get("ssl")
        if encryption is None:
            return await create(factory, **options)

        def greet(connection: socket.socket) -> Awaitable[object]:
            return loop.connect_accepted_socket(
                factory, connection, ssl=encryption.context, ssl_handshake_timeout=timeout_s
            )

        return _HandshakeServer(loop, options["sock"], greet, options["backlog"])

    # What uvicorn passes is all that this one takes.
    loop.create_server = create_server  # type: ignore[method-assign, assignment]


class _HandshakeServer:
    """Accepts connections and waits for their handshakes: one more than `most` ends the oldest.

    A server of asyncio gives a connection to its protocol after the handshake; what it waits for
    before, nothing counts, and the file descriptors are those of the whole daemon.

    Args:
        greet: does the handshake on an accepted connection, and hands it to its protocol.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        bound: socket.socket,
        greet: Callable[[socket.socket], Awaitable[object]],
        most: int,
    ) -> None:
        self._loop = loop
        self._bound = bound
        self._greet = greet
        self._most = most
        self._handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._accepting = loop.create_task(self._accept())

    def close(self) -> None:
        """Accept no more connections, and end handshakes that are not done."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.wait({self._accepting, *self._handshakes})

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._bound)
            except ConnectionError:  # it is gone already
                await asyncio.sleep(0)
                continue
            except OSError:
                await asyncio.sleep(_RETRY_S)
                continue
            if len(self._handshakes) >= self._most:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()
            task = self._loop.create_task(self._shake_hands(connection))
            self._handshakes[task] = None
            task.add_done_callback(lambda done: self._handshakes.pop(done, None))
            # The handshake begins, and other connections have their turn.
            await asyncio.sleep(0)

    async def _shake_hands(self, connection: socket.socket) -> None:
        # What a client does wrong is not worth a line; the transport closes its connection.
        with suppress(OSError, asyncio.TimeoutError):
            await self._greet(connection)
