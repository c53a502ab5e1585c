"""RoadFollower: the lanes of one calibrated camera: on the road, tracked, with their events."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from edge_server.errors import Reason
from edge_server.lanes.departure import DepartureWatch
from edge_server.lanes.paint import on_paint
from edge_server.lanes.road_geometry import (
    PitchDrift,
    PitchFilter,
    ego_of,
    road_of,
)
from edge_server.lanes.tracking import LaneTracker
from edge_server.lanes.types import Departure, Ego, VehicleState
from edge_server.pipeline.event_log import Event, LastingEvents

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from edge_server.cameras.calibration import Calibration
    from edge_server.lanes.camera_model import CameraModel
    from edge_server.lanes.departure import DepartureChange, DepartureRule, DepartureSide
    from edge_server.lanes.types import LaneFrame, LineDistance
    from edge_server.pipeline.event_log import EventLog
    from edge_server.pipeline.vehicle import VehicleInputs
    from edge_server.pixels import Image
    from edge_server.settings.sections import EventKind

# As `LaneLocator` begins its reasons.
_CALIBRATION = "calibration_"
_KINDS: tuple[EventKind, ...] = ("lane_departure", "lane_change", "degraded")
_ENDINGS = {
    "returned": "the vehicle is back in its lane",
    "lane_changed": "the vehicle has changed its lane",
    "not_seen": "the boundary is not seen any more",
    "indicator": "the driver indicates",
    "slow": "the vehicle is too slow for warnings",
}


class RoadEvents:
    """Puts the events of a camera's tracked lanes into the log, once when each begins and once when
    it ends. For one thread; `update` returns at once."""

    def __init__(self, log: EventLog, rule: DepartureRule) -> None:
        self._lasting = LastingEvents(log)
        self._watch = DepartureWatch(rule)

    def update(self, frame: LaneFrame, vehicle: VehicleState) -> None:
        """Put what begins or ends with `frame`.

        Args:
            frame: tracked; one with a `failure` ends nothing but what its lanes cannot carry on.
        """
        change = self._watch.update(
            frame.lanes, frame.capture_mono_ns, vehicle.speed_mps, vehicle.indicator
        )
        if change is not None:
            self._put_departure(frame, change)
        if not frame.failure:
            side = "none" if frame.ego is None else frame.ego.lane_change
            text = f"the vehicle crosses the {side} boundary of its lane"
            cause = "" if side == "none" else side
            self._follow(frame, "lane_change", cause, text, "the lane change has ended")
            # Faults of the camera and of the device are events of their own.
            of_road = (each for each in frame.degraded if each.code.startswith(_CALIBRATION))
            fault, text = next(of_road, Reason(""))
            self._follow(frame, "degraded", fault, text, "lanes are as they should be")

    def end(self, frame: LaneFrame) -> None:
        """End what holds, as nobody follows the camera any more."""
        text = "the camera is not followed any more"
        for kind in _KINDS:
            for name, cause in self._lasting.names(kind).items():
                why = "not_seen" if kind == "lane_departure" else cause
                self._lasting.end(name, self._event(frame, kind, why, text))

    @property
    def lines(self) -> Mapping[DepartureSide, LineDistance]:
        """The distances to the boundaries of the lane, as of the last `update`."""
        return self._watch.lines

    @property
    def departure(self) -> Departure | None:
        """Whether the vehicle leaves its lane, as of the last `update`; None where that is not
        warned of."""
        if not self._watch.rule.warns:
            return None
        if (warning := self._watch.active) is not None:
            return Departure("warning", warning.side)
        if (withheld := self._watch.withheld) is not None:
            return Departure(
                "withheld", withheld.side, "indicator" if withheld.cause == "indicator" else "slow"
            )
        return Departure()

    def _put_departure(self, frame: LaneFrame, change: DepartureChange) -> None:
        near = f"{abs(change.distance_m):.2f} m"
        where = f"{near} beyond" if change.distance_m < 0 else f"{near} from"
        text = f"the vehicle leaves its lane: its wheels are {where} the {change.side} boundary"
        event = replace(
            self._event(
                frame,
                "lane_departure",
                change.cause or change.side,
                text if change.cause is None else _ENDINGS[change.cause],
            ),
            distance_to_line_m=change.distance_m,
            time_to_line_s=change.time_to_line_s if math.isfinite(change.time_to_line_s) else None,
        )
        if change.cause is None:
            self._lasting.begin("", event)
        else:
            self._lasting.end("", event)

    def _follow(self, frame: LaneFrame, kind: EventKind, cause: str, text: str, over: str) -> None:
        """Put that the cause of before ends, and that `cause` begins; "" is none."""
        before = self._lasting.names(kind).get("", "")
        if cause != before:
            self._lasting.end("", self._event(frame, kind, before, over))
            if cause:
                self._lasting.begin("", self._event(frame, kind, cause, text))

    @staticmethod
    def _event(frame: LaneFrame, kind: EventKind, cause: str, text: str) -> Event:
        return Event(
            kind,
            "instant",
            cause,
            text,
            frame.capture_mono_ns,
            frame.capture_epoch_ns,
            camera=frame.camera,
            frame_id=frame.frame_id,
            model=frame.model_name,
            model_version=frame.model_version,
        )


class LaneLocator:
    """Adds to each LaneFrame of a camera what its calibration tells: ground and index. `ego` is
    empty until the lanes are tracked.

    The vehicle's pitch on its springs is estimated from frame to frame and taken into account.
    Frames of another shape than the calibration's get nothing, and say so. Not thread-safe; frames
    come in their order.

    Args:
        calibration: of the camera.
    """

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self._model: CameraModel | None = None
        self._size = (0, 0)
        self._pitch = PitchFilter(calibration.model.mounting.pitch_std_rad)
        self._drift = PitchDrift()

    def locate(self, lane_frame: LaneFrame, image: Image) -> LaneFrame:
        """Return `lane_frame` with its lanes on the road, and what is painted there."""
        if lane_frame.failure:
            return lane_frame
        model = self._model_for(lane_frame.width, lane_frame.height)
        if model is None:
            lens = self.calibration.model.lens
            width, height = lane_frame.width, lane_frame.height
            return _degraded(
                lane_frame,
                "calibration_size",
                f"the frames have {width} x {height} px, another shape than the {lens.width} x "
                f"{lens.height} px of the calibration; the lanes are not on the road",
            )
        mono_ns = lane_frame.capture_mono_ns
        pitch = self._pitch
        pitch.predict(mono_ns)
        before_rad = pitch.rad
        pitched = model.pitched(before_rad)
        lines, lanes = on_paint(lane_frame.lanes, image, pitched)
        road = road_of(lanes, pitched, lines=lines, pitch=pitch)
        if road.pitch is not None and self._drift.is_due(mono_ns):
            self._drift.add(before_rad + road.pitch.rad, road.ego.curvature_1pm, mono_ns)
        lane_frame = replace(lane_frame, lanes=road.lanes, ego=Ego())
        if (drift := self._drift.pitch) is not None:
            lane_frame = _degraded(
                lane_frame,
                "calibration_drift",
                "on a minute of straight road the camera looked "
                f"{math.degrees(abs(drift.median)):.2f} +- {math.degrees(drift.std):.2f} degrees "
                f"{'down' if drift.median > 0 else 'up'} from its calibration; calibrate it again",
            )
        return lane_frame

    def to_image(self, ground: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the image points (N, 2), px, of ground points (N, 2), m, in the frame located
        last; NaN behind the camera."""
        if self._model is None:
            return np.full_like(ground, np.nan)
        return self._model.pitched(self._pitch.rad).image_of(ground)

    def _model_for(self, width: int, height: int) -> CameraModel | None:
        if self._size != (width, height):
            self._size = (width, height)
            calibrated = self.calibration.model
            fits = calibrated.lens.fits(width, height)
            self._model = calibrated.scaled_to(width, height) if fits else None
        return self._model


