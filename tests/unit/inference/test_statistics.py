"""What is counted stays small; quantiles are close, and summaries of the last minute."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.backends.contract import Phases
from edge_server.inference.statistics import PHASES, LatencyMetrics, ModelStatistics, SlidingSummary
from edge_server.process.histogram import Buckets


def test_a_model_that_responds_without_end_does_not_fill_the_memory() -> None:
    statistics = ModelStatistics()
    for index in range(1500):
        statistics.responded(index, 1)
    responses = statistics.counts().responses
    assert len(responses) == 1000
    assert responses["998"].success.count == 1
    assert responses["999"].success.count == 501


def p99_ns(durations_ns: list[int], least: int = 1) -> int:
    statistics = ModelStatistics()
    for ns in durations_ns:
        statistics.succeeded(ns, 0, Phases(0, 0, 0))
    return statistics.p99_ns(least)


@given(st.lists(st.integers(1 << 10, 10**13), min_size=1))
def test_a_quantile_is_not_below_the_true_one_nor_a_quarter_above(durations_ns: list[int]) -> None:
    got = p99_ns(durations_ns)
    slower = sum(ns > got for ns in durations_ns)
    assert slower <= 0.01 * len(durations_ns) + 1e-9
    reached = sum(ns * 1.25 < got for ns in durations_ns)
    assert reached < 0.99 * len(durations_ns) + 1


def test_none_too_few_and_the_shortest() -> None:
    assert p99_ns([], least=0) == 0
    assert p99_ns([10**6], least=2) == 0
    assert 0 < p99_ns([0]) <= 1280


SECOND_NS = 1_000_000_000


@given(st.lists(st.integers(1000, 10**13), min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_is_a_value_of_its_rank_within_one_percent(
    durations_ns: list[int], share: float
) -> None:
    summary = SlidingSummary()
    for ns in durations_ns:
        summary.add(ns, 0)
    got = summary.at([share], SECOND_NS).quantiles_ns[share]
    rank = max(1, math.ceil(share * len(durations_ns)))
    assert abs(got / sorted(durations_ns)[rank - 1] - 1) <= 0.0101


def test_quantiles_forget_what_is_older_than_a_minute_and_counts_do_not() -> None:
    summary = SlidingSummary()
    summary.add(1_000_000, 0)
    summary.add(3_000_000, 50 * SECOND_NS)
    assert 990_000 < summary.at([0.0], 50 * SECOND_NS).quantiles_ns[0.0] < 1_010_000
    later = summary.at([0.0], 61 * SECOND_NS)
    assert later.quantiles_ns[0.0] > 2_900_000
    assert (later.count, later.sum_ns) == (2, 4_000_000)
    assert math.isnan(summary.at([0.5], 200 * SECOND_NS).quantiles_ns[0.5])


def test_a_histogram_counts_up_to_and_with_each_bound() -> None:
    buckets = Buckets([1.0, 5.0])
    for value in (0.5, 1.0, 3.0, 9.0):
        buckets.add(value)
    assert buckets.now() == ((1.0, 5.0), (2, 3, 4), 13.5)


def test_the_phases_of_a_request_are_in_histograms_where_they_are_kept() -> None:
    statistics = ModelStatistics(LatencyMetrics(histograms=True))
    statistics.succeeded(40_000_000, 7_000_000, Phases(1_000_000, 30_000_000, 2_000_000))
    statistics.hit(200_000)
    found = statistics.phases_s()
    assert found.keys() == set(PHASES)
    assert [found["request"].at_most[-1], found["compute_infer"].at_most[-1]] == [2, 1]
    assert found["request"].total == pytest.approx(0.0402)
    place = found["compute_infer"].bounds.index(0.05)
    assert found["compute_infer"].at_most[place - 1 : place + 1] == (0, 1)
    assert ModelStatistics().phases_s() == {}
