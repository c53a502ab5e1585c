"""How the device did over the last hour and day: means, kept in memory."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from edge_server.api.http.sources import ProcessorUse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from edge_server.api.http.sources import Sources

SpanName = Literal["hour", "day"]
PERIOD_S = 10.0
KEPT = 360  # of each span
# Samples of 10 s in a value of the day: 4 min.
_PER_VALUE_OF_DAY = 24


class _Sample(NamedTuple):
    """The values of a period that ended at `at_s`; `time.monotonic`."""

    at_s: float
    values: Mapping[str, float]


class History:
    """Keeps what the device measured: every 10 s of the last hour, every 4 min of the last day.

    Names of values, with a mean over the period where the source counts, else the value at its end:
    `age_ms/CAMERA` and `lanes_hz/CAMERA`; `celsius/ZONE`, `watts/RAIL`, `load/ENGINE` (0..1),
    `processors` (0..1) and `memory` (used, 0..1). What is not known has no value.

    One thread calls `look`; any may call `shown`. It holds some 700 samples, about 1 MB.
    """

    def __init__(self) -> None:
        self._spans: dict[SpanName, deque[_Sample]] = {
            "hour": deque(maxlen=KEPT),
            "day": deque(maxlen=KEPT),
        }
        self._processors = ProcessorUse()
        self._counted: dict[str, tuple[int, float]] = {}  # camera: frames with lanes, their ages
        self._looked_s: float | None = None
        self._gathered: list[_Sample] = []
        self.samples = 0

    def look(self, now_s: float, parts: Sources) -> None:
        """Take a sample where one is due; returns at once."""
        before_s = self._looked_s
        if before_s is not None and now_s - before_s < PERIOD_S:
            return
        self._looked_s = now_s
        values = self._values(parts, None if before_s is None else now_s - before_s)
        if before_s is None:
            return  # nothing has been counted before
        sample = _Sample(now_s, values)
        self._spans["hour"].append(sample)
        self._gathered.append(sample)
        if len(self._gathered) == _PER_VALUE_OF_DAY:
            self._spans["day"].append(_Sample(now_s, _means(self._gathered)))
            self._gathered = []
        self.samples += 1

    def shown(self, span: SpanName, now_s: float | None = None) -> dict[str, Any]:
        """Return `ages_s` of the samples, the oldest first, and by name their values, null where
        there is none."""
        samples = tuple(self._spans[span])
        now_s = time.monotonic() if now_s is None else now_s
        names = sorted({name for each in samples for name in each.values})
        return {
            "period_s": PERIOD_S * (_PER_VALUE_OF_DAY if span == "day" else 1),
            "ages_s": [round(now_s - each.at_s) for each in samples],
            "series": {name: [each.values.get(name) for each in samples] for name in names},
        }

    def _values(self, parts: Sources, elapsed_s: float | None) -> dict[str, float]:
        values: dict[str, float] = {}
        counted = {
            camera: (each.at_most[-1], each.total)
            for (camera,), each in parts.latency.end_to_end().items()
        }
        for camera, (frames, total_s) in counted.items():
            before, total_before_s = self._counted.get(camera, (0, 0.0))
            if elapsed_s and frames >= before:
                values[f"lanes_hz/{camera}"] = round((frames - before) / elapsed_s, 2)
                if frames > before:
                    mean_s = (total_s - total_before_s) / (frames - before)
                    values[f"age_ms/{camera}"] = round(1e3 * mean_s, 1)
        self._counted = counted
        if (busy := self._processors.utilization()) is not None:
            values["processors"] = round(busy, 3)
        facts = None if parts.board is None else parts.board.report.facts
        if facts is None:
            return values
        for zone in facts.heat.zones:
            values[f"celsius/{zone.name}"] = round(zone.celsius, 1)
        for rail in facts.rails:
            values[f"watts/{rail.name}"] = round(rail.watts, 2)
        for engine in facts.engines:
            if engine.load is not None:
                values[f"load/{engine.name}"] = round(engine.load, 3)
        memory = facts.memory
        if memory.total_bytes and memory.available_bytes is not None:
            values["memory"] = round(1 - memory.available_bytes / memory.total_bytes, 3)
        return values


def _means(samples: Iterable[_Sample]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.values.items():
            found.setdefault(name, []).append(value)
    return {name: round(sum(values) / len(values), 3) for name, values in found.items()}