def _degraded(lane_frame: LaneFrame, code: str, text: str) -> LaneFrame:
    return replace(lane_frame, degraded=(*lane_frame.degraded, Reason(code, text)))


class RoadFollower:
    """Follows the road through the frames of one camera, in their order, on one thread."""

    def __init__(
        self,
        locator: LaneLocator,
        vehicle: VehicleInputs,
        events: RoadEvents,
        half_width_m: float,
    ) -> None:
        self.calibration = locator.calibration
        self._locator = locator
        self._vehicle = vehicle
        self._events = events
        self._tracker = LaneTracker(half_width_m)

    def follow(self, lane_frame: LaneFrame, image: Image) -> LaneFrame:
        """Return `lane_frame` with its lanes on the road, tracked, and the vehicle among them.

        A frame without lanes for a reason of its own changes nothing but the warnings that its
        absence ends.
        """
        mono_ns, trace = lane_frame.capture_mono_ns, lane_frame.trace
        # What the vehicle does now is nothing to a recording on its own clock.
        known = None if lane_frame.clock == "recording" else self._vehicle.at(mono_ns)
        vehicle = VehicleState(mono_ns) if known is None else known
        if not lane_frame.failure:
            if trace is not None:
                trace.begin("locate")
            lane_frame = self._locator.locate(lane_frame, image)
            if trace is not None:
                trace.begin("track")
            lanes = self._tracker.update(lane_frame.lanes, mono_ns, vehicle, self._locator.to_image)
            ego = None
            if lane_frame.ego is not None:
                ego = replace(ego_of(lanes), lane_change=self._tracker.lane_change)
            lane_frame = replace(lane_frame, lanes=lanes, ego=ego, vehicle=known)
        self._events.update(lane_frame, vehicle)
        if lane_frame.ego is not None:
            lines = self._events.lines
            ego = replace(
                lane_frame.ego,
                departure=self._events.departure,
                left=lines.get("left"),
                right=lines.get("right"),
            )
            lane_frame = replace(lane_frame, ego=ego)
        return lane_frame

    def miss(self, lane_frame: LaneFrame) -> None:
        """Note that there are no lanes to follow at the capture of `lane_frame`, which ends the
        warnings that their absence ends."""
        mono_ns = lane_frame.capture_mono_ns
        self._events.update(lane_frame, self._vehicle.at(mono_ns) or VehicleState(mono_ns))

    def end(self, lane_frame: LaneFrame) -> None:
        """End every event of the road; see `RoadEvents.end`."""
        self._events.end(lane_frame)
