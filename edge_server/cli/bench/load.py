"""Sends requests from several threads at once, and measures them in windows of time."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge_server.api.grpc.client import infer_request
from edge_server.cli.bench.windows import (
    AGREE,
    Latency,
    LoadWindow,
    Measurement,
    StageTimes,
    is_stable,
)
from edge_server.errors import EdgeServerError, InternalError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from edge_server.api.grpc.client import DaemonClient
    from edge_server.cli.infer.inputs import Arrays
    from edge_server.model_config.config import ModelConfig

    Statistics = Mapping[str, Any]

_REQUEST_S = 60.0
# Spans the end of the last window to the end of the requests that were sent in it.
_END_S = 65.0


@dataclass(frozen=True)
class LoadPlan:
    """How a measurement is made.

    Attributes:
        window_s: length of a window.
        most_windows: it ends with so many, stable or not.
        tolerance: see `is_stable`.
        warm_up_s: requests before the first window.
        batch: elements of one request.
    """

    window_s: float = 2.0
    most_windows: int = 10
    tolerance: float = 0.1
    warm_up_s: float = 1.0
    batch: int = 1


class LoadGenerator:
    """Threads that send one request after another, from `start` to `stop`.

    Args:
        sends: one function for each thread, which sends a request and waits for the response.
    """

    def __init__(self, sends: Sequence[Callable[[], object]]) -> None:
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._latencies_ms: list[float] = []
        self._failed = 0
        self.error: EdgeServerError | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(send,), name=f"bench-{i}", daemon=True)
            for i, send in enumerate(sends)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Send no more, and wait for the responses."""
        self._stopping.set()
        end_s = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def take(self, seconds: float) -> LoadWindow:
        """Return what was completed since the last call, which took `seconds`."""
        with self._lock:
            latencies_ms, self._latencies_ms = self._latencies_ms, []
            failed, self._failed = self._failed, 0
        return LoadWindow(seconds, latencies_ms, failed)

    def _run(self, send: Callable[[], object]) -> None:
        while not self._stopping.is_set():
            begun_ns = time.perf_counter_ns()
            try:
                send()
            except EdgeServerError as error:
                with self._lock:
                    self._failed += 1
                    self.error = error
                # A server that refuses at once is not called in a tight loop.
                self._stopping.wait(0.01)
                continue
            latency_ms = (time.perf_counter_ns() - begun_ns) / 1e6
            with self._lock:
                self._latencies_ms.append(latency_ms)


def measure(
    client: DaemonClient,
    config: ModelConfig,
    inputs: Arrays,
    concurrency: int,
    *,
    plan: LoadPlan,
    progress: Callable[[str], object],
) -> Measurement:
    """Return what `concurrency` requests at a time give, once the windows agree.

    Args:
        inputs: of one request.
        progress: gets a text for each window.

    Raises:
        InternalError: no request succeeded; Unavailable if the model may serve later.
    """
    sends = [
        client.prepared(_request(config, inputs, thread), _REQUEST_S)
        for thread in range(concurrency)
    ]
    generator = LoadGenerator(sends)
    generator.start()
    windows: list[LoadWindow] = []
    counts: list[Statistics] = []
    try:
        time.sleep(plan.warm_up_s)
        generator.take(plan.warm_up_s)
        counts.append(_statistics(client))
        begun_s = time.monotonic()
        while len(windows) < plan.most_windows and not is_stable(windows, plan.tolerance):
            time.sleep(plan.window_s)
            now_s = time.monotonic()
            windows.append(generator.take(now_s - begun_s))
            begun_s = now_s
            counts.append(_statistics(client))
            progress(f"concurrency {concurrency}, window {len(windows)}: {windows[-1].per_s:.1f}/s")
            if not windows[-1].latencies_ms and generator.error is not None:
                break
    finally:
        generator.stop()
    last = windows[-AGREE:]
    latencies_ms = [each for window in last for each in window.latencies_ms]
    if not latencies_ms:
        text = f"no request to '{config.name}' succeeded: {generator.error or 'none was completed'}"
        raise Unavailable(text) if isinstance(generator.error, Unavailable) else InternalError(text)
    return Measurement(
        concurrency=concurrency,
        per_s=plan.batch * len(latencies_ms) / sum(window.seconds for window in last),
        requests=len(latencies_ms),
        failed=sum(window.failed for window in last),
        latency=Latency.of(latencies_ms),
        stable=is_stable(windows, plan.tolerance),
        windows=len(windows),
        stages=stages_between(config, counts[-len(last) - 1], counts[-1]),
    )


def stages_between(
    config: ModelConfig, before: Statistics, after: Statistics
) -> tuple[StageTimes, ...]:
    """Return the mean times of the model and, of an ensemble, its members between two readings of
    the statistics, model → `ModelStatistics`."""
    names = dict.fromkeys([config.name, *(step.model_name for step in config.steps)])
    found = []
    for name in names:
        if name not in after:
            continue
        now = after[name].inference_stats
        then = before[name].inference_stats if name in before else type(now)()
        requests = now.success.count - then.success.count
        if requests <= 0:
            continue

        def mean_ms(stage: str, now: Any = now, then: Any = then, n: int = requests) -> float:
            return float((getattr(now, stage).ns - getattr(then, stage).ns) / n / 1e6)

        stages = ("success", "queue", "compute_input", "compute_infer", "compute_output")
        found.append(StageTimes(name, requests, *map(mean_ms, stages)))
    return tuple(found)


def _statistics(client: DaemonClient) -> Statistics:
    # Of several versions the last one: the latest, which serves requests without a version.
    return {each.name: each for each in client.statistics()}


def _request(config: ModelConfig, inputs: Arrays, thread: int) -> Any:
    request = infer_request(config.name, inputs)
    if config.sequence_batching is not None:
        # A whole sequence in each request: what a server does for one is measured.
        request.parameters["sequence_id"].int64_param = thread + 1
        request.parameters["sequence_start"].bool_param = True
        request.parameters["sequence_end"].bool_param = True
    return request
