"""HttpServer: everything that is served over HTTP, on one thread with one event loop."""

from __future__ import annotations

import asyncio
import logging
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from edge_server.api.access import BrowserRule
from edge_server.api.admission import ByteBudget
from edge_server.api.certificates import CertificateWatch
from edge_server.board.listening import listener, remedy
from edge_server.errors import Unavailable
from edge_server.process.worker import Worker
from edge_server.settings import Http, Tls

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    import uvicorn
    from starlette.routing import BaseRoute

    from edge_server.api.certificates import CertificateFiles
    from edge_server.api.http.page.state import PageSources
    from edge_server.api.http.rest.api import RestApi
    from edge_server.api.http.sources import Sources
    from edge_server.settings import Settings

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


log = logging.getLogger(__name__)

_TICK_S = 1.0
# Certificates are looked at for renewed ones.
_RENEW_EVERY_S = 2.0
# For handlers that use `asyncio.to_thread`.
_THREADS = 8
# A message of a WebSocket client.
_LONGEST_MESSAGE_BYTES = 64 * 1024


@dataclass(frozen=True)
class HttpListener:
    """One address, and what is served there.

    Attributes:
        name: of its flags: `http` or `metrics`.
        port: 0 takes a free one.
        routes: called once, on the server's thread, when the first client connects: whatever it
            imports costs no time before the daemon is ready, and no memory where nobody looks.
        limits: of the connections; the rest of `Http` is for the routes.
        host_names: see `BrowserRule`.
    """

    name: str
    host: str
    port: int
    routes: Callable[[], Sequence[BaseRoute]]
    tls: Tls = field(default_factory=Tls)
    limits: Http = field(default_factory=Http)
    host_names: Sequence[str] = ()


def http_listeners(
    settings: Settings, rest: RestApi, sources: Sources, page: PageSources
) -> Sequence[HttpListener]:
    """Return the listeners of `[http]` and `[metrics]`: a topic's module returns its routes."""
    http, metrics = settings.http, settings.metrics

    def everything() -> Sequence[BaseRoute]:
        from edge_server.api.http.metrics import metrics_routes  # noqa: PLC0415 - at first use
        from edge_server.api.http.page.routes import page_routes  # noqa: PLC0415 - likewise
        from edge_server.api.http.rest.routes import rest_routes  # noqa: PLC0415 - likewise

        of_metrics = metrics_routes(sources, rest.rules) if metrics.enabled else ()
        return [*rest_routes(rest), *page_routes(page), *of_metrics]

    def metrics_only() -> Sequence[BaseRoute]:
        from edge_server.api.http.metrics import metrics_alone  # noqa: PLC0415 - at first use

        return metrics_alone(sources)

    listeners = []
    if http.enabled:
        listeners.append(
            HttpListener("http", http.host, http.port, everything, http.tls, http, http.host_names)
        )
    if metrics.enabled:
        listeners.append(
            HttpListener(
                "metrics", metrics.host, metrics.port, metrics_only, host_names=http.host_names
            )
        )
    return listeners


class HttpServer:
    """Serves `listeners`; no client delays another, or anything else in this process.

    The constructor binds the ports; requests are served after `start`. uvicorn and Starlette are
    imported when the first client connects.

    Raises:
        Unavailable: an address cannot be bound.
        SettingsError: a certificate is invalid.
    """

    def __init__(self, listeners: Sequence[HttpListener]) -> None:
        self._listeners = {each.name: each for each in listeners}
        self._sockets: dict[str, socket.socket] = {}
        self._encryption: dict[str, Encryption] = {}
        try:
            for each in listeners:
                self._sockets[each.name] = _bound(each)
                if each.tls.on:
                    self._encryption[each.name] = Encryption(each.name, each.tls)
        except BaseException:
            self._close()
            raise
        self._loop = _Loop(listeners, {}, self._encryption)

    @property
    def worker(self) -> Worker:
        """The present thread."""
        return self._loop.worker

    @property
    def servers(self) -> Sequence[uvicorn.Server]:
        """One for each listener, once a client has connected."""
        return self._loop.servers

    def port_of(self, name: str) -> int:
        """Return the port of the listener; 0 where there is no such listener."""
        if name not in self._sockets:
            return 0
        port: int = self._sockets[name].getsockname()[1]
        return port

    def start(self) -> None:
        if not self._listeners:
            return
        self._serve()
        for each in self._listeners.values():
            scheme = "https" if each.tls.on else "http"
            host = f"[{each.host}]" if ":" in each.host else each.host
            log.info(
                "%s: listening on %s://%s:%s", each.name, scheme, host, self.port_of(each.name)
            )

    def reopen(self) -> None:
        """Serve at the same ports with a new thread. The present one, which hangs or has died, ends
        with its connections as soon as it can.

        Raises:
            OSError: the system has no file descriptor left.
        """
        self._loop.ask_to_stop(0.0)
        self._serve()

    def stop(self, timeout_s: float) -> None:
        """Accept no more connections; give requests in flight `timeout_s` seconds to finish."""
        self._loop.ask_to_stop(timeout_s)
        self._loop.worker.stop(timeout_s + 2 * _TICK_S)
        self._close()

    def _serve(self) -> None:
        # Each loop closes its own.
        with ExitStack() as opened:
            sockets = {
                name: opened.enter_context(each.dup()) for name, each in self._sockets.items()
            }
            loop = _Loop(self._listeners.values(), sockets, self._encryption)
            loop.start()
            opened.pop_all()
        self._loop = loop

    def _close(self) -> None:
        for bound in self._sockets.values():
            bound.close()


