"""DepartureWatch: warns when the vehicle leaves its lane without meaning to, as ISO 17361 has it.

ISO 17361 wants a warning between two lines: at the earliest 0.75 m inside the boundary (1.5 s
before it, where the vehicle drifts faster than 0.5 m/s; 1.5 m above 1 m/s), at the latest 0.3 m
beyond it. A warning at one second before the boundary lies between them at every lateral speed.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from edge_server.lanes.types import LineDistance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.lanes.types import Indicator, Lane

DepartureSide = Literal["left", "right"]
# Why no warning begins, or why one ends.
DepartureCause = Literal["returned", "lane_changed", "not_seen", "indicator", "slow"]

_INDEX: dict[DepartureSide, int] = {"left": -1, "right": 1}
# The lateral speed is the slope of the distance over so long, where the vehicle's speed is not
# known.
_SLOPE_S = 0.3


@dataclass(frozen=True)
class DepartureRule:
    """The thresholds of the warning.

    Attributes:
        half_width_m: from the vehicle's middle to the outer edge of its front wheels.
        time_to_line_s: a warning begins so long before a wheel is on the boundary.
        frames: consecutive frames in which it has to hold.
        clear_m, clear_s: a warning ends when the wheel is so far inside for so long.
        slowest_mps: no warning below this speed; class II of ISO 17361 has 17 m/s.
        largest_std_m: no warning on a boundary that is known worse than this.
        longest_unseen_s: a warning ends when its boundary is not seen for so long.
        warns: False where distances alone are measured.
    """

    half_width_m: float = 0.95
    time_to_line_s: float = 1.0
    frames: int = 3
    clear_m: float = 0.3
    clear_s: float = 0.5
    slowest_mps: float = 16.7
    largest_std_m: float = 0.2
    longest_unseen_s: float = 1.0
    warns: bool = True


@dataclass(frozen=True)
class DepartureChange:
    """A warning that begins, ends or is withheld.

    Attributes:
        side: of the boundary.
        cause: why the warning ends, or does not begin; None where one begins.
        distance_m: from the outer edge of the wheels to the boundary, negative beyond it.
        time_to_line_s: until a wheel is on the boundary; 0 beyond it, infinite where the vehicle
            does not come nearer.
    """

    side: DepartureSide
    cause: DepartureCause | None
    distance_m: float
    time_to_line_s: float


@dataclass(frozen=True)
class _Boundary:
    id: int
    distance_m: float
    std_m: float
    heading_rad: float  # of the boundary; positive bends away to the left


class DepartureWatch:
    """Measures the distances to the boundaries of the lane, and decides when a warning begins and
    ends, on both sides; for one thread.

    Attributes:
        lines: the distance to each boundary that the last frame shows.
        active: the warning that holds now; None where there is none.
        withheld: the warning that would hold now, with the cause for which there is none; None
            where the vehicle keeps its lane, or another warning holds.
    """

    def __init__(self, rule: DepartureRule | None = None) -> None:
        self.rule = rule or DepartureRule()
        self.lines: dict[DepartureSide, LineDistance] = {}
        self.active: DepartureChange | None = None
        self.withheld: DepartureChange | None = None
        self._active_id = 0
        self._clear_since_ns: int | None = None
        self._seen_ns = 0
        # Consecutive frames in which the vehicle leaves its lane; and those in which nothing
        # withholds the warning.
        self._leaving: dict[DepartureSide, int] = {"left": 0, "right": 0}
        self._frames: dict[DepartureSide, int] = {"left": 0, "right": 0}
        self._distances: dict[DepartureSide, deque[tuple[int, int, float]]] = {
            "left": deque(),
            "right": deque(),
        }

    def update(
        self,
        lanes: Sequence[Lane],
        mono_ns: int,
        speed_mps: float | None = None,
        turn: Indicator = "unknown",
    ) -> DepartureChange | None:
        """Return the warning that begins or ends with this frame, or None.

        Args:
            lanes: tracked; those that are predicted or have no place on the ground do not count.
            mono_ns: CLOCK_MONOTONIC of the capture.
            speed_mps: of the vehicle; None where it is not known, and no warning is withheld then.
            turn: the side on which the vehicle indicates.
        """
        seen = {side: _boundary(lanes, side, self.rule.half_width_m) for side in _INDEX}
        times = {side: self._time_to_line_s(side, seen[side], mono_ns, speed_mps) for side in seen}
        self.lines = {
            side: LineDistance(
                at.distance_m, at.std_m, times[side] if times[side] < math.inf else None
            )
            for side, at in seen.items()
            if at is not None
        }
        if not self.rule.warns:
            return None
        self.withheld = None
        if self.active is not None:
            side = self.active.side
            withheld = self._withheld(side, speed_mps, turn)
            cause = self._end_cause(side, seen[side], lanes, mono_ns)
            cause = withheld or cause
            if cause is None:
                return None
            at = seen[side]
            distance_m = self.active.distance_m if at is None else at.distance_m
            self.active, self._clear_since_ns = None, None
            self._frames = dict.fromkeys(self._frames, 0)
            self._leaving = dict.fromkeys(self._leaving, 0)
            ended = DepartureChange(side, cause, distance_m, times[side])
            if withheld:
                self.withheld, self._leaving[side] = ended, self.rule.frames
            return ended
        for side, boundary in seen.items():
            if (
                boundary is None
                or boundary.std_m > self.rule.largest_std_m
                or times[side] >= self.rule.time_to_line_s
            ):
                self._leaving[side] = self._frames[side] = 0
                continue
            withheld = self._withheld(side, speed_mps, turn)
            self._leaving[side] += 1
            self._frames[side] = 0 if withheld else self._frames[side] + 1
            change = DepartureChange(side, withheld, boundary.distance_m, times[side])
            if self._frames[side] >= self.rule.frames:
                self.active, self.withheld = change, None
                self._active_id, self._seen_ns = boundary.id, mono_ns
                return change
            if withheld and self._leaving[side] >= self.rule.frames:
                self.withheld = self.withheld or change
        return None

    def _end_cause(
        self, side: DepartureSide, boundary: _Boundary | None, lanes: Sequence[Lane], mono_ns: int
    ) -> DepartureCause | None:
        """Return why the warning that holds ends now, or None."""
        if boundary is not None and boundary.id == self._active_id:
            self._seen_ns = mono_ns
            if boundary.distance_m < self.rule.clear_m:
                self._clear_since_ns = None
            elif self._clear_since_ns is None:
                self._clear_since_ns = mono_ns
            elif mono_ns - self._clear_since_ns >= self.rule.clear_s * 1e9:
                return "returned"
        elif any(lane.id == self._active_id and lane.index != _INDEX[side] for lane in lanes):
            return "lane_changed"
        elif mono_ns - self._seen_ns > self.rule.longest_unseen_s * 1e9:
            return "not_seen"
        return None

    def _withheld(
        self, side: DepartureSide, speed_mps: float | None, turn: Indicator
    ) -> DepartureCause | None:
        """Return why there is no warning on `side`, or None."""
        if turn in (side, "hazard"):
            return "indicator"
        return "slow" if speed_mps is not None and speed_mps < self.rule.slowest_mps else None

    def _time_to_line_s(
        self,
        side: DepartureSide,
        boundary: _Boundary | None,
        mono_ns: int,
        speed_mps: float | None,
    ) -> float:
        history = self._distances[side]
        if boundary is None:
            history.clear()
            return math.inf
        if history and history[-1][1] != boundary.id:
            history.clear()
        history.append((mono_ns, boundary.id, boundary.distance_m))
        while mono_ns - history[0][0] > _SLOPE_S * 1e9:
            history.popleft()
        if boundary.distance_m <= 0:
            return 0.0
        if speed_mps is not None:
            # A left boundary that bends away to the right comes nearer.
            towards = -boundary.heading_rad if side == "left" else boundary.heading_rad
            nearer_mps = speed_mps * math.sin(towards)
        else:
            first_ns, _, first_m = history[0]
            passed_s = (mono_ns - first_ns) / 1e9
            # Over a shorter time the slope is noise.
            known = passed_s > _SLOPE_S / 2
            nearer_mps = (first_m - boundary.distance_m) / passed_s if known else 0.0
        return boundary.distance_m / nearer_mps if nearer_mps > 0 else math.inf


def _boundary(lanes: Sequence[Lane], side: DepartureSide, half_width_m: float) -> _Boundary | None:
    for lane in lanes:
        if lane.index == _INDEX[side] and lane.ground is not None and not lane.predicted:
            polynomial = lane.ground.polynomial
            c0, c1 = polynomial.coefficients[:2].tolist()
            sideways_m = c0 if side == "left" else -c0
            std_m = math.sqrt(max(0.0, float(polynomial.covariance[0, 0])))
            return _Boundary(lane.id, sideways_m - half_width_m, std_m, math.atan(c1))
    return None
