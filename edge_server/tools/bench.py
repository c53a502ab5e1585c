"""Measures how fast a model is: load on a daemon, in windows of time, and with other settings.

As perf_analyzer decides it, a measurement is stable once its last three windows agree with their
mean in throughput and latency.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.api.grpc.client import DaemonClient, infer_request
from edge_server.errors import EdgeServerError, InternalError, Unavailable
from edge_server.settings import Grpc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from edge_server.model_config.config import ModelConfig

AGREE = 3
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class LoadWindow:
    """The requests that were completed in a window of time.

    Attributes:
        seconds: its length.
        latencies_ms: of the successful requests.
        failed: number of the others.
    """

    seconds: float
    latencies_ms: Sequence[float]
    failed: int = 0

    @property
    def per_s(self) -> float:
        return len(self.latencies_ms) / self.seconds

    @property
    def mean_ms(self) -> float:
        return float(np.mean(self.latencies_ms)) if self.latencies_ms else 0.0


def is_stable(windows: Sequence[LoadWindow], tolerance: float) -> bool:
    """Return whether the last `AGREE` windows differ from their mean by `tolerance` at most, a
    share, in throughput and in mean latency."""
    last = windows[-AGREE:]
    if len(last) < AGREE or not all(window.latencies_ms for window in last):
        return False
    for values in ([w.per_s for w in last], [w.mean_ms for w in last]):
        mean = sum(values) / len(values)
        if any(abs(value - mean) > tolerance * mean for value in values):
            return False
    return True


@dataclass(frozen=True)
class Latency:
    """Of successful requests, in ms."""

    mean: float
    max: float
    percentiles: dict[int, float]

    @staticmethod
    def of(latencies_ms: Sequence[float]) -> Latency:
        """Return what `latencies_ms`, one at least, say."""
        found = np.percentile(latencies_ms, PERCENTILES)
        percentiles = dict(zip(PERCENTILES, map(float, found), strict=True))
        return Latency(float(np.mean(latencies_ms)), float(np.max(latencies_ms)), percentiles)


@dataclass(frozen=True)
class StageTimes:
    """Where a model's requests spent their time, a mean of each in ms; of all clients together.

    Attributes:
        total: from the arrival of a request until its response.
    """

    model: str
    requests: int
    total: float
    queue: float
    compute_input: float
    compute_infer: float
    compute_output: float


@dataclass(frozen=True)
class Measurement:
    """What was measured with one number of requests at a time.

    Attributes:
        per_s: inferences: requests, times the elements of a batch.
        stable: the windows agreed; otherwise these are the last ones, after the most that were
            allowed.
        windows: number of windows that it took.
        stages: the model, and after it the members of an ensemble.
    """

    concurrency: int
    per_s: float
    requests: int
    failed: int
    latency: Latency
    stable: bool
    windows: int
    stages: tuple[StageTimes, ...] = field(default=())

    @property
    def transport_ms(self) -> float:
        """What a request takes beside its time in the server's model: gRPC and the client."""
        return max(0.0, self.latency.mean - self.stages[0].total) if self.stages else 0.0


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from edge_server.model_config.config import ModelConfig
    from edge_server.tools.inputs import Arrays

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


_START_S = 60.0
_STOP_S = 15.0
_LOOK_S = 0.1
_LINES = 5


