"""A request whose response would come too late is refused at once, and no other."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import DeadlineExceeded, Unavailable
from edge_server.inference.direct import ExpectedWait
from edge_server.requests import InferRequest

RUN_S = 0.010


def request(deadline: float | None, *, urgent: bool = False) -> InferRequest:
    return InferRequest("m", {}, id="7", deadline=deadline, urgent=urgent)


def learnt(instances: int = 1, together: int = 1) -> ExpectedWait:
    """That every run takes `RUN_S`."""
    wait = ExpectedWait(instances, together)
    for _ in range(5):
        wait.runs_s.append(RUN_S)
    return wait


def joins(wait: ExpectedWait, *, ahead: int, within_s: float, running_s: float = RUN_S / 2) -> bool:
    try:
        wait.check(request(within_s), ahead=ahead, running_s=running_s, now=0.0)
    except Unavailable:
        return False
    return True


def test_the_rest_of_a_run_those_ahead_and_its_own_must_fit() -> None:
    wait = learnt()
    assert joins(wait, ahead=3, within_s=0.0451 / 0.75)
    assert not joins(wait, ahead=3, within_s=0.0449 / 0.75)
    with pytest.raises(
        Unavailable, match=r"\[request id: 7\] Exceeds maximum queue size: behind 3"
    ):
        wait.check(request(0.02), ahead=3, running_s=RUN_S, now=0.0)


def test_instances_and_batches_shorten_the_queue() -> None:
    assert joins(learnt(instances=2), ahead=4, within_s=0.036 / 0.75)
    assert not joins(learnt(instances=2), ahead=6, within_s=0.036 / 0.75)
    assert joins(learnt(together=4), ahead=7, within_s=0.026 / 0.75)
    assert not joins(learnt(together=4), ahead=8, within_s=0.026 / 0.75)


def test_without_a_deadline_urgent_or_with_an_idle_instance_no_request_is_refused() -> None:
    wait = learnt()
    wait.check(request(None), ahead=1000, running_s=60.0, now=0.0)
    wait.check(request(0.001, urgent=True), ahead=9, running_s=60.0, now=0.0)
    wait.check(request(0.001), ahead=0, running_s=0.0, now=0.0)
    ExpectedWait(1).check(request(0.001), ahead=9, running_s=60.0, now=0.0)


def test_a_caller_that_comes_after_its_deadline_is_refused() -> None:
    for wait in (learnt(), ExpectedWait(1)):
        with pytest.raises(DeadlineExceeded):
            wait.check(request(1.0), ahead=0, running_s=0.0, now=1.0)


def test_one_run_that_hangs_does_not_close_the_queue() -> None:
    wait = learnt()
    wait.runs_s.append(60.0)
    assert joins(wait, ahead=1, within_s=0.04)


# Every second run is half as long again; a line of 28 is as long as the server lets it be.
def in_time_per_s(wait: ExpectedWait | None, times: float, timeout_s: float) -> float:
    """How many are responded in time per second where `times` as many come as can be served."""
    chance = random.Random(1)  # noqa: S311 - the same each time
    line: deque[float] = deque()
    seconds, now, comes = 20.0, 0.0, 0.0
    began = run_s = 0.0
    serving: float | None = None
    in_time = 0
    while now < seconds:
        if serving is not None and began + run_s <= comes:
            now = began + run_s
            in_time += now <= serving + timeout_s
            serving = None
            if wait is not None:
                wait.runs_s.append(run_s)
        else:
            now, comes = comes, comes + chance.expovariate(times / (1.25 * RUN_S))
            running_s = 0.0 if serving is None else now - began + 1e-9
            if len(line) < 27 and (
                wait is None
                or joins(wait, ahead=len(line), within_s=timeout_s, running_s=running_s)
            ):
                line.append(now)
        while serving is None and line:
            came = line.popleft()
            if came + timeout_s > now:
                serving, began, run_s = came, now, RUN_S * chance.choice((1.0, 1.5))
    return in_time / seconds


@pytest.mark.parametrize("timeout_s", [0.05, 0.1, 0.25, 1.0])
def test_ten_times_too_many_leave_four_fifths_of_what_can_be_served(timeout_s: float) -> None:
    can_be_served_per_s = 1 / (1.25 * RUN_S)
    assert in_time_per_s(ExpectedWait(1), 10.0, timeout_s) >= 0.8 * can_be_served_per_s
    assert in_time_per_s(ExpectedWait(1), 0.5, timeout_s) >= 0.45 * can_be_served_per_s


def test_without_it_hardly_a_request_is_served_in_time() -> None:
    assert in_time_per_s(None, 10.0, 0.1) < 0.2 / (1.25 * RUN_S)


@given(
    runs_s=st.lists(st.floats(0.0, 1e3)),
    ahead=st.integers(0, 10**6),
    running_s=st.floats(0.0, 1e6),
    timeout_s=st.floats(1e-3, 1e6),
    more_s=st.floats(0.0, 1e6),
)
def test_a_caller_that_waits_longer_is_admitted_wherever_a_short_deadline_is(
    runs_s: list[float], ahead: int, running_s: float, timeout_s: float, more_s: float
) -> None:
    wait = ExpectedWait(2, 4)
    for run_s in runs_s:
        wait.runs_s.append(run_s)
    if joins(wait, ahead=ahead, within_s=timeout_s, running_s=running_s):
        assert joins(wait, ahead=ahead, within_s=timeout_s + more_s, running_s=running_s)
