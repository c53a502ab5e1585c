"""Lanes: one frozen value from decode to MQTT, gRPC and the web page, made of a network's rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.errors import Reason

# Older lanes are of no use: neither made nor published. Whole seconds, as MQTT's expiry has them.
LONGEST_AGE_S: Final = 1

ABSENT_X = -2.0  # TuSimple's mark for "no lane on this row"


MarkingType = Literal["unknown", "solid", "dashed"]
MarkingColor = Literal["unknown", "white", "yellow"]
Side = Literal["none", "left", "right"]
Indicator = Literal["unknown", "off", "left", "right", "hazard"]


def _no_angles() -> NDArray[np.float64]:
    return np.zeros((4, 3))


@dataclass(frozen=True, eq=False)
class Polynomial:
    """y(x) = c0 + c1 x + c2 x^2 + c3 x^3, x and y in metres on the ground.

    Attributes:
        coefficients: (4,) float64, c0 first.
        covariance: (4, 4) float64, of the coefficients.
        x_min_m, x_max_m: the range in which it holds.
        by_angles: (4, A) float64, what one standard deviation of the camera's pitch, one of its
            yaw, one of the road's vertical curvature, and, for tracked lines, one of the vehicle's
            slip and four of its motion change in the coefficients. The lines of one frame have this
            part of their errors in common.
    """

    coefficients: NDArray[np.float64]
    covariance: NDArray[np.float64]
    x_min_m: float
    x_max_m: float
    by_angles: NDArray[np.float64] = field(default_factory=_no_angles)


@dataclass(frozen=True, eq=False)
class GroundLane:
    """A lane boundary on the road, which is taken to be flat.

    Axes as in ISO 8855: x forward, y to the left; the origin is on the ground below the middle of
    the front axle.

    Attributes:
        points: (N, 2) float32, x and y in m, the nearest first.
    """

    points: NDArray[np.float32]
    polynomial: Polynomial


@dataclass(frozen=True, eq=False)
class Lane:
    """One lane boundary.

    Attributes:
        points: (N, 2) float32, N >= 2, x and y in px of the original frame, origin top left,
            ordered from the bottom of the image upwards.
        score: confidence, 0..1.
        id: of the track; 0 where lanes are not tracked.
        index: -1 is the ego lane's left boundary, 1 its right one, -2 and 2 the next ones outwards;
            0 where it is not known. Without `ground` it is a guess by the picture.
        type: what is painted, where the image shows it.
        color: likewise.
        ground: the boundary on the road; None where the camera has no calibration.
        solid_evidence, yellow_evidence: log odds for solid against dashed and yellow against white,
            of this frame alone; 0 says nothing. Those of several frames add up, see `marking`.
    """

    points: NDArray[np.float32]
    score: float
    id: int = 0
    index: int = 0
    type: MarkingType = "unknown"
    color: MarkingColor = "unknown"
    ground: GroundLane | None = None
    predicted: bool = False
    solid_evidence: float = 0.0
    yellow_evidence: float = 0.0


class PictureMark(NamedTuple):
    """What is drawn in a picture for something that a network has found.

    Attributes:
        points: (N, 2) float, px of the picture; a line through them, and the text beside the first.
        rgb: colour of the class, 0..255.
        filled: the area within the points is tinted.
    """

    points: NDArray[np.floating[Any]]
    text: str
    rgb: tuple[int, int, int]
    filled: bool = False


@dataclass(frozen=True)
class VehicleState:
    """What the vehicle measured at one moment; axes as in ISO 8855, None where it is not known.

    Attributes:
        mono_ns: CLOCK_MONOTONIC of the measurement.
        speed_mps: m/s, positive forward.
        yaw_rate_radps: rad/s, positive turns to the left.
    """

    mono_ns: int
    speed_mps: float | None = None
    yaw_rate_radps: float | None = None
    indicator: Indicator = "unknown"


@dataclass(frozen=True)
class LineDistance:
    """How far the vehicle is from one boundary of its lane.

    Attributes:
        distance_m: from the outer edge of the front wheels to the boundary, negative beyond it.
        std_m: its standard deviation.
        time_s: until a wheel is on the boundary; 0 beyond it, None where the vehicle does not come
            nearer.
    """

    distance_m: float
    std_m: float
    time_s: float | None


@dataclass(frozen=True)
class Departure:
    """Whether the vehicle leaves its lane, and whether that is warned of.

    Attributes:
        side: of the boundary; `none` where `state` is.
        withheld_by: why there is no warning though the vehicle leaves its lane, `indicator` or
            `slow`; empty in the other states.
    """

    state: Literal["none", "warning", "withheld"] = "none"
    side: Side = "none"
    withheld_by: Literal["", "indicator", "slow"] = ""


@dataclass(frozen=True)
class Ego:
    """The vehicle in its lane; None where a value cannot be measured.

    Attributes:
        lateral_offset_m: of the vehicle's reference point from the middle of the lane; positive to
            the left.
        heading_error_rad: of the vehicle relative to the lane; positive where it points to the left
            of the lane's direction.
        curvature_1pm: of the lane at the vehicle, 1/m; positive bends to the left.
        lane_width_m: between the boundaries, perpendicular to the lane.
        lateral_offset_std_m, heading_error_std_rad, curvature_std_1pm, lane_width_std_m: standard
            deviations, each known where its value is.
        lane_change: the side to which the vehicle is changing its lane.
        departure: None where departures are not warned of.
        left, right: the distance to that boundary; None where it is not detected in this frame.
    """

    lateral_offset_m: float | None = None
    lateral_offset_std_m: float | None = None
    heading_error_rad: float | None = None
    curvature_1pm: float | None = None
    lane_width_m: float | None = None
    lane_change: Side = "none"
    departure: Departure | None = None
    heading_error_std_rad: float | None = None
    curvature_std_1pm: float | None = None
    lane_width_std_m: float | None = None
    left: LineDistance | None = None
    right: LineDistance | None = None


@dataclass(frozen=True)
class StageLatency:
    """The latency of each stage of one frame, in microseconds; `queue` is the wait for the loop."""

    queue: int = 0
    preprocess: int = 0
    infer: int = 0
    postprocess: int = 0


class StageTrace(Protocol):
    """Records where the time of one frame goes; only traced frames have one.

    Every method returns at once and never raises.
    """

    def begin(self, stage: str) -> object:
        """Begin a stage, which ends the one before it."""
        ...

    def end(self, error: str = "", **attributes: str | int) -> None:
        """The lanes are known, or `error` says why there are none."""
        ...

    def published(self) -> None:
        """The lanes have just been written to the broker's connection; on any thread."""
        ...


