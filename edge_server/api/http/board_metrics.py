"""BoardMetrics: the machine itself, under Triton's names where Triton has them, else `edge_board_`.

What the board does not report has no sample, never a zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily

from edge_server.api.http.metric_table import info, many, one
from edge_server.board.watch import (
    CLOCK_UNSYNCHRONIZED,
    HTTP_CLOSED,
    NOT_RECORDED,
    REASONS,
    ClockState,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from edge_server.api.http.sources import Sources
    from edge_server.board.facts import BoardFacts
    from edge_server.board.watch import BoardWatch


class BoardMetrics:
    """A Collector of prometheus_client."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        yield from self._processors()
        board = self._sources.board
        if board is not None:
            yield from _condition(board)
            if (facts := board.facts) is not None:
                yield from _engines(facts, gpu=self._sources.gpu)
                yield from _heat(facts)
                yield from _power(facts)
                yield from _storage(facts)
        yield from many(
            "edge_disk_free_bytes",
            (((directory,), count) for directory, count in self._sources.free_bytes().items()),
        )

    def _processors(self) -> Iterator[Metric]:
        processors = self._sources.processors
        if processors is None:
            return
        utilization, memory = processors.utilization(), processors.memory()
        if utilization is not None:
            yield GaugeMetricFamily(
                "nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", utilization
            )
        total_bytes, free_bytes = memory.total_bytes, memory.available_bytes
        if total_bytes is not None and free_bytes is not None:
            yield GaugeMetricFamily(
                "nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total_bytes
            )
            # Used is all that a new process cannot get.
            yield GaugeMetricFamily(
                "nv_cpu_memory_used_bytes",
                "CPU used memory (RAM), in bytes",
                total_bytes - free_bytes,
            )


def _condition(board: BoardWatch) -> Iterator[Metric]:
    condition = board.condition
    now = {reason.partition(":")[0] for reason in condition.reasons}
    yield from many(
        "edge_board_condition",
        (
            ((word,), word in now)
            for word in (*REASONS, NOT_RECORDED, HTTP_CLOSED, CLOCK_UNSYNCHRONIZED)
        ),
    )
    yield from many(
        "edge_board_clock_state",
        (((state.value,), condition.clock is state) for state in ClockState),
    )
    yield from one("edge_board_clock_steps_total", condition.clock_steps)
    yield from one("edge_board_sample_age_seconds", board.age_s)


def _engines(facts: BoardFacts, *, gpu: bool) -> Iterator[Metric]:
    loads = {engine.name: engine.load for engine in facts.engines}
    if gpu and (load := loads.get("gpu")) is not None:
        # Orin's GPU has no UUID.
        yield from many("nv_gpu_utilization", [(("gpu",), load)])
    yield from many(
        "edge_board_load_ratio",
        (((engine.name,), engine.load) for engine in facts.engines),
    )
    yield from many(
        "edge_board_clock_hertz",
        (((engine.name,), engine.now_hz) for engine in facts.engines),
    )
    yield from many(
        "edge_board_clock_limit_hertz",
        (((engine.name,), engine.highest_hz) for engine in facts.engines),
    )


def _heat(facts: BoardFacts) -> Iterator[Metric]:
    zones = facts.heat.zones
    yield from many(
        "edge_board_temperature_celsius",
        (((zone.name,), zone.celsius) for zone in zones),
    )
    yield from many(
        "edge_board_temperature_throttle_celsius",
        (((zone.name,), zone.throttle_celsius) for zone in zones),
    )
    yield from many(
        "edge_board_temperature_critical_celsius",
        (((zone.name,), zone.critical_celsius) for zone in zones),
    )
    yield from many(
        "edge_board_supply_events_total",
        (((event.name,), event.count) for event in facts.heat.supply_events),
    )


def _power(facts: BoardFacts) -> Iterator[Metric]:
    yield from many(
        "edge_board_power_watts",
        (((rail.name,), rail.watts) for rail in facts.rails),
    )
    yield from many(
        "edge_board_voltage_volts",
        (((rail.name,), rail.volts) for rail in facts.rails),
    )
    modes = facts.power_modes
    if modes is not None and modes.current is not None:
        yield from info(
            "edge_board_power_mode_info", {"id": str(modes.current.id), "name": modes.current.name}
        )
    if facts.boot_reason is not None:
        yield from info("edge_board_boot_info", {"reason": facts.boot_reason})
    yield from one("edge_board_uptime_seconds", facts.uptime_s)


def _storage(facts: BoardFacts) -> Iterator[Metric]:
    yield from many(
        "edge_board_storage_worn_ratio",
        (((drive.name,), drive.worn) for drive in facts.storage),
    )
    yield from many(
        "edge_board_storage_temperature_celsius",
        (((drive.name,), drive.celsius) for drive in facts.storage),
    )
    memory = facts.memory
    yield from one("edge_board_swap_total_bytes", memory.swap_total_bytes)
    yield from one("edge_board_swap_free_bytes", memory.swap_free_bytes)
