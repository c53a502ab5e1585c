"""Models' own metrics are on the page, in both of its formats, and cannot spoil it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, parser
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from edge_server.api.http.metrics import Collector, CustomMetrics, model_metrics
from edge_server.backends.contract import ModelMetric, Phases
from edge_server.inference.statistics import LatencyMetrics, ModelStatistics


def registry(**models: list[ModelMetric]) -> CollectorRegistry:
    entries = [
        SimpleNamespace(
            name=name, version=1, loaded=SimpleNamespace(metrics=lambda metrics=metrics: metrics)
        )
        for name, metrics in models.items()
    ]
    made = CollectorRegistry()
    sources = SimpleNamespace(models=lambda: entries)
    made.register(Collector(sources, CustomMetrics().read))
    return made


def samples(made: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in made.collect()
        for sample in family.samples
    }


def counter(name: str, value: float, **labels: str) -> ModelMetric:
    return ModelMetric(name, "how many", "counter", labels, value)


def test_every_kind_has_the_labels_that_its_model_gives_and_no_others() -> None:
    histogram = ModelMetric(
        "latency", "how long", "histogram", {"step": "in"}, 7.5, {1.0: 2, 5.0: 3, float("inf"): 4}
    )
    made = registry(lanes=[counter("seen", 3), counter("met_total", 4), histogram])
    found = samples(made)
    assert found["seen", ()] == 3
    assert found["met_total", ()] == 4
    step = (("step", "in"),)
    assert found["latency_count", step] == 4
    assert found["latency_sum", step] == 7.5
    assert found["latency_bucket", (("le", "5"), *step)] == 3
    assert found["latency_bucket", (("le", "+Inf"), *step)] == 4
    text = generate_latest(made).decode()
    assert list(parser.text_string_to_metric_families(text))
    text = generate_openmetrics(made).decode()
    assert list(openmetrics.text_string_to_metric_families(text))


def test_models_that_measure_the_same_thing_count_together_and_of_gauges_the_later_is_right() -> (
    None
):
    def of(seen: float, near: int) -> list[ModelMetric]:
        buckets = {1.0: near, float("inf"): near + 1}
        return [
            counter("seen", seen),
            counter("seen", seen, lane="left"),
            ModelMetric("latency", "how long", "histogram", {}, seen, buckets),
            ModelMetric("speed", "how fast", "gauge", {}, seen),
        ]

    found = samples(registry(a=of(1, 2), b=of(2, 5)))
    assert found["seen", ()] == found["seen", (("lane", "left"),)] == 3
    assert found["latency_sum", ()] == 3
    assert found["latency_bucket", (("le", "1"),)] == 7
    assert found["latency_count", ()] == 9
    assert found["speed", ()] == 2


def test_of_two_kinds_under_one_name_the_first_is_exported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = registry(a=[counter("seen", 1)], b=[ModelMetric("seen", "how many", "gauge", {}, 2.0)])
    with caplog.at_level(logging.WARNING):
        assert samples(made) == samples(made) == {("seen", ()): 1}
    (record,) = caplog.records
    assert "'seen' of model b is a gauge" in record.getMessage()


def of_statistics(statistics: ModelStatistics) -> CollectorRegistry:
    scheduler = SimpleNamespace(pending=lambda: 0)
    loaded = SimpleNamespace(statistics=statistics, scheduler=scheduler, load_s=1.0)
    sources = SimpleNamespace(models=lambda: [SimpleNamespace(name="m", version=1, loaded=loaded)])
    made = CollectorRegistry()
    made.register(Collector(sources, model_metrics))
    return made


M_1 = (("model", "m"), ("version", "1"))


def test_latencies_are_exported_as_the_metrics_config_asks() -> None:
    kept = LatencyMetrics(counters=False, summaries=True, histograms=True, quantiles=(0.5, 0.999))
    statistics = ModelStatistics(kept, (100.0, 500.0))
    statistics.succeeded(9000_000, 2000_000, Phases(1000_000, 4000_000, 2000_000))
    statistics.first_responded(200_000_000)
    made = of_statistics(statistics)
    found = samples(made)
    assert found["nv_inference_request_success", M_1] == 1
    assert ("nv_inference_request_duration_us", M_1) not in found
    for name, us in {
        "request": 9000,
        "queue": 2000,
        "compute_input": 1000,
        "compute_infer": 4000,
        "compute_output": 2000,
    }.items():
        family = f"nv_inference_{name}_summary_us"
        assert found[f"{family}_count", M_1] == 1
        assert found[f"{family}_sum", M_1] == us
        for quantile in ("0.5", "0.999"):
            value = found[family, (M_1[0], ("quantile", quantile), M_1[1])]
            assert abs(value / us - 1) <= 0.0101
    family = "nv_inference_first_response_histogram_ms"
    at_most = [found[f"{family}_bucket", (("le", le), *M_1)] for le in ("100", "500", "+Inf")]
    assert at_most == [0, 1, 1]
    assert found[f"{family}_sum", M_1] == 200
    assert list(parser.text_string_to_metric_families(generate_latest(made).decode()))
    text = generate_openmetrics(made).decode()
    assert list(openmetrics.text_string_to_metric_families(text))


def test_without_a_metrics_config_there_are_total_times_only_and_tags_are_labels() -> None:
    statistics = ModelStatistics(tags={"_site": "north"})
    statistics.first_responded(1)
    statistics.succeeded(9000_000, 0, Phases(0, 0, 0))
    made = of_statistics(statistics)
    tagged = (("_site", "north"), *M_1)
    assert samples(made)["nv_inference_request_duration_us", tagged] == 9000
    assert not [name for name, _ in samples(made) if "summary" in name or "histogram" in name]


@pytest.mark.parametrize("cached", [False, True])
def test_metrics_of_the_cache_are_there_for_models_whose_responses_it_keeps(cached: bool) -> None:
    statistics = ModelStatistics(LatencyMetrics(summaries=True), cached=cached)
    statistics.missed(2000)
    statistics.hit(1000)
    found = samples(of_statistics(statistics))
    assert (("nv_cache_num_hits_per_model", M_1) in found) is cached
    assert (("nv_cache_miss_summary_per_model_count", M_1) in found) is cached
    assert found["nv_inference_request_summary_us_count", M_1] == 1


@pytest.mark.parametrize(
    ("counters", "summaries"), [(True, False), (False, True), (False, False), (True, True)]
)
@pytest.mark.parametrize("cached", [False, True])
def test_a_family_of_the_cache_is_named_only_where_it_has_samples(
    counters: bool, summaries: bool, cached: bool
) -> None:
    kept = LatencyMetrics(counters=counters, summaries=summaries)
    text = generate_latest(of_statistics(ModelStatistics(kept, cached=cached))).decode()
    assert ("nv_cache_num_hits_per_model" in text) is (counters and cached)
    assert ("nv_cache_hit_summary" in text) is (summaries and cached)
