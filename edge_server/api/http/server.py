"""HttpServer: everything that is served over HTTP, on one thread with one event loop."""

from __future__ import annotations

import asyncio
import logging
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edge_server.api.certificates import CertificateWatch
from edge_server.api.http.connection import Connections
from edge_server.board.listening import host_and_port, listener, remedy
from edge_server.errors import Unavailable
from edge_server.process.threads import Worker
from edge_server.settings import Http, Tls

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp

    from edge_server.api.certificates import CertificateFiles
    from edge_server.api.http.page.state import PageSources
    from edge_server.api.http.rest.api import RestApi
    from edge_server.api.http.sources import Sources
    from edge_server.settings import Settings

log = logging.getLogger(__name__)

_TICK_S = 1.0
# Certificates are looked at for renewed ones.
_RENEW_EVERY_S = 2.0
# For handlers that use `asyncio.to_thread`.
_THREADS = 8


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


@dataclass(frozen=True)
class HttpListener:
    """One address, and what is served there.

    Attributes:
        name: of its flags: `http` or `metrics`.
        routes: called once, on the server's thread, when the first client connects: whatever it
            imports costs no time before the daemon is ready, and no memory where nobody looks.
        limits: of the connections, and `host_names`; the rest of `Http` is for the routes.
    """

    name: str
    host: str
    port: int
    routes: Callable[[], Sequence[BaseRoute]]
    tls: Tls = field(default_factory=Tls)
    limits: Http = field(default_factory=Http)

    def application(self) -> ASGIApp:
        from edge_server.api.http.call import application  # noqa: PLC0415 - at first use

        return application(self.name, self.routes(), self.limits)


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

    named = Http(host_names=http.host_names)
    return [
        *([HttpListener("http", http.host, http.port, everything, http.tls, http)] * http.enabled),
        *(
            [HttpListener("metrics", metrics.host, metrics.port, metrics_only, limits=named)]
            * metrics.enabled
        ),
    ]


class HttpServer:
    """Serves `listeners`; no client delays another, or anything else in this process.

    The constructor binds the ports; requests are served after `start`.

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
        self._loop = _Loop((), {}, {})

    @property
    def worker(self) -> Worker:
        """The present thread."""
        return self._loop.worker

    @property
    def open_connections(self) -> int:
        return sum(len(each.open) for each in self._loop.connections)

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
            where = host_and_port(each.host, self.port_of(each.name))
            log.info("%s: listening on %s://%s", each.name, scheme, where)

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
    """One thread with one event loop, which serves `listeners` at `sockets` until its end."""

    def __init__(
        self,
        listeners: Iterable[HttpListener],
        sockets: Mapping[str, socket.socket],
        encryption: Mapping[str, Encryption],
    ) -> None:
        self.worker = Worker("http", self._tick, on_end=self._end)
        self.connections = [
            Connections(
                sockets[each.name], each.application, encryption.get(each.name), each.limits
            )
            for each in listeners
        ]
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
                self._loop.call_soon_threadsafe(self._stopping.set)

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

    async def _serve(self) -> None:
        """Serve until the stop; return once every connection is closed."""
        waits = (*(each.serve() for each in self.connections), self._stopping.wait())
        tasks = [self._loop.create_task(each) for each in waits]
        for done in (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]:
            done.result()
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
        await asyncio.gather(*(each.end(self._grace_s) for each in self.connections))

    def _end(self) -> None:
        self._stopping.set()
        self._loop.run_until_complete(asyncio.wait({self._serving}))
        self._loop.run_until_complete(_cancel_all())
        self._loop.close()
        for bound in self._sockets.values():
            bound.close()


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


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)  # the connections close in the loop's next round
