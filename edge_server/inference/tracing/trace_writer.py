"""Writes traces on a thread of its own, so that no request waits for a disk."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from edge_server.inference.tracing.trace_file import TraceFile
    from edge_server.inference.tracing.traced_request import TracedRequest

log = logging.getLogger(__name__)

# The limit of traces that wait to be written: requests beyond it are dropped and counted.
MOST_WAITING = 10_000
# Traces within that time are written together; a crash costs as many.
_GATHER_S = 0.1
# An idle worker wakes this often, so that its heartbeat moves.
_LOOK_S = 5.0


class TraceWriter:
    """Takes finished traced requests from any thread and writes them in their order.

    The worker has no supervisor: a disk that hangs costs traces and nothing else.
    """

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._news = threading.Condition()
        self._waiting: deque[TracedRequest] = deque()
        self._waiting_traces = 0
        self._closed = False
        self._written = 0
        self._dropped = 0
        self._worker = Worker("trace", self._tick, on_end=self._write_waiting)

    @property
    def file_name(self) -> str:
        return str(self._file.path)

    @property
    def full(self) -> bool:
        """Whether writing has ended: the writer is stopped or the trace files are full."""
        return self._closed or self._file.full

    @property
    def dropped(self) -> int:
        """The number of requests dropped, because the queue or the files were full."""
        return self._dropped

    def start(self) -> None:
        self._worker.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Write the queued traces, accept no more."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._worker.stop(timeout_s)
        if self._written or self._dropped:
            log.info(
                "trace %s: %d requests written, %d dropped",
                self._file.path,
                self._written,
                self._dropped,
            )

    def put(self, request: TracedRequest) -> None:
        """Queue `request` for writing and return at once."""
        with self._news:
            if self._closed or self._waiting_traces + len(request) > MOST_WAITING:
                self._dropped += 1
                return
            self._waiting_traces += len(request)
            self._waiting.append(request)
            self._news.notify()

    def _tick(self, _now: float) -> None:
        """Write queued traces, or wait a bounded time for some."""
        with self._news:
            if self._news.wait_for(lambda: self._waiting or self._closed, _LOOK_S):
                self._news.wait_for(lambda: self._closed, _GATHER_S)
        self._write_waiting()

    def _write_waiting(self) -> None:
        with self._news:
            requests, self._waiting = self._waiting, deque()
            self._waiting_traces = 0
        for request in requests:
            written = self._file.write(request.sampler, request.written())
            with self._news:
                self._written += written
                self._dropped += not written
