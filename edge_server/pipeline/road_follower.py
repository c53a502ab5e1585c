"""RoadFollower: the lanes of one calibrated camera: on the road, tracked, with their events."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edge_server.lanes.lane_filter import Motion
from edge_server.lanes.road_geometry import ego_of
from edge_server.lanes.tracking import LaneTracker

if TYPE_CHECKING:
    from edge_server.cameras.calibration import Calibration
    from edge_server.lanes.types import LaneFrame
    from edge_server.pipeline.lane_locator import LaneLocator
    from edge_server.pipeline.road_events import RoadEvents
    from edge_server.pipeline.vehicle import VehicleInputs
    from edge_server.pixels import Image


class RoadFollower:
    """Follows the road through the frames of one camera, in their order, on one thread.

    Args:
        locator: puts lanes on the road.
        vehicle: what the vehicle measures of its motion.
        events: of this camera.
        half_width_m: of the vehicle.
    """

    def __init__(
        self,
        locator: LaneLocator,
        vehicle: VehicleInputs,
        events: RoadEvents,
        half_width_m: float,
    ) -> None:
        self._locator = locator
        self._vehicle = vehicle
        self._events = events
        self._tracker = LaneTracker(half_width_m)

    @property
    def calibration(self) -> Calibration:
        return self._locator.calibration

    def follow(self, lane_frame: LaneFrame, image: Image) -> LaneFrame:
        """Return `lane_frame` with its lanes on the road, tracked, and the vehicle among them.

        A frame without lanes for a reason of its own changes nothing but the warnings that its
        absence ends.

        Args:
            lane_frame: as the model detected them.
            image: the frame, in the camera's own format.
        """
        vehicle, trace = self._vehicle.at(lane_frame.capture_mono_ns), lane_frame.trace
        if not lane_frame.failure:
            if trace is not None:
                trace.begin("locate")
            lane_frame = self._locator.locate(lane_frame, image)
            if trace is not None:
                trace.begin("track")
            lanes = self._tracker.update(
                lane_frame.lanes,
                lane_frame.capture_mono_ns,
                Motion(vehicle.speed_mps, vehicle.yaw_rate_radps),
                self._locator.to_image,
            )
            ego = None
            if lane_frame.ego is not None:
                ego = replace(ego_of(lanes), lane_change=self._tracker.lane_change)
            lane_frame = replace(lane_frame, lanes=lanes, ego=ego)
        self._events.update(lane_frame, vehicle)
        if lane_frame.ego is not None:
            ego = replace(lane_frame.ego, departure=self._events.departure)
            lane_frame = replace(lane_frame, ego=ego)
        return lane_frame
