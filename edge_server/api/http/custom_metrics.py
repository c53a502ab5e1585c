"""CustomMetrics: the metrics that models define themselves, by their own names."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from prometheus_client import Metric
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.api.http.sources import Sources
    from edge_server.backends.contract import ModelMetric

log = logging.getLogger(__name__)


class CustomMetrics:
    """A Collector of prometheus_client.

    Metrics have the labels `model` and `version`, unless the model sets them itself. Of two with
    all labels equal (two versions that both set their own) the later one is exported; of two with
    one name but different kinds, the first.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._unlike: set[str] = set()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, dict[tuple[tuple[str, str], ...], ModelMetric]] = {}
        for entry in self._sources.models():
            if entry.loaded is None:
                continue
            of_model = {"model": entry.name, "version": str(entry.version)}
            for metric in entry.loaded.metrics():
                family = families.setdefault(metric.name, {})
                if family and next(iter(family.values())).kind != metric.kind:
                    self._warn_once(metric, entry.name)
                    continue
                family[tuple(sorted({**of_model, **metric.labels}.items()))] = metric
        for name, family in families.items():
            yield _family(name, family)

    def _warn_once(self, metric: ModelMetric, model: str) -> None:
        if metric.name not in self._unlike:
            self._unlike.add(metric.name)
            log.warning(
                "metrics: '%s' of model %s is a %s, but another model's is not; it is not told: "
                "rename one of them",
                metric.name,
                model,
                metric.kind,
            )


def _family(name: str, metrics: dict[tuple[tuple[str, str], ...], ModelMetric]) -> Metric:
    first = next(iter(metrics.values()))
    family = Metric(name, first.description, first.kind)
    if first.kind == "counter":
        # `unknown` for the reason that ModelMetrics gives; else the family's name has no `_total`.
        base = name.removesuffix("_total")
        family = Metric(base, first.description, "unknown" if base == name else "counter")
    for labels, metric in metrics.items():
        if metric.kind != "histogram":
            family.add_sample(name, dict(labels), metric.value)
            continue
        for bound, count in metric.buckets.items():
            family.add_sample(f"{name}_bucket", {**dict(labels), "le": _bound(bound)}, count)
        family.add_sample(f"{name}_count", dict(labels), metric.buckets[float("inf")])
        family.add_sample(f"{name}_sum", dict(labels), metric.value)
    return family


def _bound(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]
