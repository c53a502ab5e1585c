from __future__ import annotations

import pytest

from edge_server.cameras.frame import CATCH_UP_S, Pace


class Clock:
    """A clock that only sleeping and `late` move; every sleep oversleeps a little."""

    def __init__(self, oversleep_s: float = 0.0) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self._oversleep_s = oversleep_s

    def __call__(self) -> int:
        return round(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds + self._oversleep_s


def test_the_first_frame_is_due_at_once() -> None:
    clock = Clock()
    Pace(10, clock=clock, sleep=clock.sleep).wait()
    assert clock.slept == []


def test_oversleeping_and_slow_reading_do_not_add_up() -> None:
    clock = Clock(oversleep_s=0.004)
    pace = Pace(30, clock=clock, sleep=clock.sleep)
    pace.wait()
    for _ in range(3000):
        clock.now += 0.011
        pace.wait()
    assert clock.now - 1000.0 == pytest.approx(3000 / 30, abs=0.0041)


def test_a_short_delay_is_caught_up() -> None:
    clock = Clock()
    pace = Pace(10, clock=clock, sleep=clock.sleep)
    pace.wait()
    clock.now += 0.3
    for _ in range(4):
        pace.wait()
    assert clock.now == pytest.approx(1000.4)


def test_a_long_delay_is_followed_by_no_rush() -> None:
    clock = Clock()
    pace = Pace(10, clock=clock, sleep=clock.sleep)
    pace.wait()
    clock.now += 0.1 + 2 * CATCH_UP_S
    resumed = clock.now
    for _ in range(4):
        pace.wait()
    assert clock.now == pytest.approx(resumed + 0.3)


def test_a_rate_of_0_never_waits() -> None:
    clock = Clock()
    pace = Pace(0, clock=clock, sleep=clock.sleep)
    for _ in range(100):
        pace.wait()
    assert clock.slept == []


def test_in_lockstep_time_passes_from_frame_to_frame_alone() -> None:
    clock = Clock()
    pace = Pace(25, lockstep=True, clock=clock, sleep=clock.sleep)
    due = []
    for late_s in (0.0, 0.001, 7.0):
        clock.now += late_s
        due.append(pace.wait() - 1_000_000_000_000)
    assert due == [0, 40_000_000, 80_000_000]
    assert pace.wait(5_000_000) == 1_000_085_000_000
    assert clock.slept == []
