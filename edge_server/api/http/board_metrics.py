"""BoardMetrics: the machine itself, under Triton's names where Triton has them, else `edge_board_`.

What the board does not report has no sample, never a zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from edge_server.board.wall_clock import CLOCK_UNSYNCHRONIZED, ClockState
from edge_server.board.watch import REASONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
        yield from _gauge(
            "edge_disk_free_bytes",
            "Free space where the daemon writes",
            ("directory",),
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
    yield from _gauge(
        "edge_board_condition",
        "1 while lanes are degraded for that reason",
        ("reason",),
        (((word,), word in now) for word in (*REASONS, CLOCK_UNSYNCHRONIZED)),
    )
    yield from _gauge(
        "edge_board_clock_state",
        "1 for the state that the wall clock is in",
        ("state",),
        (((state.value,), condition.clock is state) for state in ClockState),
    )
    yield CounterMetricFamily(
        "edge_board_clock_steps", "How often the wall clock was set", condition.clock_steps
    )
    yield from _gauge(
        "edge_board_sample_age_seconds", "Since the board was read", (), [((), board.age_s)]
    )


def _engines(facts: BoardFacts, *, gpu: bool) -> Iterator[Metric]:
    loads = {engine.name: engine.load for engine in facts.engines}
    if gpu and loads.get("gpu") is not None:
        # Orin's GPU has no UUID.
        yield from _gauge(
            "nv_gpu_utilization",
            "GPU utilization rate [0.0 - 1.0)",
            ("gpu_uuid",),
            [(("gpu",), loads["gpu"])],
        )
    of = ("engine",)
    yield from _gauge(
        "edge_board_load_ratio",
        "Share of busy time of an engine",
        of,
        (((engine.name,), engine.load) for engine in facts.engines),
    )
    yield from _gauge(
        "edge_board_clock_hertz",
        "Clock of an engine",
        of,
        (((engine.name,), engine.now_hz) for engine in facts.engines),
    )
    yield from _gauge(
        "edge_board_clock_limit_hertz",
        "What the clock of an engine may reach now",
        of,
        (((engine.name,), engine.highest_hz) for engine in facts.engines),
    )


def _heat(facts: BoardFacts) -> Iterator[Metric]:
    zones = facts.heat.zones
    yield from _gauge(
        "edge_board_temperature_celsius",
        "Temperature of a zone",
        ("zone",),
        (((zone.name,), zone.celsius) for zone in zones),
    )
    yield from _gauge(
        "edge_board_temperature_throttle_celsius",
        "Where engines are slowed down",
        ("zone",),
        (((zone.name,), zone.throttle_celsius) for zone in zones),
    )
    yield from _gauge(
        "edge_board_temperature_critical_celsius",
        "Where the board is shut down",
        ("zone",),
        (((zone.name,), zone.critical_celsius) for zone in zones),
    )
    counter = CounterMetricFamily(
        "edge_board_supply_events",
        "Throttlings by the supply since boot: oc1 undervoltage, oc2 and oc3 over-current",
        labels=("counter",),
    )
    for event in facts.heat.supply_events:
        counter.add_metric((event.name,), event.count)
    if counter.samples:
        yield counter


def _power(facts: BoardFacts) -> Iterator[Metric]:
    yield from _gauge(
        "edge_board_power_watts",
        "Power of a rail",
        ("rail",),
        (((rail.name,), rail.watts) for rail in facts.rails),
    )
    yield from _gauge(
        "edge_board_voltage_volts",
        "Voltage of a rail",
        ("rail",),
        (((rail.name,), rail.volts) for rail in facts.rails),
    )
    modes = facts.power_modes
    if modes is not None and modes.current is not None:
        mode = {"id": str(modes.current.id), "name": modes.current.name}
        yield InfoMetricFamily("edge_board_power_mode", "nvpmodel's mode", mode)
    if facts.boot_reason is not None:
        boot = {"reason": facts.boot_reason}
        yield InfoMetricFamily("edge_board_boot", "The cause of the last reset", boot)
    yield from _gauge(
        "edge_board_uptime_seconds", "Since the kernel started", (), [((), facts.uptime_s)]
    )


def _storage(facts: BoardFacts) -> Iterator[Metric]:
    yield from _gauge(
        "edge_board_storage_worn_ratio",
        "Upper bound of the used share of a drive's life",
        ("drive",),
        (((drive.name,), drive.worn) for drive in facts.storage),
    )
    yield from _gauge(
        "edge_board_storage_temperature_celsius",
        "Temperature of a drive",
        ("drive",),
        (((drive.name,), drive.celsius) for drive in facts.storage),
    )
    memory = facts.memory
    yield from _gauge("edge_board_swap_total_bytes", "Swap", (), [((), memory.swap_total_bytes)])
    yield from _gauge(
        "edge_board_swap_free_bytes", "Swap that is free", (), [((), memory.swap_free_bytes)]
    )


def _gauge(
    name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], Any]]
) -> Iterator[Metric]:
    """Yield the metric, if one of its values is known."""
    known = [(key, float(value)) for key, value in values if value is not None]
    if not known:
        return
    metric = GaugeMetricFamily(name, text, labels=labels)
    for key, value in known:
        metric.add_metric(key, value)
    yield metric
