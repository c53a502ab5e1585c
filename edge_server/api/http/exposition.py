"""Exposition: all metrics as text. This module and its imports load at the first scrape."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from edge_server.api.http.appliance_metrics import ApplianceMetrics
from edge_server.api.http.custom_metrics import CustomMetrics
from edge_server.api.http.model_metrics import ModelMetrics
from edge_server.process.paths import as_utf8

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric
    from prometheus_client.registry import Collector

    from edge_server.api.http.sources import Sources

# prometheus_client can name a counter without `_total` only if its type is unknown.
_UNTYPED = re.compile(rb"^(# TYPE [\w:]+) untyped$", re.MULTILINE)


class _Utf8:
    """A collector whose labels and descriptions every format can carry; see `as_utf8`."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterator[Metric]:
        for metric in self._collector.collect():
            metric.documentation = as_utf8(metric.documentation)
            metric.samples = [
                sample._replace(labels={k: as_utf8(v) for k, v in sample.labels.items()})
                for sample in metric.samples
            ]
            yield metric


class Exposition:
    """Writes the present metrics, in the format that the client prefers."""

    def __init__(self, sources: Sources) -> None:
        self._registry = CollectorRegistry()
        for collector in (ModelMetrics, ApplianceMetrics, CustomMetrics):
            self._registry.register(_Utf8(collector(sources)))
        ProcessCollector(registry=self._registry)

    def write(self, accept: str) -> tuple[bytes, str]:
        """Return the text and its content type, for the `Accept` header of a request."""
        encode, content_type = choose_encoder(accept)
        text = encode(self._registry)
        if content_type.startswith("text/plain"):
            text = _UNTYPED.sub(rb"\1 counter", text)
        return text, content_type
