"""Runs the measurements of `edge-server bench` and prints them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.board.installation import shipped_models
from edge_server.cli.bench import report
from edge_server.cli.running_daemon import INSTALLED, connected, settings_of
from edge_server.errors import EdgeServerError, InvalidRequest
from edge_server.tools.bench import (
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
        found = [report.as_object(each) for each in measurements]
        print(json.dumps({**_asked(arguments), "measurements": found}, indent=2))
    else:
        _progress("")
        print("\n".join(report.lines(measurements)))


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
            "measurements": [report.as_object(m) for m in each.measurements],
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
    yield from report.sweep_lines(results)
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
