"""DepartureWatch: ISO 17361's two lines, hysteresis, and the reasons for no warning."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.lanes.departure import DepartureChange, DepartureRule, DepartureWatch
from edge_server.lanes.types import GroundLane, Lane, Polynomial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.lanes.types import Indicator

FRAME_S = 1 / 30
HALF_WIDTH_M = DepartureRule().half_width_m


def boundary(
    index: int, offset_m: float, heading_rad: float = 0.0, *, id_: int = 0, std_m: float = 0.03
) -> Lane:
    covariance = np.diag([std_m**2, 1e-6, 1e-9, 0.0])
    polynomial = Polynomial(np.array([offset_m, heading_rad, 0.0, 0.0]), covariance, 5.0, 40.0)
    points = np.array([[5, offset_m], [40, offset_m]], np.float32)
    return Lane(
        points, 0.9, id=id_ or index + 10, index=index, ground=GroundLane(points, polynomial)
    )


@dataclass
class Drive:
    """A vehicle in a lane of 3.6 m that moves sideways; positive to the left."""

    offset_m: Callable[[float], float]
    speed_mps: float = 25.0
    turn: Indicator = "unknown"
    knows_speed: bool = True
    std_m: float = 0.03
    predicted: bool = False
    rule: DepartureRule | None = None

    def changes(self, seconds: float) -> Iterator[tuple[float, DepartureChange]]:
        watch = DepartureWatch(self.rule)
        for n in range(int(seconds / FRAME_S)):
            time_s = n * FRAME_S
            offset = self.offset_m(time_s)
            sideways_mps = (self.offset_m(time_s + 1e-3) - offset) / 1e-3
            heading = -sideways_mps / self.speed_mps
            lanes = [
                replace(
                    boundary(index, -index * 1.8 - offset, heading, std_m=self.std_m),
                    predicted=self.predicted,
                )
                for index in (-1, 1)
            ]
            speed = self.speed_mps if self.knows_speed else None
            change = watch.update(lanes, int(time_s * 1e9), speed, self.turn)
            if change is not None:
                yield time_s, change


def drift(speed_mps: float) -> Callable[[float], float]:
    return lambda time_s: speed_mps * max(0.0, time_s - 1.0)


@pytest.mark.parametrize("knows_speed", [True, False])
@pytest.mark.parametrize("lateral_mps", [0.1, 0.3, 0.5, 0.8, 1.0, -0.5, -0.8])
def test_the_warning_lies_between_the_two_lines_of_iso_17361(
    lateral_mps: float, knows_speed: bool
) -> None:
    began = next(Drive(drift(lateral_mps), knows_speed=knows_speed).changes(30))[1]
    fast = abs(lateral_mps)
    earliest_m = 0.75 if fast <= 0.5 else min(1.5 * fast, 1.5)
    assert began.cause is None
    assert began.side == ("left" if lateral_mps > 0 else "right")
    assert -0.3 <= began.distance_m <= earliest_m


def test_a_vehicle_that_keeps_its_lane_is_not_warned() -> None:
    weaving = Drive(lambda time_s: 0.3 * math.sin(time_s))
    assert not list(weaving.changes(60))


def test_a_warning_ends_when_the_vehicle_is_back_for_a_while() -> None:
    offset = {0: 0.0, 2: 0.9, 4: 0.2, 30: 0.2}
    there_and_back = Drive(lambda t: float(np.interp(t, list(offset), list(offset.values()))))
    (_, began), (ended_s, ended) = there_and_back.changes(10)
    assert began.cause is None
    assert ended.cause == "returned"
    assert ended.distance_m >= DepartureRule().clear_m
    # 1.8 - 0.95 - 0.3 m sideways is reached at 3 s; half a second later it is over.
    assert ended_s == pytest.approx(3.5, abs=0.1)


def test_a_warning_does_not_flicker_on_the_line() -> None:
    on_the_line = Drive(lambda t: 0.85 + 0.05 * math.sin(20 * t))
    assert len(list(on_the_line.changes(20))) == 1


@pytest.mark.parametrize(
    "silent",
    [
        Drive(drift(0.5), turn="left"),
        Drive(drift(0.5), turn="hazard"),
        Drive(drift(0.5), speed_mps=10.0),
        Drive(drift(0.5), std_m=0.3),
        Drive(drift(0.5), predicted=True),
    ],
    ids=["indicator", "hazard", "slow", "inaccurate", "predicted"],
)
def test_nothing_is_warned_of_with_a_reason(silent: Drive) -> None:
    assert not list(silent.changes(4))


@pytest.mark.parametrize(
    ("turn", "speed_mps", "cause"), [("left", 25.0, "indicator"), ("off", 10.0, "slow")]
)
def test_what_is_withheld_has_held_for_as_many_frames_as_a_warning(
    turn: Indicator, speed_mps: float, cause: str
) -> None:
    watch = DepartureWatch(DepartureRule(frames=3))
    near, far = [boundary(-1, HALF_WIDTH_M - 0.1)], [boundary(-1, HALF_WIDTH_M + 0.8)]
    found = []
    for n, lanes in enumerate([near, near, near, near, far, near]):
        assert watch.update(lanes, n * 33_000_000, speed_mps, turn) is None
        found.append(watch.withheld and (watch.withheld.side, watch.withheld.cause))
    assert found == [None, None, ("left", cause), ("left", cause), None, None]


def test_the_indicator_of_the_other_side_withholds_nothing() -> None:
    assert next(Drive(drift(0.5), turn="right").changes(10))[1].side == "left"


def test_an_unknown_speed_withholds_nothing() -> None:
    assert list(Drive(drift(0.5), speed_mps=10.0, knows_speed=False).changes(10))


def test_the_indicator_ends_a_warning() -> None:
    watch = DepartureWatch()
    lanes = [boundary(-1, HALF_WIDTH_M - 0.1)]
    changes = [watch.update(lanes, n * 33_000_000, 25.0) for n in range(5)]
    assert [change for change in changes if change] == [watch.active]
    ended = watch.update(lanes, 200_000_000, 25.0, "left")
    assert ended is not None
    assert ended.cause == "indicator"
    assert watch.active is None


def test_a_lane_change_ends_a_warning() -> None:
    watch = DepartureWatch()
    for n in range(5):
        watch.update([boundary(-1, 0.5, id_=7)], n * 33_000_000, 25.0)
    assert watch.active is not None
    ended = watch.update([boundary(1, -0.5, id_=7), boundary(-1, 3.1, id_=8)], 200_000_000, 25.0)
    assert ended is not None
    assert ended.cause == "lane_changed"


def test_a_boundary_that_is_not_seen_any_more_ends_a_warning_after_a_second() -> None:
    watch = DepartureWatch()
    for n in range(5):
        watch.update([boundary(-1, 0.5)], n * 33_000_000, 25.0)
    ends = [watch.update([], 132_000_000 + n * 100_000_000, 25.0) for n in range(1, 15)]
    assert [change.cause for change in ends if change] == ["not_seen"]
    assert ends.index(next(change for change in ends if change)) == 10


def test_a_warning_needs_consecutive_frames() -> None:
    watch = DepartureWatch(DepartureRule(frames=3))
    near, far = [boundary(-1, HALF_WIDTH_M - 0.1)], [boundary(-1, HALF_WIDTH_M + 0.8)]
    seen = [near, near, far, near, near, near]
    warned = [watch.update(lanes, n * 33_000_000, 25.0) is not None for n, lanes in enumerate(seen)]
    assert warned == [False] * 5 + [True]


def approach(distances_m: list[float], ids: list[int], frame_s: float) -> list[float]:
    """The times to the left line that a vehicle of unknown speed has, frame by frame."""
    watch = DepartureWatch(DepartureRule(frames=1, time_to_line_s=1e9))
    found = []
    for n, (distance_m, id_) in enumerate(zip(distances_m, ids, strict=True)):
        lanes = [boundary(-1, HALF_WIDTH_M + distance_m, id_=id_)]
        # Every warning ends at once, so that the next frame's time is seen as well.
        change = watch.update(lanes, round(n * frame_s * 1e9), None)
        found.append(math.inf if change is None else change.time_to_line_s)
        watch.active = None
    return found


def test_without_a_speed_the_approach_is_measured_over_a_third_of_a_second() -> None:
    # 1 m/s for half a second, then at rest: after 0.3 s at rest nothing comes nearer.
    distances = [1.0 - min(0.1 * n, 0.5) for n in range(12)]
    times = approach(distances, [7] * 12, 0.1)
    assert times[:2] == [math.inf, math.inf], "over 0.15 s and less the slope is noise"
    np.testing.assert_allclose(times[2:6], [0.8, 0.7, 0.6, 0.5], rtol=1e-6)
    assert times[8:] == [math.inf] * 4


def test_the_distance_to_another_boundary_is_no_approach() -> None:
    assert approach([1.5] * 5 + [0.5] * 3, [7] * 5 + [8] * 3, 0.06)[5:] == [math.inf] * 3


@pytest.mark.parametrize("warns", [True, False])
@pytest.mark.parametrize("speed_mps", [25.0, None])
def test_every_frame_has_the_distance_and_the_time_to_each_boundary(
    speed_mps: float | None, warns: bool
) -> None:
    """Also where nothing is warned of; 0.2 m/s to the left, seen for half a second."""
    watch = DepartureWatch(DepartureRule(warns=warns))
    for n in range(16):
        offset_m = 0.2 * n * FRAME_S
        lanes = [boundary(index, -index * 1.8 - offset_m, -0.2 / 25) for index in (-1, 1)]
        assert watch.update(lanes, int(n * FRAME_S * 1e9), speed_mps) is None
    left, right = watch.lines["left"], watch.lines["right"]
    assert left.distance_m == pytest.approx(1.8 - offset_m - HALF_WIDTH_M)
    assert right.distance_m == pytest.approx(1.8 + offset_m - HALF_WIDTH_M)
    assert left.std_m == pytest.approx(0.03)
    assert left.time_s == pytest.approx(left.distance_m / 0.2, rel=1e-3)
    assert right.time_s is None, "the vehicle does not come nearer"
    predicted = replace(lanes[0], predicted=True)
    watch.update([predicted, boundary(1, 0.9)], 10**9)
    assert watch.lines.keys() == {"right"}
    assert watch.lines["right"].time_s == 0.0, "it is beyond"
