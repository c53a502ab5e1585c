"""A drive shows where the camera looks, whatever its lens, and how certain that is."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from unit.lanes.roads import CAMERA, FlatRoad, bent_lines, cameras, lanes_of, noisy

from edge_server.errors import SettingsError
from edge_server.lanes.road_geometry import Spread
from edge_server.pixels import Image
from edge_server.tools.calibrate import judged
from edge_server.tools.mounting_estimate import (
    FEWEST_FRAMES,
    MountingEstimate,
    MountingEstimator,
    mounting_of,
)
from edge_server.tools.road.scene import RoadScene

if TYPE_CHECKING:
    from edge_server.lanes.camera_model import CameraModel


def drive(
    camera: CameraModel, frames: int = 24, seed: int = 1, std_px: float = 1.0
) -> MountingEstimator:
    """Return the estimator after a drive that sways in its lane, through gentle bends."""
    rng = np.random.default_rng(seed)
    estimator = MountingEstimator(camera.lens, camera.mounting.roll_rad)
    for number in range(frames):
        phase = 2 * np.pi * number / frames
        road = FlatRoad(
            0.2 * np.sin(3 * phase) + camera.mounting.y_m,
            np.radians(0.4) * np.cos(2 * phase),
            np.sin(phase) / 2000,
        )
        estimator.add(noisy(lanes_of(road, camera, (0.5, -0.5)), rng, std_px))
    return estimator


@settings(max_examples=8)  # a drive each
@given(cameras(), st.integers(0, 1000))
def test_a_drive_shows_pitch_yaw_and_height(camera: CameraModel, seed: int) -> None:
    estimator = drive(camera, seed=seed)
    found = estimator.estimate()
    if camera.lens.width / camera.lens.height > 2 or camera.mounting.height_m > 2.0:
        # A flat picture, or a high camera, may not show both lines near the vehicle.
        assume(found is not None)
    assert found is not None
    assert found.pitch_rad.median == pytest.approx(
        camera.mounting.pitch_rad, abs=math.radians(0.25)
    )
    assert found.yaw_rad.median == pytest.approx(camera.mounting.yaw_rad, abs=math.radians(0.4))
    assert found.height_m(3.6) == pytest.approx(camera.mounting.height_m, rel=0.04)
    assert found.pitch_rad.low <= found.pitch_rad.median <= found.pitch_rad.high
    assert found.pitch_rad.std < math.radians(0.2)


def test_paint_shows_the_horizon_where_lines_are_bent_and_dashes_prove_it() -> None:
    pictures = [bent_lines(4, 7.0 * number) for number in range(FEWEST_FRAMES)]
    lens = pictures[0][1].lens
    painted, bent = MountingEstimator(lens), MountingEstimator(lens)
    for image, _, lanes, _ in pictures:
        painted.add(lanes, Image.of_bgr(image))
        bent.add(lanes)
    by_paint, by_lines = painted.estimate(), bent.estimate()
    assert by_paint is not None
    assert by_lines is not None
    assert by_paint.pitch_rad.median == pytest.approx(0.0, abs=math.radians(0.06))
    assert abs(by_lines.pitch_rad.median) > math.radians(0.2)
    assert abs(by_paint.pitch_rad.median) < 3 * by_paint.pitch_rad.std
    near, far = by_paint.near_dashes, by_paint.far_dashes
    assert near is not None
    assert far is not None
    assert near.median * RoadScene.for_camera(4).camera.height_m == pytest.approx(12.0, rel=0.03)
    assert far.median == pytest.approx(near.median, rel=0.03)


@pytest.mark.parametrize(
    ("far", "far_std", "said"),
    [
        (9.2, 0.1, r"dashes: every 13\.5 m near, 13\.8 m far \(\+2% \+- 1%\)"),
        (9.7, 0.1, r"doubtful: dashes of one line are 8% farther"),
        (8.3, 0.1, r"doubtful: dashes of one line are 8% nearer"),
        # Of a few unlike ones nothing follows.
        (10.5, 1.2, r"doubtful: dashes are too few, or too unlike"),
        (9.0, 1.2, r"doubtful: dashes are too few, or too unlike"),
        (None, 0.0, r"every 13\.5 m near, too few far"),
    ],
)
def test_dashes_are_doubted_by_how_certain_their_spacing_is(
    far: float | None, far_std: float, said: str
) -> None:
    found = with_dashes(9.0, far, far_std)
    lines = list(judged(found, 1.5, 3.0))
    assert re.search(said, lines[-1])
    assert len(lines) == (2 if said.startswith("doubtful") else 1)


def test_dashes_that_contradict_a_flat_road_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"17% farther .* bridges"):
        list(judged(with_dashes(9.0, 10.5, 0.1), 1.5, 3.0))


def with_dashes(near: float, far: float | None, far_std: float) -> MountingEstimate:
    """Return the estimate of a lane as wide as two heights of the camera."""
    angle, width = Spread(0.0, -0.01, 0.01, 0.001), Spread(2.0, 1.9, 2.1, 0.01)
    far_dashes = None if far is None else Spread(far, far - 1.0, far + 1.0, far_std)
    return MountingEstimate(
        angle, angle, width, 60, Spread(near, near - 1.0, near + 1.0, 0.05), far_dashes
    )


def test_frames_without_paint_do_not_count() -> None:
    image, camera, lanes, _ = bent_lines(4, bare=True)
    estimator = MountingEstimator(camera.lens)
    estimator.add(lanes, Image.of_bgr(image))
    assert (estimator.seen, estimator.straight) == (1, 0)


def test_a_few_frames_are_no_drive() -> None:
    estimator = drive(CAMERA, FEWEST_FRAMES - 1)
    assert estimator.seen == FEWEST_FRAMES - 1
    assert estimator.estimate() is None


def test_bends_and_single_lines_do_not_count() -> None:
    estimator = MountingEstimator(CAMERA.lens, CAMERA.mounting.roll_rad)
    for _ in range(30):
        estimator.add(lanes_of(FlatRoad(curvature=1 / 200), CAMERA))
        estimator.add(lanes_of(FlatRoad(), CAMERA, (0.5, 1.5)))
        estimator.add([])
    assert (estimator.seen, estimator.straight) == (90, 0)


def test_the_mounting_keeps_what_lanes_do_not_show() -> None:
    estimator = drive(CAMERA)
    found = estimator.estimate()
    assert found is not None
    given_mounting = replace(CAMERA.mounting, pitch_rad=0.3, yaw_rad=0.3)
    mounting = mounting_of(found, 1.4, given_mounting, least_std_rad=math.radians(0.1))
    assert (mounting.roll_rad, mounting.x_m) == (CAMERA.mounting.roll_rad, CAMERA.mounting.x_m)
    assert mounting.pitch_rad == pytest.approx(CAMERA.mounting.pitch_rad, abs=math.radians(0.2))
    assert mounting.pitch_std_rad >= math.radians(0.1)
