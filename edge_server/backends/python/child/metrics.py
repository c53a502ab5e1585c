"""`pb_utils.MetricFamily` and `Metric`: the daemon keeps the values, which survive this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from edge_server.backends.python.child.errors import TritonModelException
from edge_server.backends.python.child.given import text
from edge_server.backends.python.child.link import daemon
from edge_server.backends.python.messages import AskMetric, ChangeMetric, MakeMetric

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Kind = Literal["counter", "gauge", "histogram"]
_KINDS = get_args(Kind)


class MetricFamily:
    """Metrics of one name that differ in their labels."""

    COUNTER: Kind = "counter"
    GAUGE: Kind = "gauge"
    HISTOGRAM: Kind = "histogram"

    def __init__(self, name: str, description: str, kind: Kind = COUNTER) -> None:
        if kind not in _KINDS:
            raise TritonModelException(
                f"a metric is of no kind {kind!r}; kinds: {', '.join(_KINDS)}"
            )
        self._name = text(name, "name")
        self._description = text(description, "description")
        self._kind: Kind = kind

    def Metric(  # noqa: N802 - Triton's name
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Return the metric with these labels; equal labels share one metric.

        Args:
            buckets: upper bounds, ascending; required for a histogram, not allowed for other kinds.
        """
        if (self._kind == "histogram") != bool(buckets):
            raise TritonModelException(
                "Histogram requires buckets, and no other kind of metric takes them."
            )
        said = {text(k, "label"): text(v, "label's value") for k, v in (labels or {}).items()}
        returned = daemon().ask(
            lambda call: MakeMetric(
                call,
                self._name,
                self._description,
                self._kind,
                said,
                None if buckets is None else [float(bound) for bound in buckets],
            )
        )
        if returned.failure:
            raise TritonModelException(returned.failure)
        return Metric(int(returned.value), self._kind)


class Metric:
    """One value, or one histogram."""

    def __init__(self, number: int, kind: Kind) -> None:
        self._number = number
        self._kind = kind

    def increment(self, value: float) -> None:
        by = float(value)
        if self._kind == "histogram" or (self._kind == "counter" and by < 0):
            raise TritonModelException(f"a {self._kind} cannot be incremented by {value}")
        daemon().send(ChangeMetric(self._number, "increment", by))

    def set(self, value: float) -> None:
        if self._kind != "gauge":
            raise TritonModelException(f"a {self._kind} cannot be set")
        daemon().send(ChangeMetric(self._number, "set", float(value)))

    def observe(self, value: float) -> None:
        if self._kind != "histogram":
            raise TritonModelException(f"a {self._kind} cannot observe")
        daemon().send(ChangeMetric(self._number, "observe", float(value)))

    def value(self) -> float:
        if self._kind == "histogram":
            raise TritonModelException("a histogram has no single value")
        returned = daemon().ask(lambda call: AskMetric(call, self._number))
        if returned.failure:
            raise TritonModelException(returned.failure)
        return returned.value
