"""A camera with a calibration: its lanes are on the road, and a wrong calibration is named."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from unit.lanes.roads import FlatRoad, lanes_of

from edge_server.board.board import Identity
from edge_server.cameras.calibration import Calibration
from edge_server.errors import Reason
from edge_server.lanes.camera_model import CameraModel, Lens, Mounting
from edge_server.lanes.road_geometry import ego_of
from edge_server.lanes.types import LaneFrame
from edge_server.pipeline import messages
from edge_server.pipeline.road_follower import LaneLocator
from edge_server.pixels import Image, PixelFormat

MODEL = CameraModel(
    Lens("pinhole", 1280, 720, 1150.0, 1150.0, 640.0, 360.0, (0.0,) * 5),
    Mounting(1.4, np.radians(2.0)),
)
CALIBRATION = Calibration("abc", MODEL)
GREY = Image.grey(PixelFormat.NV12, 1280, 720)


def lane_frame(
    number: int = 0, road: FlatRoad | None = None, camera: CameraModel = MODEL, fps: float = 10.0
) -> LaneFrame:
    lanes = tuple(lanes_of(road or FlatRoad(), camera))
    mono_ns = round(number / fps * 1e9)
    width, height = camera.lens.width, camera.lens.height
    return LaneFrame("front", number, 0, mono_ns, 0, width, height, "m", lanes=lanes)


def test_lanes_get_ground_index_and_ego() -> None:
    located = LaneLocator(CALIBRATION).locate(lane_frame(road=FlatRoad(0.4)), GREY)
    assert {lane.index for lane in located.lanes} == {-2, -1, 1, 2}
    assert ego_of(located.lanes).lateral_offset_m == pytest.approx(0.4, abs=0.02)
    assert not located.degraded


def test_a_frame_of_another_size_is_scaled_and_one_of_another_shape_says_so() -> None:
    small = MODEL.scaled_to(640, 360)
    locator = LaneLocator(CALIBRATION)
    half = locator.locate(lane_frame(camera=small), Image.grey(PixelFormat.NV12, 640, 360))
    assert ego_of(half.lanes).lane_width_m == pytest.approx(3.6, abs=0.05)
    squashed = LaneFrame(
        "front", 0, 0, 0, 0, 640, 480, "m", lanes=half.lanes, degraded=(Reason("dark", "so"),)
    )
    located = locator.locate(squashed, Image.grey(PixelFormat.NV12, 640, 480))
    assert located.ego is None
    camera, size = located.degraded
    assert camera == Reason("dark", "so")
    assert str(size).startswith("calibration_size: the frames have 640 x 480 px")
    message = json.loads(messages.frame_payload(located, Identity("d", "0", "b", "c"), 0, 0))
    assert message["status"] == "FRAME_STATUS_DEGRADED"
    assert [reason.partition(":")[0] for reason in message["reasons"]] == [
        "dark",
        "calibration_size",
    ]
    # The right size is right again.
    assert locator.locate(lane_frame(), GREY).ego is not None


def test_a_frame_that_failed_stays_as_it_is() -> None:
    failed = LaneFrame("front", 0, 0, 0, 0, 640, 480, "m", failure="broken")
    assert LaneLocator(CALIBRATION).locate(failed, GREY) is failed


def test_braking_does_not_bend_the_road() -> None:
    """The pitch of the springs is taken out within a second; left in, it bends a road by 30 %."""
    locator = LaneLocator(CALIBRATION)
    road = FlatRoad(curvature=1 / 400)
    diving = MODEL.pitched(np.radians(1.2))
    for number in range(10):
        located = locator.locate(lane_frame(number, road, diving), GREY)
    ego = ego_of(located.lanes)
    assert ego.curvature_1pm == pytest.approx(1 / 400, rel=0.1)
    assert ego.lateral_offset_m == pytest.approx(0.0, abs=0.05)
    assert not located.degraded


def test_a_camera_that_was_moved_is_named_after_a_minute() -> None:
    locator = LaneLocator(CALIBRATION)
    moved = MODEL.pitched(np.radians(-0.9))
    degraded = [
        locator.locate(lane_frame(number, camera=moved, fps=2.0), GREY).degraded
        for number in range(130)
    ]
    assert not any(degraded[:110])
    (reason,) = degraded[-1]
    assert reason.code == "calibration_drift"
    found = re.search(r"looked (\d\.\d\d) \+- (\d\.\d\d) degrees up", reason.text)
    assert found is not None
    assert abs(float(found[1]) - 0.9) <= 2 * float(found[2]) + 0.01


def test_ground_goes_back_to_the_pixels_that_it_came_from() -> None:
    """One pitch in both directions, also in the frame that shows a new one."""
    locator = LaneLocator(CALIBRATION)
    for number, degrees in enumerate((0.0, 0.15, -0.05, 0.2)):
        frame = lane_frame(number, camera=MODEL.pitched(np.radians(degrees)))
        located = locator.locate(frame, GREY)
        for lane in located.lanes:
            assert lane.ground is not None
            ground = lane.ground.points.astype(np.float64)
            near = ground[:, 0] < 25.0
            back = locator.to_image(ground)[near]
            x = np.interp(back[:, 1], lane.points[::-1, 1], lane.points[::-1, 0])
            np.testing.assert_allclose(back[:, 0], x, atol=1.0)
