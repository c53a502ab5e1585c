"""Runs the measurements of `edge-server bench` and prints them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.board.installation import shipped_models
from edge_server.cli.running_daemon import INSTALLED, connected, settings_of
from edge_server.cli.tables import number, size_text, table
from edge_server.errors import EdgeServerError, InvalidRequest
from edge_server.tools.bench import (
    PERCENTILES,
    LoadPlan,
    ModelVariant,
    VariantResult,
    as_json,
    measure,
    own_daemon,
    recommend,
    variants,
)
from edge_server.tools.inputs import (
    config_of,
    from_picture,
    made_up,
    picture_input,
    read_arrays,
    read_picture,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from edge_server.api.grpc.client import DaemonClient
    from edge_server.model_config.config import ModelConfig
    from edge_server.tools.bench import Measurement, OwnDaemon, Recommendation
    from edge_server.tools.inputs import Arrays

_HEAD = ("CONCURRENCY", "INFER/S", "MEAN ms", *(f"P{p}" for p in PERCENTILES), "MAX", "REQUESTS")
_STAGES = ("CONCURRENCY", "MODEL", "REQUESTS", "TOTAL ms", "QUEUE", "INPUT", "INFER", "OUTPUT")


def as_object(measured: Measurement) -> dict[str, Any]:
    """Return one measurement as JSON has it."""
    found = asdict(measured)
    latency = found.pop("latency")
    percentiles = {f"p{p}": value for p, value in latency.pop("percentiles").items()}
    return {
        **found,
        "latency_ms": {**latency, **percentiles},
        "transport_ms": measured.transport_ms,
    }


def report_lines(measurements: Sequence[Measurement]) -> Iterator[str]:
    """Yield a table of throughput and latency, and one of the stages in the server."""
    rows: list[tuple[str, ...]] = [(*_HEAD, "")]
    for each in measurements:
        percentiles = (number(each.latency.percentiles[p], 2) for p in PERCENTILES)
        rows.append(
            (
                *(str(each.concurrency), number(each.per_s), number(each.latency.mean, 2)),
                *(*percentiles, number(each.latency.max, 2), str(each.requests)),
                _notes(each),
            )
        )
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
    if not all(each.stable for each in measurements):
        yield ""
        yield (
            "not stable: the last windows differ by more than --stability; the machine has other "
            "work, or --window is too short"
        )


def sweep_lines(results: Sequence[VariantResult]) -> Iterator[str]:
    """Yield a table with a row for each measurement of each variant, and what failed."""
    head = ("SETTINGS", "CONCURRENCY", "INFER/S", "MEAN ms", "P50", "P99", "MEMORY", "")
    rows: list[tuple[str, ...]] = [head]
    for result in results:
        memory = "" if result.resident_bytes is None else size_text(result.resident_bytes)
        for each in result.measurements:
            percentiles = each.latency.percentiles
            times = (each.latency.mean, percentiles[50], percentiles[99])
            rows.append(
                (
                    *(str(result.variant), str(each.concurrency), number(each.per_s)),
                    *(number(ms, 2) for ms in times),
                    memory,
                    _notes(each),
                )
            )
    yield from table(rows, left=(0, len(head) - 1))
    yield from (f"{each.variant}: {each.failure}" for each in results if each.failure)


def _notes(measured: Measurement) -> str:
    notes = [] if measured.stable else ["not stable"]
    notes += [f"{measured.failed} failed"] if measured.failed else []
    return ", ".join(notes)


_ROAD = "synthetic://road?seed=7"


def run_bench(arguments: argparse.Namespace) -> None:
    """Measure, and print the results.

    Raises:
        EdgeServerError: the daemon or the model cannot be measured; the text has the remedy.
    """
    plan = LoadPlan(
        arguments.window,
        arguments.windows,
        arguments.stability / 100,
        arguments.warm_up,
        arguments.batch,
    )
    if arguments.sweep:
        _sweep(arguments, plan)
        return
    with connected(settings_of(arguments)) as client:
        measurements = _measure_all(client, arguments, plan)
    if arguments.json:
        found = [as_object(each) for each in measurements]
        print(json.dumps({**_asked(arguments), "measurements": found}, indent=2))
    else:
        _progress("")
        print("\n".join(report_lines(measurements)))


def bench_inputs(
    client: DaemonClient, config: ModelConfig, arguments: argparse.Namespace
) -> Arrays:
    """Return the inputs of one request: those of the flags, a picture through the real steps before
    the model, or made-up ones.

    Raises:
        InvalidRequest: the flags do not fit the model.
    """
    batch = arguments.batch
    if batch > max(1, config.max_batch_size):
        raise InvalidRequest(
            f"--batch {batch}: model '{config.name}' has max_batch_size {config.max_batch_size}"
        )
    arrays = (
        {} if arguments.input or arguments.shape else _pictured(client, config, arguments.image)
    )
    if arrays:
        return {name: np.repeat(array, batch, axis=0) for name, array in arrays.items()}
    given = read_arrays(arguments.input, config)
    shapes = dict(arguments.shape)
    for name, array in given.items():
        shapes[name] = array.shape[1:] if config.max_batch_size else array.shape
    return {**made_up(config, batch, shapes), **given}


def _pictured(client: DaemonClient, config: ModelConfig, image: str | None) -> Arrays:
    """Return inputs made of a picture; none where the model has no use for one."""
    spec = picture_input(config)
    if image is None and spec is not None and -1 not in spec.shape:
        return {}  # of a size that no road is drawn in
    try:
        return from_picture(client, config, read_picture(image or _ROAD))
    except InvalidRequest:
        if image is not None:
            raise
        return {}


def _measure_all(
    client: DaemonClient, arguments: argparse.Namespace, plan: LoadPlan
) -> list[Measurement]:
    config = config_of(client, arguments.model)
    inputs = bench_inputs(client, config, arguments)
    return [
        measure(client, config, inputs, concurrency, plan=plan, progress=_progress)
        for concurrency in arguments.concurrency
    ]


def _sweep(arguments: argparse.Namespace, plan: LoadPlan) -> None:
    repositories = arguments.model_repository
    if repositories is None:
        is_configured = arguments.config is not None or INSTALLED.is_file()
        shipped = [str(shipped_models())]
        repositories = settings_of(arguments).repository.paths if is_configured else shipped
    with own_daemon(repositories) as daemon:
        daemon.client.load(arguments.model)
        model = arguments.vary or _slowest(daemon.client, arguments)
        base = config_of(daemon.client, model)
        results = list(_measure_variants(daemon, base, arguments, plan))
    best = recommend(results, arguments.latency_budget)
    if arguments.json:
        found = {**_asked(arguments), "varied": model, **_sweep_object(results, best, base)}
        print(json.dumps(found, indent=2))
    else:
        _progress("")
        print("\n".join(_sweep_lines(model, results, best, base, arguments.latency_budget)))


def _measure_variants(
    daemon: OwnDaemon, base: ModelConfig, arguments: argparse.Namespace, plan: LoadPlan
) -> Iterator[VariantResult]:
    """Yield the results of each variant of `base`; of a backend that loads nothing only the
    first."""
    unusable: set[str | None] = set()
    for variant in variants(base, arguments.instances, arguments.delays, arguments.backends):
        if variant.backend in unusable:
            continue
        _progress(f"{base.name}: {variant}")
        measured: list[Measurement] = []
        failure = ""
        try:
            if variant != ModelVariant():
                daemon.client.load(base.name, as_json(variant.apply(base.message)))
            measured = _measure_all(daemon.client, arguments, plan)
        except EdgeServerError as error:
            failure = " ".join(str(error).split())
            if variant.backend is not None:
                unusable.add(variant.backend)
        yield VariantResult(variant, tuple(measured), daemon.resident_bytes, failure)


def _slowest(client: DaemonClient, arguments: argparse.Namespace) -> str:
    """Return the model itself, or the member of an ensemble that computes longest."""
    config = config_of(client, arguments.model)
    if not config.steps:
        return config.name
    quick = LoadPlan(window_s=0.5, most_windows=1, warm_up_s=0.5, batch=arguments.batch)
    inputs = bench_inputs(client, config, arguments)
    stages = measure(client, config, inputs, 1, plan=quick, progress=_progress).stages[1:]
    if not stages:
        raise InvalidRequest(f"ensemble '{config.name}': no member computed; name one with --vary")
    return max(stages, key=lambda stage: stage.compute_infer).model


def _sweep_object(
    results: Sequence[VariantResult], best: Recommendation | None, base: ModelConfig
) -> dict[str, Any]:
    found = [
        {
            **asdict(each.variant),
            "failure": each.failure,
            "resident_bytes": each.resident_bytes,
            "measurements": [as_object(m) for m in each.measurements],
        }
        for each in results
    ]
    advice = None
    if best is not None:
        advice = {
            **asdict(best.result.variant),
            "concurrency": best.measurement.concurrency,
            "per_s": best.measurement.per_s,
            "gain": best.gain,
            "config_pbtxt": best.result.variant.snippet(base.message),
        }
    return {"variants": found, "recommendation": advice}


def _sweep_lines(
    model: str,
    results: Sequence[VariantResult],
    best: Recommendation | None,
    base: ModelConfig,
    budget_ms: float | None,
) -> Iterator[str]:
    yield f"settings of {model}:"
    yield from sweep_lines(results)
    yield ""
    if best is None:
        budget = "" if budget_ms is None else f" within --latency-budget {budget_ms:g} ms"
        yield f"no recommendation: nothing was measured{budget} without a failed request"
        return
    measured = best.measurement
    numbers = (
        f"{measured.per_s:.1f}/s, P99 {measured.latency.percentiles[99]:.1f} ms "
        f"with {measured.concurrency} at a time"
    )
    snippet = best.result.variant.snippet(base.message)
    if not snippet:
        yield f"recommended: leave it as it is, {numbers}; nothing is worth a change"
        return
    gain = "" if best.gain is None else f" ({best.gain:+.0%} to as it is)"
    yield f"recommended: {best.result.variant}, {numbers}{gain}; in config.pbtxt of {model}:"
    yield from (f"  {line}" for line in snippet.splitlines())


def _asked(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"model": arguments.model, "batch": arguments.batch, "window_s": arguments.window}


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
