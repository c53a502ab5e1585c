"""The history has a value every 10 s for an hour, every 4 min for a day, and gaps."""

from __future__ import annotations

import math

from edge_server.api.http.page.history import KEPT, PERIOD_S, History
from edge_server.api.http.sources import Sources
from edge_server.lanes.types import LaneFrame
from edge_server.pipeline.lane_feed import LaneLatency


class Drive:
    """A camera whose lanes come as a test says, and a history of it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.latency = LaneLatency(lambda: round(1e9 * self.now_s))
        self.parts = Sources("0", list, (), self.latency)
        self.history = History()
        self.history.look(0.0, self.parts)

    def goes_on(self, frames: int, age_ms: int = 50, *, camera: str = "front") -> None:
        """One period with so many frames of that age."""
        self.now_s += PERIOD_S
        captured_ns = round(1e9 * self.now_s) - age_ms * 1_000_000
        for number in range(frames):
            self.latency(LaneFrame(camera, number, 0, captured_ns, 0, 64, 36, "lanes"), None)
        self.history.look(self.now_s, self.parts)


def test_rates_and_ages_are_means_of_each_period_and_a_silent_one_has_no_age() -> None:
    drive = Drive()
    drive.goes_on(50, 40)
    drive.goes_on(0)
    drive.goes_on(20, 80)
    shown = drive.history.shown("hour", now_s=32.0)
    assert shown["ages_s"] == [22, 12, 2]
    assert shown["series"]["lanes_hz/front"] == [5.0, 0.0, 2.0]
    assert shown["series"]["age_ms/front"] == [40.0, None, 80.0]


def test_a_sample_is_taken_when_its_period_is_over_and_not_before() -> None:
    drive = Drive()
    for tenth in range(1, 100):
        drive.history.look(tenth / 10, drive.parts)
    assert drive.history.samples == 0
    drive.history.look(PERIOD_S, drive.parts)
    assert drive.history.samples == 1


def test_a_value_of_the_day_is_the_mean_of_four_minutes_and_both_spans_are_bounded() -> None:
    drive = Drive()
    for number in range(24 * (KEPT + 2)):
        drive.goes_on(10 if number % 2 else 30)
    day = drive.history.shown("day")
    assert day["period_s"] == 240
    assert len(day["ages_s"]) == len(drive.history.shown("hour")["ages_s"]) == KEPT
    assert {round(value, 3) for value in day["series"]["lanes_hz/front"]} == {2.0}


def test_a_camera_that_was_removed_has_a_gap_from_then_on_and_counts_anew() -> None:
    drive = Drive()
    drive.goes_on(10)
    drive.latency.forget("front")
    drive.goes_on(10, camera="rear")
    drive.goes_on(20)
    series = drive.history.shown("hour")["series"]
    assert series["lanes_hz/front"] == [1.0, None, 2.0]
    assert series["lanes_hz/rear"][:2] == [None, 1.0]
    assert all(math.isfinite(value) for values in series.values() for value in values if value)