@dataclass(frozen=True, eq=False)
class LaneFrame:
    """The lanes of one camera frame, with the metadata to judge their validity.

    Attributes:
        camera: name of the camera as configured.
        frame_id: counts every captured frame of this camera, dropped ones included.
        dropped: frames captured since start that a newer one replaced, or that were too old.
        capture_mono_ns: CLOCK_MONOTONIC at capture.
        capture_epoch_ns: Unix time at capture; Unix time may jump, so join on the monotonic time
            within a host.
        width: of the original frame, px.
        model_name: the model (usually an ensemble) that responded.
        latency_us: per stage.
        lanes: highest score first.
        failure: why there are no lanes; empty where the model responded and `lanes` is its result.
        failure_reason: the same in a word: `model_failed`, `too_old`, or the reason of the camera's
            state.
        degraded: what is wrong though lanes are detected: with the camera, its calibration, or the
            device.
        clock: how the capture time is known; see `Frame`.
        wall_clock: how far `capture_epoch_ns` can be believed; see `ClockState`.
        uncertainty_ns: of the capture time; 0 where it is not known.
        calibration_id: of the camera; empty where it has none.
        ego: the vehicle in its lane; None without a calibration.
        vehicle: what tracking and warnings used of the vehicle's state; None where nothing was
            known, or without a calibration.
        max_age_ms: the lanes are stale where they are published at a greater age.
        trace: None where the frame is not traced.
    """

    camera: str
    frame_id: int
    dropped: int
    capture_mono_ns: int
    capture_epoch_ns: int
    width: int
    height: int
    model_name: str
    model_version: str = ""
    latency_us: StageLatency = StageLatency()
    lanes: tuple[Lane, ...] = ()
    failure: str = ""
    failure_reason: str = "model_failed"
    degraded: tuple[Reason, ...] = ()
    wall_clock: Literal["synchronized", "unsynchronized", "wrong", "unknown"] = "unknown"
    clock: Literal["arrival", "sensor", "rtp", "ntp", "recording"] = "arrival"
    uncertainty_ns: int = 0
    calibration_id: str = ""
    ego: Ego | None = None
    vehicle: VehicleState | None = None
    max_age_ms: int = 200
    trace: StageTrace | None = None

    def age_ns(self, now_mono_ns: int) -> int:
        """Return the time since capture, in ns; `now_mono_ns` is `time.monotonic_ns()` of this
        host. 0 on a recording's own clock."""
        return 0 if self.clock == "recording" else now_mono_ns - self.capture_mono_ns


