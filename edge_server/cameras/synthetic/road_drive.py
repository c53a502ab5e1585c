"""A drive along a rendered road with departures, lane changes and braking; its truth is known."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from edge_server.cameras.synthetic.road_view import Pose

if TYPE_CHECKING:
    from edge_server.cameras.synthetic.road_scene import RoadScene

SPEED_MPS = 25.0
HALF_WIDTH_M = 0.95  # of the vehicle

# Every cycle has the same manoeuvres.
_CYCLE_S = 60.0
_FIRST_DEPARTURE_S, _SECOND_DEPARTURE_S = 8.0, 20.0
_CHANGE_S, _CHANGE_BACK_S = 32.0, 44.0
_CHANGE_TAKES_S = 4.5
_DEPARTURE_TAKES_S = 7.0
_BEYOND_M = 0.25  # a departure takes the wheels so far over the boundary
_BRAKING_S, _BRAKING_TAKES_S = 54.0, 2.5
_BRAKING_PITCH_RAD = math.radians(1.2)


@dataclass(frozen=True)
class Truth:
    """Where the vehicle is in its lane; axes as in ISO 8855, see `lanes.types.Ego`.

    Attributes:
        offset_m: from the middle of the lane in which the vehicle's middle is, positive to the
            left.
        heading_rad: positive where the vehicle points to the left of the lane's direction.
        curvature_1pm: positive bends to the left.
        width_m: of that lane.
        departing: the side on which a wheel is beyond the boundary without a lane change.
        changing: the side to which the vehicle changes its lane.
    """

    offset_m: float
    heading_rad: float
    curvature_1pm: float
    width_m: float
    departing: Literal["none", "left", "right"]
    changing: Literal["none", "left", "right"]


class Drive:
    """A vehicle on a scene's road: where it stands at each time.

    Args:
        scene: with at least two lanes.
        manoeuvres: in every minute two departures, a lane change and the change back, and braking;
            without them the vehicle keeps its lane.
    """

    def __init__(self, scene: RoadScene, *, manoeuvres: bool) -> None:
        self._scene = scene
        self._manoeuvres = manoeuvres
        offsets = [-line.offset_m for line in scene.lines]  # left first, positive to the left
        self._lines_m = offsets
        right_of = next(place for place, left_m in enumerate(offsets) if left_m < 0)
        self._lane_m = offsets[right_of - 1] - offsets[right_of]
        # A lane beside the vehicle's, on the left if there is one.
        self._to = 1.0 if right_of > 1 else -1.0

    @staticmethod
    def distance_m(time_s: float) -> float:
        """Return how far the vehicle has gone."""
        return SPEED_MPS * time_s

    def pose(self, time_s: float) -> Pose:
        """Return how the vehicle stands on the road."""
        if not self._manoeuvres:
            return Pose()
        left_m, after_m = self._left_m(time_s), self._left_m(time_s + 0.01)
        heading_rad = math.atan((after_m - left_m) / (SPEED_MPS * 0.01))
        braking = _bump(time_s % _CYCLE_S - _BRAKING_S, _BRAKING_TAKES_S)
        return Pose(left_m, heading_rad, _BRAKING_PITCH_RAD * braking)

    def truth(self, time_s: float) -> Truth:
        """Return where the vehicle is in its lane."""
        course, pose = self._scene.course, self.pose(time_s)
        distance_m = self.distance_m(time_s)
        sway_m = course.sway_m * math.sin(2 * math.pi * distance_m / course.sway_wavelength_m)
        # The renderer's middle of the lane is to the right by the pose and to the left by the sway.
        left_m = pose.left_m - sway_m
        place = int(np.searchsorted([-line_m for line_m in self._lines_m], -left_m))
        upper_m, lower_m = self._lines_m[place - 1], self._lines_m[place]
        wave = 2 * math.pi * distance_m / course.curvature_wavelength_m + course.curvature_phase
        phase_s = time_s % _CYCLE_S
        changes = self._manoeuvres and any(
            begin <= phase_s <= begin + _CHANGE_TAKES_S for begin in (_CHANGE_S, _CHANGE_BACK_S)
        )
        side: Literal["none", "left", "right"] = "none"
        if upper_m - left_m < HALF_WIDTH_M:
            side = "left"
        elif left_m - lower_m < HALF_WIDTH_M:
            side = "right"
        back = phase_s >= _CHANGE_BACK_S
        to_left = (self._to > 0) != back
        return Truth(
            offset_m=left_m - (upper_m + lower_m) / 2,
            heading_rad=pose.heading_rad + course.heading_rad,
            curvature_1pm=-course.curvature_per_m * math.sin(wave),
            width_m=upper_m - lower_m,
            departing="none" if changes else side,
            changing=("left" if to_left else "right") if changes else "none",
        )

    def _left_m(self, time_s: float) -> float:
        """Return how far left of its first lane's middle the vehicle is."""
        phase_s = time_s % _CYCLE_S
        change = _ramp(phase_s - _CHANGE_S, _CHANGE_TAKES_S)
        change -= _ramp(phase_s - _CHANGE_BACK_S, _CHANGE_TAKES_S)
        swerve = _bump(phase_s - _FIRST_DEPARTURE_S, _DEPARTURE_TAKES_S)
        swerve -= _bump(phase_s - _SECOND_DEPARTURE_S, _DEPARTURE_TAKES_S)
        reach_m = self._lane_m / 2 - HALF_WIDTH_M + _BEYOND_M
        return self._to * (self._lane_m * change + reach_m * swerve)


def _ramp(passed_s: float, takes_s: float) -> float:
    """Return 0 before, 1 after, and smoothly between."""
    share = min(max(passed_s / takes_s, 0.0), 1.0)
    return share**3 * (10 - 15 * share + 6 * share**2)


def _bump(passed_s: float, takes_s: float) -> float:
    """Return 1 in the middle of `takes_s`, 0 outside."""
    third_s = takes_s / 3
    return _ramp(passed_s, third_s) - _ramp(passed_s - 2 * third_s, third_s)