class OwnDaemon:
    """A daemon that loads models of a repository on request, and changes nothing there.

    Attributes:
        client: calls it.
    """

    def __init__(self, process: subprocess.Popen[bytes], client: DaemonClient) -> None:
        self._process = process
        self.client = client

    @property
    def resident_bytes(self) -> int | None:
        """The memory of its process, without those of Python models; None where it has ended."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        except OSError:
            return None
        lines = (line.split() for line in status.splitlines() if line.startswith("VmRSS:"))
        return next((int(words[1]) * 1024 for words in lines), None)


@contextmanager
def own_daemon(repositories: Sequence[str]) -> Iterator[OwnDaemon]:
    """Start a daemon on `repositories`, and stop it at the end.

    Raises:
        Unavailable: it did not start; the text has its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="edge-server-bench-") as folder:
        path = Path(folder, "grpc.sock")
        log_path = Path(folder, "log")
        isolated = ["-I"] if sys.flags.isolated else []
        with log_path.open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - our own program
                [
                    *(sys.executable, *isolated, "-m", "edge_server", "run"),
                    *(f"--model-repository={Path(each).absolute()}" for each in repositories),
                    *("--model-control-mode=explicit", "--allow-metrics=false"),
                    *("--allow-http=false", "--grpc-port=0", f"--grpc-socket={path}"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            with DaemonClient(Grpc(socket=str(path))) as client:
                _wait_until_ready(process, client, log_path)
                yield OwnDaemon(process, client)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(
    process: subprocess.Popen[bytes], client: DaemonClient, log_path: Path
) -> None:
    end_s = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end_s:
        try:
            if client.is_ready():
                return
        except EdgeServerError:
            time.sleep(_LOOK_S)
    lines = log_path.read_text(errors="replace").splitlines()[-_LINES:]
    raise Unavailable("\n".join(["the daemon for the measurement did not start:", *lines]))


# What differs by less is the noise of a measurement.
WORTH = 0.05
# Triton's execution accelerators of a GPU; any other is one of the processor.
_OF_A_GPU = ("tensorrt", "cuda")


@dataclass(frozen=True)
class ModelVariant:
    """Settings of a model; None leaves that one as the repository has it.

    Attributes:
        delay_us: the longest that a request waits for others of its batch.
        backend: its name, or with an execution accelerator `onnxruntime+cuda`.
    """

    instances: int | None = None
    delay_us: int | None = None
    backend: str | None = None

    def __str__(self) -> str:
        parts = [self.backend] if self.backend else []
        if self.instances:
            parts.append(f"{self.instances} instance{'s' if self.instances > 1 else ''}")
        if self.delay_us is not None:
            parts.append(f"batches wait {self.delay_us} us")
        return ", ".join(parts) or "as it is"

    def apply(self, message: Any) -> Any:
        """Return the configuration `message` with these settings."""
        changed = pb.ModelConfig()
        changed.CopyFrom(message)
        if self.backend not in (None, message.backend):
            self._change_backend(changed)
        if self.instances is not None:
            del changed.instance_group[1:]
            if not changed.instance_group:
                changed.instance_group.add()
            changed.instance_group[0].count = self.instances
        if self.delay_us is not None:
            changed.dynamic_batching.max_queue_delay_microseconds = self.delay_us
        return changed

    def _change_backend(self, changed: Any) -> None:
        name, _, accelerator = (self.backend or "").partition("+")
        if name != changed.backend:
            changed.backend = name
            # Names of files are those of the other backend.
            changed.platform = changed.default_model_filename = ""
        # Devices are chosen anew.
        del changed.instance_group[:]
        changed.ClearField("optimization")
        if name == "tensorrt":
            changed.parameters["auto_build"].string_value = "true"
        if accelerator:
            accelerators = changed.optimization.execution_accelerators
            if accelerator in _OF_A_GPU:
                accelerators.gpu_execution_accelerator.add(name=accelerator)
                changed.instance_group.add(kind=pb.ModelInstanceGroup.KIND_GPU)
            else:
                accelerators.cpu_execution_accelerator.add(name=accelerator)

    def snippet(self, message: Any) -> str:
        """Return what to write into config.pbtxt: the fields in which `message` changes."""
        changed = self.apply(message)
        lines = []
        if changed.backend != message.backend:
            lines.append(f'backend: "{changed.backend}"')
        if "auto_build" in changed.parameters and "auto_build" not in message.parameters:
            lines.append('parameters { key: "auto_build" value { string_value: "true" } }')
        if changed.optimization != message.optimization and changed.HasField("optimization"):
            optimization = text_format.MessageToString(changed.optimization, as_one_line=True)
            lines.append(f"optimization {{ {optimization} }}")
        if self.instances is not None:
            kind = pb.ModelInstanceGroup.Kind.Name(changed.instance_group[0].kind)
            kind_text = "" if kind == "KIND_AUTO" else f"kind: {kind} "
            lines.append(f"instance_group [ {{ {kind_text}count: {self.instances} }} ]")
        if self.delay_us is not None:
            delay = f"max_queue_delay_microseconds: {self.delay_us}"
            lines.append(f"dynamic_batching {{ {delay} }}")
        return "\n".join(lines)


@dataclass(frozen=True)
class VariantResult:
    """What was measured of a variant.

    Attributes:
        resident_bytes: memory of the daemon that ran it.
        failure: why there are no measurements, or no more.
    """

    variant: ModelVariant
    measurements: tuple[Measurement, ...] = ()
    resident_bytes: int | None = None
    failure: str = ""


@dataclass(frozen=True)
class Recommendation:
    """The variant to take, and the measurement that speaks for it; `gain` is a share of the
    throughput of the model as it is, None where that cannot be compared."""

    result: VariantResult
    measurement: Measurement
    gain: float | None


def variants(
    config: ModelConfig,
    instances: Sequence[int],
    delays_us: Sequence[int],
    backends: Sequence[str] | None,
) -> Iterator[ModelVariant]:
    """Yield the model as it is, and then every combination; no delays of a model that does not
    batch."""
    yield ModelVariant()
    batches = config.max_batch_size > 1
    delays: list[int | None] = [None, *delays_us] if batches else [None]
    names: Sequence[str | None] = backends or (None,)
    for backend, count, delay_us in product(names, instances, delays):
        variant = ModelVariant(count, delay_us, backend)
        same = variant.apply(config.message) == config.message
        if not same:
            yield variant


def as_json(message: Any) -> str:
    """Return a configuration as a load request carries it."""
    return str(json_format.MessageToJson(message, preserving_proto_field_name=True))


def recommend(results: Sequence[VariantResult], budget_ms: float | None) -> Recommendation | None:
    """Return the variant with the highest throughput; None where none is within the budget.

    Of variants that differ by `WORTH` at most, it is the one as it is, then the one with fewer
    instances, then the one with the lower 99th percentile.

    Args:
        results: the first one is of the model as it is.
        budget_ms: the 99th percentile may be so high.
    """
    fitting = [
        (result, each)
        for result in results
        for each in result.measurements
        if not each.failed and (budget_ms is None or each.latency.percentiles[99] <= budget_ms)
    ]
    if not fitting:
        return None
    fastest = max(each.per_s for _, each in fitting)
    close = [pair for pair in fitting if pair[1].per_s >= fastest * (1 - WORTH)]

    def rank(pair: tuple[VariantResult, Measurement]) -> tuple[Any, ...]:
        variant = pair[0].variant
        is_changed = variant != ModelVariant()
        return is_changed, variant.instances or 0, pair[1].latency.percentiles[99]

    result, measurement = min(close, key=rank)
    before = max((each.per_s for r, each in fitting if r is results[0]), default=None)
    gain = None if before is None else measurement.per_s / before - 1
    return Recommendation(result, measurement, gain)
