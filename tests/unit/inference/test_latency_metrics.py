"""Summaries are of the last minute and within 1 %; histograms count for good."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from edge_server.inference.statistics import SlidingSummary
from edge_server.process.histogram import Buckets

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
