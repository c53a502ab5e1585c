"""MetricsServer: a small HTTP server for Prometheus, bounded in everything."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from edge_server.board.listening import listener, remedy
from edge_server.errors import Unavailable
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from edge_server.api.http.exposition import Exposition
    from edge_server.api.http.sources import Sources
    from edge_server.settings import Metrics

log = logging.getLogger(__name__)

# Limit of concurrent connections; one more drops the connection that has been silent longest.
MOST_CONNECTIONS = 32
# A connection is dropped if its request, or the reading of its response, takes longer.
_TIMEOUT_S = 1.0
_TICK_S = 0.5
_LONGEST_REQUEST_BYTES = 8192


class MetricsServer:
    """Serves `GET /metrics`, and nothing else, on its own thread.

    Up to `MOST_CONNECTIONS` connections are served concurrently, each for `_TIMEOUT_S` to send its
    request and as long to read the response, and for one request: no client delays another, however
    silent or slow it is.

    The constructor binds the port; requests are served after `start`.

    Raises:
        Unavailable: the address cannot be bound.
    """

    def __init__(self, settings: Metrics, sources: Sources) -> None:
        self.worker = Worker("metrics", self._tick, on_end=self._end)
        self._sources = sources
        self._exposition: Exposition | None = None
        self._loop: asyncio.AbstractEventLoop  # from `start` on
        self._accepting: asyncio.Task[None]
        # The oldest first; and those of them whose request is not complete.
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._silent: dict[asyncio.StreamWriter, None] = {}
        try:
            self._listener = listener(settings.host, settings.port, MOST_CONNECTIONS)
        except OSError as error:
            raise Unavailable(
                f"metrics cannot listen on {settings.host}:{settings.port}: "
                f"{remedy(error, '--metrics')}; or serve none with --allow-metrics=false"
            ) from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self._url = f"http://{host}:{self.port}/metrics"

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._accepting = self._loop.create_task(self._accept())
        self.worker.start()
        log.info("metrics: listening on %s", self._url)

    def stop(self, timeout_s: float) -> None:
        """Serve no more requests; a tick in progress gets `timeout_s` seconds."""
        self.worker.ask_to_stop()
        self._refuse_connections()
        self.worker.stop(timeout_s)
        if not self.worker.alive:
            self._listener.close()

    def _tick(self, now: float) -> bool:
        del now
        self._loop.run_until_complete(asyncio.wait({self._accepting}, timeout=_TICK_S))
        if self._accepting.done():
            self._accepting.result()
            return False
        return True

    def _refuse_connections(self) -> None:
        with suppress(OSError):  # closed by now
            self._listener.shutdown(socket.SHUT_RDWR)

    def _end(self) -> None:
        # The accepting task is not cancelled: a cancelled `sock_accept` loses, unclosed, the
        # connection that it has just accepted.
        self._refuse_connections()
        self._loop.run_until_complete(asyncio.wait({self._accepting}))
        self._loop.run_until_complete(_cancel_all())
        self._loop.close()
        self._listener.close()

    async def _accept(self) -> None:
        """Accept one connection per round of the loop, which also reads what has arrived; return
        when the listener is shut down."""
        trouble = ""
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return
                # Usually no file descriptors are left; that is temporary.
                if str(error) != trouble:
                    log.warning("metrics: no connection can be accepted: %s", error)
                trouble = str(error)
                await asyncio.sleep(_TICK_S)
                continue
            trouble = ""
            if len(self._connections) == MOST_CONNECTIONS:
                dropped = next(iter(self._silent or self._connections))
                self._silent.pop(dropped, None)
                self._connections.pop(dropped).cancel()
            reader, writer = await asyncio.open_connection(
                sock=connection, limit=_LONGEST_REQUEST_BYTES
            )
            task = self._loop.create_task(self._serve(reader, writer))
            self._connections[writer] = task
            self._silent[writer] = None
            task.add_done_callback(partial(self._close, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(_read_head(reader), _TIMEOUT_S)
            del self._silent[writer]
            writer.write(self._respond(head))
            writer.close()
            await asyncio.wait_for(writer.wait_closed(), _TIMEOUT_S)
        except (OSError, asyncio.TimeoutError):
            log.debug("metrics: a client was dropped")

    def _close(self, writer: asyncio.StreamWriter, _: asyncio.Task[None]) -> None:
        self._silent.pop(writer, None)
        self._connections.pop(writer, None)
        writer.transport.abort()

    def _respond(self, head: str) -> bytes:
        status, body, content_type, more = HTTPStatus.OK, b"", "text/plain; charset=utf-8", ""
        method, path, accept = _parse(head)
        if not method:
            status = HTTPStatus.BAD_REQUEST
        elif path != "/metrics":
            status, body = HTTPStatus.NOT_FOUND, b"Not Found: the metrics are at /metrics\n"
        elif method != "GET":
            status, more = HTTPStatus.METHOD_NOT_ALLOWED, "Allow: GET\r\n"
        else:
            try:
                body, content_type = self._write(accept)
            except Exception:
                # A fault in the metrics must not stop the appliance.
                log.exception("metrics: cannot be collected")
                status = HTTPStatus.INTERNAL_SERVER_ERROR
        body = body or f"{status.phrase}\n".encode()
        response = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
        )
        return response.encode() + body

    def _write(self, accept: str) -> tuple[bytes, str]:
        if self._exposition is None:
            # Not needed to start, nor by an appliance without Prometheus.
            from edge_server.api.http.exposition import Exposition  # noqa: PLC0415

            self._exposition = Exposition(self._sources)
        return self._exposition.write(accept)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)  # the connections close in the loop's next round


async def _read_head(reader: asyncio.StreamReader) -> str:
    """Return a request up to its empty line; an empty text if there is none."""
    try:
        return (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return ""


def _parse(head: str) -> tuple[str, str, str]:
    """Return method, path and `Accept` of a request; an empty method if it is invalid."""
    first, *lines = head.split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return "", "", ""
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines)
    }
    return words[0], words[1].partition("?")[0], headers.get("accept", "")
