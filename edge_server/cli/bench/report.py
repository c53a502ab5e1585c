"""Measurements as tables for people, and as objects for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from edge_server.cli.tables import number, size_text, table
from edge_server.tools.bench import PERCENTILES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from edge_server.tools.bench import Measurement, VariantResult

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


def lines(measurements: Sequence[Measurement]) -> Iterator[str]:
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