def lanes_from_rows(
    points: NDArray[np.float32],
    scores: NDArray[np.float32],
    size: tuple[int, int] | None = None,
) -> tuple[Lane, ...]:
    """Return lanes as polylines, without the rows on which the lane has no point.

    Args:
        points: (K, 72, 2) float32, (x, y) in px, bottom row first, x < 0 where absent.
        scores: (K,) float32, 0..1.
        size: width and height of the picture, px; lanes have an index by `indices_by_picture`
            where it is given.
    """
    # A NaN coordinate stays: the payload reports such a lane and leaves it out.
    present = ~(points[..., 0] < 0)
    counts = present.sum(axis=1).tolist()
    of_lanes = zip(points, present, scores.tolist(), counts, strict=True)
    kept = [(rows[mask], score) for rows, mask, score, count in of_lanes if count > 1]
    indices = [0] * len(kept)
    if size is not None:
        indices = indices_by_picture([rows for rows, _ in kept], *size)
    numbered = zip(kept, indices, strict=True)
    return tuple([Lane(rows, score, index=index) for (rows, score), index in numbered])


def indices_by_picture(lines: Sequence[NDArray[np.float32]], width: int, height: int) -> list[int]:
    """Return the index of each line, (N, 2) px, by where it meets the bottom of the picture, left
    or right of its middle. That is a guess: the camera may look aside, or be mounted there.

    The nearer half of a line is extended straight to the bottom. A line that begins more than twice
    its height above it has index 0.

    Args:
        width, height: of the frame, px.
    """
    lefts: list[float | None] = []
    for points in lines:
        (x0, y0), (x1, y1) = points[0].tolist(), points[len(points) // 2].tolist()
        below = height - y0
        reaches = y0 > y1 and below <= 2 * (y0 - float(points[-1, 1]))
        lefts.append(width / 2 - x0 - (x0 - x1) * below / (y0 - y1) if reaches else None)
    return ranked(lefts, math.inf)


def ranked(lefts: Sequence[float | None], farthest_ego: float) -> list[int]:
    """Return the index of each line by how far to the left of the vehicle it is; 0 for None."""
    indices = [0] * len(lefts)
    known = [(left, place) for place, left in enumerate(lefts) if left is not None]
    for side in (-1, 1):
        lines = sorted([(abs(left), place) for left, place in known if (left > 0) == (side < 0)])
        # The ego lane's boundary is not seen where the nearest one is a lane away.
        first = 1 if lines and lines[0][0] <= farthest_ego else 2
        for rank, (_, place) in enumerate(lines, first):
            indices[place] = side * rank
    return indices
