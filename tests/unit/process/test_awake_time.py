"""The time of a monitor's own sleep counts for nothing that it watches."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.process.threads import AwakeTime

PERIOD_S, LONGEST_S = 0.25, 0.5
UPTIME_S = 400 * 86_400.0


def looks(awake: AwakeTime, now: float, seconds: float) -> float:
    for _ in range(round(seconds / PERIOD_S)):
        now += PERIOD_S
        awake.look(now)
    return now


@pytest.mark.parametrize("uptime_s", [60.0, UPTIME_S])
def test_a_monitor_that_looks_in_time_counts_every_second(uptime_s: float) -> None:
    awake = AwakeTime(LONGEST_S)
    awake.look(uptime_s)
    looks(awake, uptime_s, 100.0)
    assert awake.since(uptime_s + 40.0) == pytest.approx(60.0)
    assert awake.since(uptime_s + 101.0) == 0.0
    assert awake.since(math.inf) == 0.0


def test_what_began_before_the_first_look_counts_from_it() -> None:
    awake = AwakeTime(LONGEST_S)
    awake.look(10.0)
    assert awake.since(3.0) == 0.0
    looks(awake, 10.0, 2.0)
    assert awake.since(3.0) == 2.0


def test_of_a_standstill_only_the_longest_time_between_looks_counts() -> None:
    awake = AwakeTime(LONGEST_S)
    awake.look(0.0)
    now = looks(awake, 0.0, 1.0)
    for _ in range(8):
        awake.look(now + 2.0)
        now = looks(awake, now + 2.0, 0.25)
    assert awake.since(0.0) == pytest.approx(1.0 + 8 * (LONGEST_S + 0.25))
    assert awake.since(now - 0.25) == 0.25


@given(
    gaps=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=50),
    at=st.floats(0.0, 1.0),
)
def test_no_age_is_more_than_the_clock_says_or_than_the_looks_since_then_allow(
    gaps: list[float], at: float
) -> None:
    awake, times = AwakeTime(LONGEST_S), [UPTIME_S]
    awake.look(UPTIME_S)
    for gap_s in gaps:
        times.append(times[-1] + gap_s)
        awake.look(times[-1])
    moment = UPTIME_S + at * (times[-1] - UPTIME_S)
    since = sum(time > moment for time in times)
    assert 0.0 <= awake.since(moment) <= times[-1] - moment + 1e-6
    assert awake.since(moment) <= since * LONGEST_S + 1e-6
