"""Models' own metrics are on the page, in both of its formats, and cannot spoil it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, parser
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from edge_server.api.http.custom_metrics import CustomMetrics
from edge_server.backends.contract import ModelMetric

if TYPE_CHECKING:
    import pytest


def registry(**models: list[ModelMetric]) -> CollectorRegistry:
    entries = [
        SimpleNamespace(
            name=name, version=1, loaded=SimpleNamespace(metrics=lambda told=told: told)
        )
        for name, told in models.items()
    ]
    made = CollectorRegistry()
    sources = SimpleNamespace(models=lambda: entries)
    made.register(CustomMetrics(sources))  # type: ignore[arg-type]
    return made


def samples(made: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in made.collect()
        for sample in family.samples
    }


def counter(name: str, value: float, **labels: str) -> ModelMetric:
    return ModelMetric(name, "how many", "counter", labels, value)


def test_every_kind_is_told_with_the_model_it_is_of() -> None:
    histogram = ModelMetric(
        "latency", "how long", "histogram", {"step": "in"}, 7.5, {1.0: 2, 5.0: 3, float("inf"): 4}
    )
    made = registry(lanes=[counter("seen", 3), counter("met_total", 4), histogram])
    told = samples(made)
    of = (("model", "lanes"), ("version", "1"))
    assert told["seen", of] == 3
    assert told["met_total", of] == 4
    step = (*of[:1], ("step", "in"), *of[1:])
    assert told["latency_count", step] == 4
    assert told["latency_sum", step] == 7.5
    assert told["latency_bucket", (("le", "5.0"), *step)] == 3
    assert told["latency_bucket", (("le", "+Inf"), *step)] == 4
    text = generate_latest(made).decode()
    assert list(parser.text_string_to_metric_families(text))
    text = generate_openmetrics(made).decode()
    assert list(openmetrics.text_string_to_metric_families(text))


def test_two_models_may_measure_the_same_thing() -> None:
    told = samples(registry(a=[counter("seen", 1)], b=[counter("seen", 2)]))
    assert told["seen", (("model", "a"), ("version", "1"))] == 1
    assert told["seen", (("model", "b"), ("version", "1"))] == 2


def test_the_models_own_labels_come_before_ours_and_the_later_model_counts() -> None:
    told = samples(registry(a=[counter("seen", 1, model="x")], b=[counter("seen", 2, model="x")]))
    assert told == {("seen", (("model", "x"), ("version", "1"))): 2}


def test_of_two_kinds_under_one_name_the_first_is_told(caplog: pytest.LogCaptureFixture) -> None:
    made = registry(a=[counter("seen", 1)], b=[ModelMetric("seen", "how many", "gauge", {}, 2.0)])
    with caplog.at_level(logging.WARNING):
        assert samples(made) == samples(made) == {("seen", (("model", "a"), ("version", "1"))): 1}
    (record,) = caplog.records
    assert "'seen' of model b is a gauge" in record.getMessage()
