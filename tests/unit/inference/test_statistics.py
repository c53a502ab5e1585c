"""What is counted stays small, and a quantile is at most a quarter too large."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_server.inference.statistics import Latencies, ModelStatistics


def test_a_model_that_responds_without_end_does_not_fill_the_memory() -> None:
    statistics = ModelStatistics()
    for index in range(1500):
        statistics.responded(index, 1)
    responses = statistics.counts().responses
    assert len(responses) == 1000
    assert responses["998"].success.count == 1
    assert responses["999"].success.count == 501


@given(st.lists(st.integers(1 << 10, 10**13), min_size=1), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_not_below_the_true_one_nor_a_quarter_above(
    durations_ns: list[int], share: float
) -> None:
    latencies = Latencies()
    for ns in durations_ns:
        latencies.add(ns)
    got = latencies.quantile_ns(share)
    slower = sum(ns > got for ns in durations_ns)
    assert slower <= (1 - share) * len(durations_ns) + 1e-9
    reached = sum(ns * 1.25 < got for ns in durations_ns)
    assert reached < share * len(durations_ns) + 1


def test_none_and_the_shortest() -> None:
    latencies = Latencies()
    assert latencies.quantile_ns(0.99) == 0
    latencies.add(0)
    assert 0 < latencies.quantile_ns(0.99) <= 1280
