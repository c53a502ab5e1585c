"""RequestMetrics: how long clients' requests take, and how many fail, by protocol."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Literal

from edge_server.errors import EdgeServerError
from edge_server.process.histogram import Histograms

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from edge_server.process.histogram import Distribution
    from edge_server.requests import Respond, ResponseCallback

    Protocol = Literal["grpc", "http"]

# A small model takes less than a millisecond, a queue's deadline is seconds away.
BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class RequestMetrics:
    """Counts the inference requests of clients; any thread may call any method."""

    def __init__(self) -> None:
        self._latency = Histograms(BOUNDS_S)
        self._lock = threading.Lock()
        self._failed: Counter[tuple[str, str]] = Counter()

    def responded(self, protocol: Protocol, model: str, began_ns: int) -> None:
        """Count a request that has its response.

        Args:
            model: one that exists: the name of the loaded model, not what the client wrote.
            began_ns: `time.monotonic_ns()` when the request had been read.
        """
        self._latency.observe((model, protocol), (time.monotonic_ns() - began_ns) / 1e9)

    def failed(self, protocol: Protocol, code: str) -> None:
        """Count a request that was refused or has failed.

        Args:
            code: the status that the client gets: `UNAVAILABLE`, `400`.
        """
        with self._lock:
            self._failed[protocol, code] += 1

    def timed(
        self,
        protocol: Protocol,
        model: str,
        respond: Respond,
        code_of: Callable[[EdgeServerError], str],
    ) -> Respond:
        """Return `respond`, counting the request with its last response."""
        began_ns = time.monotonic_ns()

        def pass_on(response: ResponseCallback, final: bool) -> None:
            if isinstance(response, EdgeServerError):
                self.failed(protocol, code_of(response))
            elif final:
                self.responded(protocol, model, began_ns)
            respond(response, final)

        return pass_on

    def latencies(self, models: Collection[str]) -> Mapping[tuple[str, ...], Distribution]:
        """Return (model, protocol) → latency of those of `models`; the others are forgotten."""
        found = self._latency.distributions()
        for gone in {model for model, _ in found} - set(models):
            self._latency.forget(gone)
        return {labels: each for labels, each in found.items() if labels[0] in models}

    def failures(self) -> Mapping[tuple[str, str], int]:
        """Return (protocol, code) → number of requests."""
        with self._lock:
            return dict(self._failed)
