"""`edge-server bench`: how fast a model is, loaded for some seconds, also with other settings."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf import json_format, text_format
from rich.console import Console
from rich.text import Text
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.api.grpc.client import DaemonClient, infer_request
from edge_server.board.installation import shipped_models
from edge_server.cameras.recordings import read_picture
from edge_server.cli.infer import config_of, from_picture
from edge_server.cli.run import INSTALLED, connected, settings_of
from edge_server.cli.tables import answer, number, table
from edge_server.errors import EdgeServerError, InternalError, InvalidRequest, Unavailable
from edge_server.settings import Grpc

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from edge_server.cli.infer import Arrays
    from edge_server.model_config.config import ModelConfig

    Statistics = Mapping[str, Any]

PERCENTILES = (50, 90, 95, 99)
_REQUEST_S = 60.0


def latencies(found_ms: Sequence[float]) -> dict[str, float]:
    """Return mean, greatest and percentiles of the requests' latencies, one at least, in ms."""
    percentiles = zip(PERCENTILES, np.percentile(found_ms, PERCENTILES), strict=True)
    return {
        "mean": float(np.mean(found_ms)),
        "max": float(np.max(found_ms)),
        **{f"p{each}": float(value) for each, value in percentiles},
    }


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
        stages: the model, and after it the members of an ensemble.
        latency_ms: of successful requests, see `latencies`.
        transport_ms: what a request takes beside its time in the server's model: gRPC and the
            client.
    """

    concurrency: int
    per_s: float
    requests: int
    failed: int
    stages: tuple[StageTimes, ...]
    latency_ms: Mapping[str, float]
    transport_ms: float


def measure(
    client: DaemonClient,
    config: ModelConfig,
    inputs: Arrays,
    concurrency: int,
    *,
    batch: int,
    seconds: float,
) -> Measurement:
    """Return what `concurrency` requests at a time give in `seconds`, after a first one of each.

    Args:
        inputs: of one request, which has `batch` elements.

    Raises:
        InternalError: no request succeeded; Unavailable if the model may serve later.
    """
    send = client.prepared(infer_request(config.name, inputs), _REQUEST_S)
    latencies_ms: list[float] = []
    failures: list[EdgeServerError] = []
    with ThreadPoolExecutor(concurrency) as threads:
        # The first requests make instances, and buffers of this size.
        list(threads.map(lambda _: _send_until(send, 0.0), range(concurrency)))
        before = _statistics(client)
        begun_s = time.monotonic()
        for sent_ms, failed in threads.map(
            lambda _: _send_until(send, begun_s + seconds), range(concurrency)
        ):
            latencies_ms += sent_ms
            failures += failed
        took_s = time.monotonic() - begun_s
    if not latencies_ms:
        text = f"no request to '{config.name}' succeeded: {failures[-1]}"
        raise Unavailable(text) if isinstance(failures[-1], Unavailable) else InternalError(text)
    stages, latency_ms = (
        stages_between(config, before, _statistics(client)),
        latencies(latencies_ms),
    )
    return Measurement(
        concurrency=concurrency,
        per_s=batch * len(latencies_ms) / took_s,
        requests=len(latencies_ms),
        failed=len(failures),
        stages=stages,
        latency_ms=latency_ms,
        transport_ms=max(0.0, latency_ms["mean"] - stages[0].total) if stages else 0.0,
    )


def _send_until(
    send: Callable[[], object], end_s: float
) -> tuple[list[float], list[EdgeServerError]]:
    """Send one request at least; return the latencies in ms, and the failures."""
    latencies_ms: list[float] = []
    failures: list[EdgeServerError] = []
    while not (latencies_ms or failures) or time.monotonic() < end_s:
        begun_ns = time.perf_counter_ns()
        try:
            send()
        except EdgeServerError as error:
            failures.append(error)
            # A server that refuses at once is not called in a tight loop.
            time.sleep(0.01)
        else:
            latencies_ms.append((time.perf_counter_ns() - begun_ns) / 1e6)
    return latencies_ms, failures


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


_START_S = 60.0
_STOP_S = 15.0


@contextmanager
def own_daemon(repositories: Sequence[str]) -> Iterator[DaemonClient]:
    """Start a daemon on `repositories` that loads on request, and stop it at the end."""
    with tempfile.TemporaryDirectory(prefix="edge-server-bench-") as folder:
        log, path = Path(folder, "log"), f"{folder}/grpc.sock"
        isolated = ["-I"] if sys.flags.isolated else []
        command = [
            *(sys.executable, *isolated, "-m", "edge_server", "run", "--log-file", str(log)),
            *(f"--model-repository={Path(each).absolute()}" for each in repositories),
            *("--model-control-mode=explicit", "--allow-metrics=false"),
            *("--allow-http=false", "--grpc-port=0", f"--grpc-socket={path}"),
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - our own program
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            with DaemonClient(Grpc(socket=path)) as client:
                end_s = time.monotonic() + _START_S
                while not _is_ready(client):
                    if process.poll() is not None or time.monotonic() > end_s:
                        lines = log.read_text(errors="replace").splitlines()[-5:]
                        text = "the daemon for the measurement did not start:"
                        raise Unavailable("\n".join([text, *lines]))
                yield client
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_ready(client: DaemonClient) -> bool:
    try:
        return client.is_ready()
    except EdgeServerError:
        time.sleep(0.1)
        return False


@dataclass(frozen=True)
class ModelVariant:
    """Settings of a model; None leaves that one as the repository has it.

    Attributes:
        delay_us: the longest that a request waits for others of its batch.
    """

    instances: int | None = None
    delay_us: int | None = None

    def apply(self, base: Any) -> Any:
        """Return the configuration `base` with these settings."""
        changed = pb.ModelConfig()
        changed.CopyFrom(base)
        if self.instances is not None:
            # Devices stay.
            del changed.instance_group[1:]
            group = next(iter(changed.instance_group), None) or changed.instance_group.add()
            group.count = self.instances
        if self.delay_us is not None:
            changed.dynamic_batching.max_queue_delay_microseconds = self.delay_us
        return changed

    def snippet(self, base: Any) -> str:
        """Return what config.pbtxt has in place of the same fields of `base`, in one line."""
        changed = self.apply(base)
        for field, value in changed.ListFields():
            if value == getattr(base, field.name):
                changed.ClearField(field.name)
        for group in changed.instance_group:
            group.ClearField("name")
        return text_format.MessageToString(changed, as_one_line=True).strip()


def variants(
    config: ModelConfig, instances: Sequence[int], delays_us: Sequence[int]
) -> Iterator[ModelVariant]:
    """Yield the model as it is, and then every combination; no delays of a model that does not
    batch."""
    yield ModelVariant()
    delays: list[int | None] = [None, *delays_us] if config.max_batch_size > 1 else [None]
    for variant in starmap(ModelVariant, product(instances, delays)):
        if variant.apply(config.message) != config.message:
            yield variant


_HEAD = ("CONCURRENCY", "INFER/S", "MEAN ms", *(f"P{p}" for p in PERCENTILES), "MAX", "REQUESTS")
_STAGES = ("CONCURRENCY", "MODEL", "REQUESTS", "TOTAL ms", "QUEUE", "INPUT", "INFER", "OUTPUT")


def report_lines(measurements: Sequence[Measurement]) -> Iterator[str]:
    """Yield a table of throughput and latency, and one of the stages in the server."""
    rows = [(*_HEAD, ""), *map(_row, measurements)]
    yield from table(rows, left=(len(rows[0]) - 1,))
    stages: list[tuple[str, ...]] = [_STAGES]
    for each in measurements:
        for stage in each.stages:
            times = (stage.total, stage.queue, stage.compute_input, stage.compute_infer)
            stages.append(
                (
                    *(str(each.concurrency), stage.model, str(stage.requests)),
                    *(number(ms, 2) for ms in (*times, stage.compute_output)),
                )
            )
        rest = (str(each.concurrency), "gRPC and client", "", number(each.transport_ms, 2))
        stages.append((*rest, "", "", "", ""))
    yield ""
    yield "in the server, by its statistics (of all clients):"
    yield from table(stages, left=(1,))


def _row(measured: Measurement) -> tuple[str, ...]:
    names = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    return (
        *(str(measured.concurrency), number(measured.per_s)),
        *(number(measured.latency_ms[name], 2) for name in names),
        str(measured.requests),
        f"{measured.failed} failed" if measured.failed else "",
    )


def run_bench(arguments: argparse.Namespace) -> Iterable[str]:
    """Measure, and return the results."""
    if arguments.sweep:
        return _sweep(arguments)
    with connected(settings_of(arguments)) as client, _progress() as show:
        measurements = _measure_all(client, arguments, show)
    found = {**_asked(arguments), "measurements": list(map(asdict, measurements))}
    return answer(arguments, found, report_lines(measurements))


def bench_inputs(
    client: DaemonClient, config: ModelConfig, arguments: argparse.Namespace
) -> Arrays:
    """Return the inputs of one request: a picture, through the real steps before the model.

    Raises:
        InvalidRequest: the flags do not fit the model, or it takes no picture.
    """
    batch = arguments.batch
    if batch > max(1, config.max_batch_size):
        raise InvalidRequest(
            f"--batch {batch}: model '{config.name}' has max_batch_size {config.max_batch_size}"
        )
    arrays = from_picture(client, config, read_picture(arguments.image))
    return {name: np.repeat(array, batch, axis=0) for name, array in arrays.items()}


def _measure_all(
    client: DaemonClient, arguments: argparse.Namespace, show: Callable[[str], None]
) -> list[Measurement]:
    config = config_of(client, arguments.model)
    inputs = bench_inputs(client, config, arguments)
    batch, seconds = arguments.batch, arguments.seconds
    found = []
    for concurrency in arguments.concurrency:
        show(f"{config.name}: {concurrency} at a time, {seconds:g} s")
        found.append(measure(client, config, inputs, concurrency, batch=batch, seconds=seconds))
    return found


def _sweep(arguments: argparse.Namespace) -> Iterable[str]:
    repositories = arguments.model_repository
    if not repositories:
        is_configured = arguments.config is not None or INSTALLED.is_file()
        shipped = [str(shipped_models())]
        repositories = settings_of(arguments).repository.paths if is_configured else shipped
    found: list[dict[str, Any]] = []
    rows: list[tuple[str, ...]] = [("SETTINGS", *_HEAD, "")]
    failures = []
    with own_daemon(repositories) as client, _progress() as show:
        client.load(arguments.model)
        base = config_of(client, arguments.model)
        for variant in variants(base, arguments.instances, arguments.delays):
            snippet = variant.snippet(base.message)
            settings = snippet or "as it is"
            show(f"{arguments.model}: {settings}")
            measured: list[Measurement] = []
            failure = ""
            try:
                if snippet:
                    override = variant.apply(base.message)
                    client.load(
                        base.name,
                        json_format.MessageToJson(override, preserving_proto_field_name=True),
                    )
                measured = _measure_all(client, arguments, show)
            except EdgeServerError as error:
                failure = " ".join(str(error).split())
                failures.append(f"{settings}: {failure}")
            rows += [(settings, *_row(each)) for each in measured]
            objects = list(map(asdict, measured))
            found.append(
                {**asdict(variant), "config_pbtxt": snippet}
                | {"failure": failure, "measurements": objects}
            )
    lines = [*table(rows, left=(0, len(rows[0]) - 1)), *failures]
    return answer(arguments, {**_asked(arguments), "variants": found}, lines)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show on standard error what is measured: on a terminal while it is, elsewhere a line each."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(f"{text} …", file=sys.stderr, flush=True)
        return
    with console.status("") as status:
        yield lambda text: status.update(Text(text))


def _asked(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"model": arguments.model, "batch": arguments.batch, "seconds": arguments.seconds}
