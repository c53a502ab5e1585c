"""Metrics that a model defines: the daemon keeps them, so that they survive a restart of the
process."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from itertools import accumulate, pairwise
from math import isnan
from typing import TYPE_CHECKING

from edge_server.backends.contract import ModelMetric
from edge_server.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from edge_server.backends.contract import MetricKind
    from edge_server.backends.python.messages import ChangeMetric, MakeFamily, MakeMetric

# Prometheus's rule for metric names.
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
# Prefixes of the server's own metrics; two metrics of one name make the whole page unreadable.
_TAKEN = ("nv_", "edge_", "process_")
# The limit on metrics of one model: a label with ever new values would fill the memory and the
# page.
_MOST = 1000
_LONGEST = 4096
_MOST_BUCKETS = 256


class MetricBook:
    """The metrics of one model, shared by its instances; each metric has a number. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, tuple[str, MetricKind]] = {}
        self._numbers: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}
        self._metrics: list[_Metric] = []

    def make_family(self, message: MakeFamily) -> None:
        """Reserve the name for metrics of that kind; the first description is kept.

        Raises:
            InvalidRequest: the name is invalid, or belongs to metrics of another kind or to the
                server, or the model has too many families.
        """
        name = message.name
        _check_length(name, (name, message.description))
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"'{name}' cannot be a metric's name: letters, digits, '_' and ':'"
            )
        if name.startswith(_TAKEN):
            raise InvalidRequest(
                f"metric '{name}': names with {', '.join(_TAKEN)} are the server's own"
            )
        with self._lock:
            if name not in self._families and len(self._families) >= _MOST:
                raise InvalidRequest(f"metric '{name}': a model has at most {_MOST} families")
            _, kind = self._families.setdefault(name, (message.description, message.kind))
        if kind != message.kind:
            raise InvalidRequest(f"metric '{name}' is a {kind} already, no {message.kind}")

    def make(self, message: MakeMetric) -> int:
        """Return the number of the metric; an existing metric keeps its number.

        Raises:
            InvalidRequest: see `make_family`; or a label is invalid, the buckets do not ascend, or
                the model has too many metrics.
        """
        name, labels, bounds = message.family.name, message.labels, tuple(message.buckets)
        self.make_family(message.family)
        _check_labels(name, labels)
        if len(bounds) > _MOST_BUCKETS:
            raise InvalidRequest(f"metric '{name}': {len(bounds)} buckets; at most {_MOST_BUCKETS}")
        is_histogram = message.family.kind == "histogram"
        if is_histogram and "le" in labels:
            raise InvalidRequest(f"metric '{name}': 'le' is a histogram's own label")
        if any(map(isnan, bounds)) or any(a >= b for a, b in pairwise(bounds)):
            raise InvalidRequest(f"metric '{name}': its buckets do not ascend: {list(bounds)}")
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            if key not in self._numbers:
                if len(self._metrics) >= _MOST:
                    raise InvalidRequest(f"metric '{name}': a model has at most {_MOST} metrics")
                self._numbers[key] = len(self._metrics)
                self._metrics.append(_Metric(name, labels, bounds if is_histogram else None))
            return self._numbers[key]

    def change(self, message: ChangeMetric) -> None:
        """Change one metric.

        Raises:
            LookupError: no metric has that number.
        """
        with self._lock:
            metric, value = self._metrics[message.metric], message.value
            if message.action == "set":
                metric.value = value
                return
            metric.value += value
            if message.action == "observe":
                metric.counts[bisect_left(metric.bounds or (), value)] += 1

    def value(self, number: int) -> float:
        """Return the value of metric `number`.

        Raises:
            LookupError: no metric has that number.
        """
        with self._lock:
            return self._metrics[number].value

    def metrics(self) -> tuple[ModelMetric, ...]:
        with self._lock:
            return tuple(
                ModelMetric(m.name, *self._families[m.name], m.labels, m.value, m.buckets())
                for m in self._metrics
            )


def _check_labels(name: str, labels: Mapping[str, str]) -> None:
    _check_length(name, (*labels, *labels.values()))
    for label in labels:
        if not _LABEL.fullmatch(label):
            raise InvalidRequest(
                f"metric '{name}': '{label}' cannot be a label: letters, digits, '_'"
            )


def _check_length(name: str, texts: Iterable[str]) -> None:
    if sum(map(len, texts)) > _LONGEST:
        raise InvalidRequest(
            f"metric '{name[:64]}': its texts have more than {_LONGEST} characters"
        )


class _Metric:
    """Its value; `bounds` are None where it is no histogram."""

    def __init__(
        self, name: str, labels: Mapping[str, str], bounds: tuple[float, ...] | None
    ) -> None:
        self.name = name
        self.labels = labels
        self.bounds = bounds
        self.value = 0.0
        self.counts = [0] * (len(bounds or ()) + 1)

    def buckets(self) -> dict[float, int]:
        if self.bounds is None:
            return {}
        return dict(zip((*self.bounds, float("inf")), accumulate(self.counts), strict=True))
