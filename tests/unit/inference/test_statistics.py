"""What is counted stays small, and a quantile is at most a quarter too large."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_server.backends.contract import Phases
from edge_server.inference.statistics import ModelStatistics


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
