"""The metrics port: one small HTTP server for Prometheus, bounded in everything."""

from __future__ import annotations

import logging
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from edge_server.appliance.listening import listener, remedy
from edge_server.appliance.worker import Worker
from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from edge_server.http_api.exposition import Exposition
    from edge_server.http_api.sources import Sources
    from edge_server.settings import Metrics

log = logging.getLogger(__name__)

# Callers are answered one after another; so many may wait.
_BACKLOG = 16
# Who has not asked in this time, or not taken the answer, is left.
_PATIENCE_S = 1.0
_LONGEST_REQUEST_BYTES = 8192
_WAIT_S = 0.5

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
}


class MetricsServer:
    """Answers `GET /metrics`, and nothing else, on a thread of its own.

    One caller at a time, each for `_PATIENCE_S` at most, a connection for each request: nobody
    holds more than that, however slowly he asks.

    The port is bound at once; callers are answered after `start`.

    Raises:
        Unavailable: the address cannot be bound.
    """

    def __init__(self, settings: Metrics, sources: Sources) -> None:
        self.worker = Worker("metrics", self._tick)
        self._sources = sources
        self._exposition: Exposition | None = None
        self._stopping = False
        self._deaf = False
        try:
            self._listener = listener(settings.host, settings.port, _BACKLOG)
        except OSError as error:
            raise Unavailable(
                f"metrics cannot listen on {settings.host}:{settings.port}: "
                f"{remedy(error, '--metrics')}; or tell none with --allow-metrics=false"
            ) from error
        self._listener.settimeout(_WAIT_S)
        self.port: int = self._listener.getsockname()[1]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self._url = f"http://{host}:{self.port}/metrics"

    def start(self) -> None:
        self.worker.start()
        log.info("metrics: listening on %s", self._url)

    def stop(self, timeout_s: float) -> None:
        """Answer nobody any more; who is being answered gets `timeout_s`."""
        self._stopping = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept
        self.worker.stop(timeout_s)
        self._listener.close()

    def _tick(self, now: float) -> bool:
        del now
        try:
            caller, _ = self._listener.accept()
        except TimeoutError:
            return True
        except OSError as error:
            if self._stopping:
                return False
            # No file descriptors left, mostly: that passes.
            if not self._deaf:
                log.warning("metrics: no caller can be taken: %s", error)
            self._deaf = True
            self.worker.wait(_WAIT_S)
            return True
        self._deaf = False
        with caller, suppress(OSError):
            self._answer(caller, time.monotonic() + _PATIENCE_S)
        return True

    def _answer(self, caller: socket.socket, until: float) -> None:
        request = _read_head(caller, until)
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
                # The appliance goes on, whatever is wrong with its numbers.
                log.exception("metrics: cannot be told")
                status = 500
        body = body or f"{_REASONS[status]}\n".encode()
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
        )
        caller.settimeout(_PATIENCE_S)
        caller.sendall(head.encode() + body)
        caller.shutdown(socket.SHUT_WR)

    def _write(self, accept: str) -> tuple[bytes, str]:
        if self._exposition is None:
            # Not needed to start, and not by an appliance that nobody watches.
            from edge_server.http_api.exposition import Exposition  # noqa: PLC0415

            self._exposition = Exposition(self._sources)
        return self._exposition.write(accept)


def _read_head(caller: socket.socket, until: float) -> bytes:
    """The request up to its empty line, or what there is when time or room is over."""
    request = b""
    while b"\r\n\r\n" not in request and len(request) < _LONGEST_REQUEST_BYTES:
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        caller.settimeout(left_s)
        piece = caller.recv(_LONGEST_REQUEST_BYTES - len(request))
        if not piece:
            break
        request += piece
    return request


def _understand(request: bytes) -> tuple[str, str, str]:
    """Method, path and `Accept` of a request; an empty method where it is none."""
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
