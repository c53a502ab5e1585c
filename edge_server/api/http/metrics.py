"""MetricsServer: a small HTTP server for Prometheus, bounded in everything."""

from __future__ import annotations

import logging
import select
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from edge_server.api.http.asker import Asker
from edge_server.board.listening import listener, remedy
from edge_server.errors import Unavailable
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from edge_server.api.http.exposition import Exposition
    from edge_server.api.http.sources import Sources
    from edge_server.settings import Metrics

log = logging.getLogger(__name__)

# Limit of concurrent connections; one more drops the connection that has been silent longest.
MOST_ASKERS = 32
# A connection is dropped if its request, or the reading of its response, takes longer.
_PATIENCE_S = 1.0
_WAIT_S = 0.5

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
}


class MetricsServer:
    """Serves `GET /metrics`, and nothing else, on its own thread.

    Up to `MOST_ASKERS` connections are served concurrently, each for `_PATIENCE_S` at most and for
    one request: no client delays another, however silent or slow it is.

    The constructor binds the port; requests are served after `start`.

    Raises:
        Unavailable: the address cannot be bound.
    """

    def __init__(self, settings: Metrics, sources: Sources) -> None:
        self.worker = Worker("metrics", self._tick, on_end=self._leave_all)
        self._sources = sources
        self._exposition: Exposition | None = None
        self._stopping = False
        self._deaf = False
        self._askers: list[Asker] = []  # the oldest first
        try:
            self._listener = listener(settings.host, settings.port, MOST_ASKERS)
        except OSError as error:
            raise Unavailable(
                f"metrics cannot listen on {settings.host}:{settings.port}: "
                f"{remedy(error, '--metrics')}; or tell none with --allow-metrics=false"
            ) from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self._url = f"http://{host}:{self.port}/metrics"

    def start(self) -> None:
        self.worker.start()
        log.info("metrics: listening on %s", self._url)

    def stop(self, timeout_s: float) -> None:
        """Serve no more requests; a response in progress gets `timeout_s` seconds."""
        self._stopping = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in accept
        self.worker.stop(timeout_s)
        self._listener.close()

    def _tick(self, now: float) -> bool:
        # poll reports hangups by itself; a persistent selector needs each closed socket removed.
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for asker in self._askers:
            poll.register(asker.connection, select.POLLOUT if asker.answered else select.POLLIN)
        until = min((asker.until for asker in self._askers), default=now + _WAIT_S)
        ready = {file for file, _ in poll.poll(max(0.0, 1e3 * min(_WAIT_S, until - now)))}
        for asker in self._askers.copy():
            if asker.connection.fileno() in ready:
                self._attend(asker)
        now = time.monotonic()
        for asker in [each for each in self._askers if each.until < now]:
            self._leave(asker)
        return self._listener.fileno() not in ready or self._accept()

    def _accept(self) -> bool:
        """Accept one more connection; return False once the server stops."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return True
        except OSError as error:
            if self._stopping:
                return False
            # Usually no file descriptors are left; that is temporary.
            if not self._deaf:
                log.warning("metrics: no caller can be taken: %s", error)
            self._deaf = True
            self.worker.wait(_WAIT_S)
            return True
        self._deaf = False
        if len(self._askers) == MOST_ASKERS:
            silent = (asker for asker in self._askers if not asker.answered)
            self._leave(next(silent, self._askers[0]))
        self._askers.append(Asker(connection, time.monotonic() + _PATIENCE_S))
        return True

    def _attend(self, asker: Asker) -> None:
        try:
            if not asker.answered:
                request = asker.hear()
                if request is None:
                    return
                text = self._answer(request)
                asker.answer(text, time.monotonic() + _PATIENCE_S)
            if not asker.send():
                return
        except OSError:
            log.debug("metrics: an asker has gone")
        self._leave(asker)

    def _leave(self, asker: Asker) -> None:
        self._askers.remove(asker)
        asker.close()

    def _leave_all(self) -> None:
        for asker in self._askers.copy():
            self._leave(asker)

    def _answer(self, request: bytes) -> bytes:
        status, body, content_type, more = 200, b"", "text/plain; charset=utf-8", ""
        method, path, accept = _understand(request)
        if not method:
            status = 400
        elif path != "/metrics":
            status, body = 404, b"Not Found: the metrics are at /metrics\n"
        elif method != "GET":
            status, more = 405, "Allow: GET\r\n"
        else:
            try:
                body, content_type = self._write(accept)
            except Exception:
                # A fault in the metrics must not stop the appliance.
                log.exception("metrics: cannot be told")
                status = 500
        body = body or f"{_REASONS[status]}\n".encode()
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
        )
        return head.encode() + body

    def _write(self, accept: str) -> tuple[bytes, str]:
        if self._exposition is None:
            # Not needed to start, nor by an appliance without Prometheus.
            from edge_server.api.http.exposition import Exposition  # noqa: PLC0415

            self._exposition = Exposition(self._sources)
        return self._exposition.write(accept)


def _understand(request: bytes) -> tuple[str, str, str]:
    """Return method, path and `Accept` of a request; an empty method if it is invalid."""
    head, end, _ = request.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if not end or len(words) != 3 or not words[2].startswith("HTTP/1."):
        return "", "", ""
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines)
    }
    return words[0], words[1].partition("?")[0], headers.get("accept", "")