class _Loop:
    """One thread with one event loop, which serves `listeners` at `sockets` until its end.

    Attributes:
        servers: one for each listener, once a client has connected.
    """

    servers: Sequence[uvicorn.Server] = ()

    def __init__(
        self,
        listeners: Iterable[HttpListener],
        sockets: Mapping[str, socket.socket],
        encryption: Mapping[str, Encryption],
    ) -> None:
        self.worker = Worker("http", self._tick, on_end=self._end)
        self._listeners = tuple(listeners)
        self._sockets = sockets
        self._encryption = encryption
        self._loop: asyncio.AbstractEventLoop  # from `start` on
        self._stopping: asyncio.Event
        self._serving: asyncio.Task[None]
        self._grace_s = 0.0
        self._renew_at = 0.0

    def start(self) -> None:
        self._loop = _new_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(_THREADS, "http-call"))
        self._stopping = asyncio.Event()
        self._serving = self._loop.create_task(self._serve())
        self.worker.start()

    def ask_to_stop(self, grace_s: float) -> None:
        """Accept no more connections, as soon as the thread can; return at once."""
        self._grace_s = grace_s
        self.worker.ask_to_stop()
        if self.worker.alive:
            with suppress(RuntimeError):  # the loop is closed by now
                self._loop.call_soon_threadsafe(self._ask_to_stop)

    def _tick(self, now: float) -> bool:
        if now >= self._renew_at:
            self._renew_at = now + _RENEW_EVERY_S
            for encryption in self._encryption.values():
                encryption.renew()
        self._loop.run_until_complete(asyncio.wait({self._serving}, timeout=_TICK_S))
        if self._serving.done():
            self._serving.result()
            return False
        return True

    def _ask_to_stop(self) -> None:
        """On the server's thread."""
        self._stopping.set()
        for server in self.servers:
            # The stub has whole seconds; `asyncio.wait_for` takes it.
            server.config.timeout_graceful_shutdown = self._grace_s  # type: ignore[assignment]
            server.should_exit = True

    def _end(self) -> None:
        self._ask_to_stop()
        self._loop.run_until_complete(asyncio.wait({self._serving}))
        self._loop.run_until_complete(_cancel_all())
        self._loop.close()
        for bound in self._sockets.values():
            bound.close()

    async def _serve(self) -> None:
        """Serve until the stop; return once every connection is closed."""
        if not await self._first_connection():
            return
        self.servers = [_server(each, self._encryption.get(each.name)) for each in self._listeners]
        if self._stopping.is_set():
            self._ask_to_stop()
        longest_ms = max(each.limits.message_timeout_ms for each in self._listeners)
        bound_handshakes(self._loop, longest_ms / 1e3)
        await asyncio.gather(
            *(
                server.serve([bound])
                for server, bound in zip(self.servers, self._sockets.values(), strict=True)
            )
        )

    async def _first_connection(self) -> bool:
        """Wait for a client at any of the sockets; return False when the server stops before."""
        came = asyncio.Event()
        for bound in self._sockets.values():
            self._loop.add_reader(bound, came.set)
        waits = [self._loop.create_task(event.wait()) for event in (came, self._stopping)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        for bound in self._sockets.values():
            self._loop.remove_reader(bound)
        return not self._stopping.is_set()


def _bound(each: HttpListener) -> socket.socket:
    """Return the socket of a listener.

    Raises:
        Unavailable: the address cannot be bound; the text has the remedy.
    """
    try:
        bound = listener(each.host, each.port, each.limits.max_connections)
    except OSError as error:
        raise Unavailable(
            f"{each.name} cannot listen on {each.host}:{each.port}: "
            f"{remedy(error, f'--{each.name}')}; or serve none with --allow-{each.name}=false"
        ) from error
    bound.setblocking(False)
    return bound


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return a loop of uvloop, which serves a third more requests, or asyncio's own."""
    try:
        import uvloop  # noqa: PLC0415 - absent on musl and PyPy
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _server(each: HttpListener, encryption: Encryption | None) -> uvicorn.Server:
    """Return uvicorn's server of a listener; imports all that it serves."""
    # Not needed to start, nor by an appliance that nobody asks over HTTP.
    import uvicorn  # noqa: PLC0415

    from edge_server.api.http.app import application  # noqa: PLC0415
    from edge_server.api.http.protocol import (  # noqa: PLC0415
        BoundedProtocol,
        BoundedWebSocket,
        ConnectionLimits,
    )

    limits = each.limits
    bounds = ConnectionLimits(
        limits.max_connections,
        limits.message_timeout_ms / 1e3,
        limits.max_header_bytes,
        limits.max_body_bytes,
        ByteBudget(
            max(limits.max_pending_bytes, 2 * limits.max_body_bytes), "http.max_pending_bytes"
        ),
    )
    config = uvicorn.Config(
        application(each.name, each.routes(), BrowserRule(each.host_names)),
        http=lambda **made: BoundedProtocol(limits=bounds, **made).reads,  # type: ignore[arg-type]  # is only called
        ws=partial(BoundedWebSocket, limits=bounds),  # type: ignore[arg-type]  # likewise
        ws_max_size=_LONGEST_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        lifespan="off",
        interface="asgi3",
        # What goes wrong in a handler, `application` logs; what clients do wrong, nobody.
        log_config=None,
        log_level="critical",
        access_log=False,
        workers=1,
        # Nobody stands between client and server whose word on the client's address would count.
        proxy_headers=False,
        server_header=False,
        backlog=limits.max_connections,
        # uvicorn counts whole seconds.
        timeout_keep_alive=max(1, limits.idle_timeout_ms // 1000),
    )
    config.load()
    # Only `bound_handshakes` takes it.
    config.ssl = encryption  # type: ignore[assignment]  # a context for each connection
    return uvicorn.Server(config)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)  # the connections close in the loop's next round
