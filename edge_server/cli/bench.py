"""`edge-server bench`: runs the measurements and prints them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.text import Text

from edge_server.board.installation import shipped_models
from edge_server.cli.running_daemon import INSTALLED, connected, settings_of
from edge_server.cli.tables import number, table
from edge_server.errors import EdgeServerError, InvalidRequest
from edge_server.tools.bench import (
    PERCENTILES,
    ModelVariant,
    as_json,
    measure,
    own_daemon,
    variants,
)
from edge_server.tools.inputs import (
    config_of,
    from_picture,
    made_up,
    picture_input,
    read_picture,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from rich.status import Status

    from edge_server.api.grpc.client import DaemonClient
    from edge_server.model_config.config import ModelConfig
    from edge_server.tools.bench import Measurement
    from edge_server.tools.inputs import Arrays

_HEAD = ("CONCURRENCY", "INFER/S", "MEAN ms", *(f"P{p}" for p in PERCENTILES), "MAX", "REQUESTS")
_STAGES = ("CONCURRENCY", "MODEL", "REQUESTS", "TOTAL ms", "QUEUE", "INPUT", "INFER", "OUTPUT")
_ROAD = "synthetic://road?seed=7"


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
    latency = measured.latency
    return (
        *(str(measured.concurrency), number(measured.per_s), number(latency.mean, 2)),
        *(number(latency.percentiles[p], 2) for p in PERCENTILES),
        *(number(latency.max, 2), str(measured.requests)),
        f"{measured.failed} failed" if measured.failed else "",
    )


def run_bench(arguments: argparse.Namespace) -> None:
    """Measure, and print the results.

    Raises:
        EdgeServerError: the daemon or the model cannot be measured; the text has the remedy.
    """
    if arguments.sweep:
        _sweep(arguments)
        return
    with connected(settings_of(arguments)) as client, _status(arguments.model):
        measurements = _measure_all(client, arguments)
    if arguments.json:
        _print_json(arguments, measurements=[as_object(each) for each in measurements])
    else:
        print("\n".join(report_lines(measurements)))


def bench_inputs(
    client: DaemonClient, config: ModelConfig, arguments: argparse.Namespace
) -> Arrays:
    """Return the inputs of one request: a picture through the real steps before the model, or
    made-up ones.

    Raises:
        InvalidRequest: the flags do not fit the model.
    """
    batch = arguments.batch
    if batch > max(1, config.max_batch_size):
        raise InvalidRequest(
            f"--batch {batch}: model '{config.name}' has max_batch_size {config.max_batch_size}"
        )
    arrays = {} if arguments.shape else _pictured(client, config, arguments.image)
    if arrays:
        return {name: np.repeat(array, batch, axis=0) for name, array in arrays.items()}
    return made_up(config, batch, dict(arguments.shape))


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


def _measure_all(client: DaemonClient, arguments: argparse.Namespace) -> list[Measurement]:
    config = config_of(client, arguments.model)
    inputs = bench_inputs(client, config, arguments)
    batch, seconds = arguments.batch, arguments.seconds
    return [
        measure(client, config, inputs, concurrency, batch=batch, seconds=seconds)
        for concurrency in arguments.concurrency
    ]


def _sweep(arguments: argparse.Namespace) -> None:
    repositories = arguments.model_repository
    if not repositories:
        is_configured = arguments.config is not None or INSTALLED.is_file()
        shipped = [str(shipped_models())]
        repositories = settings_of(arguments).repository.paths if is_configured else shipped
    found: list[dict[str, Any]] = []
    rows: list[tuple[str, ...]] = [("SETTINGS", *_HEAD, "")]
    failures = []
    unusable: set[str | None] = set()
    with own_daemon(repositories) as client, _status(arguments.model) as status:
        client.load(arguments.model)
        base = config_of(client, arguments.model)
        for variant in variants(base, arguments.instances, arguments.delays, arguments.backends):
            if variant.backend in unusable:
                continue
            snippet = variant.snippet(base.message)
            settings = snippet or "as it is"
            status.update(Text(f"{arguments.model}: {settings}"))
            measured: list[Measurement] = []
            failure = ""
            try:
                if variant != ModelVariant():
                    client.load(base.name, as_json(variant.apply(base.message)))
                measured = _measure_all(client, arguments)
            except EdgeServerError as error:
                failure = " ".join(str(error).split())
                failures.append(f"{settings}: {failure}")
                unusable |= {variant.backend} - {None}
            rows += [(settings, *_row(each)) for each in measured]
            objects = [as_object(each) for each in measured]
            found.append(
                {**asdict(variant), "config_pbtxt": snippet}
                | {"failure": failure, "measurements": objects}
            )
    if arguments.json:
        _print_json(arguments, variants=found)
    else:
        print("\n".join([*table(rows, left=(0, len(rows[0]) - 1)), *failures]))


def _status(text: str) -> Status:
    """Show what is measured while it is, on a terminal."""
    return Console(stderr=True).status(Text(text))


def _print_json(arguments: argparse.Namespace, **found: Any) -> None:
    asked = {"model": arguments.model, "batch": arguments.batch, "seconds": arguments.seconds}
    print(json.dumps({**asked, **found}, indent=2))
