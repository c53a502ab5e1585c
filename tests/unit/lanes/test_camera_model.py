"""A camera model leads from the road to the picture and back, for normal and fisheye lenses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.lanes.roads import CAMERA, cameras

from edge_server.lanes.camera_model import FARTHEST_M, CameraModel, Ground, Lens, Mounting

if TYPE_CHECKING:
    from numpy.typing import NDArray

GRID = np.stack(np.meshgrid(np.linspace(4, 55, 18), np.linspace(-6, 6, 9)), -1).reshape(-1, 2)


def ground_of(
    camera: CameraModel, pixels: NDArray[np.floating], farthest_m: float = FARTHEST_M
) -> Ground:
    return camera.ground_of_rays(camera.lens.rays_of(pixels), farthest_m)


@given(cameras())
def test_a_ground_point_comes_back_from_its_pixel(camera: CameraModel) -> None:
    pixels = camera.image_of(GRID)
    inside = (pixels > 0).all(axis=1) & (pixels < (camera.lens.width, camera.lens.height)).all(1)
    back = ground_of(camera, pixels[inside]).points
    seen = ~np.isnan(back[:, 0])
    np.testing.assert_allclose(back[seen], GRID[inside][seen], atol=1e-4)
    # What is not seen is near the horizon.
    assert (GRID[inside][~seen][:, 0] > 30.0).all()


@given(cameras())
def test_the_derivatives_are_those_of_the_projection(camera: CameraModel) -> None:
    pixels = camera.image_of(GRID)
    inside = (pixels > 2).all(axis=1) & (pixels < (camera.lens.width, camera.lens.height)).all(1)
    pixels = pixels[inside]
    ground = ground_of(camera, pixels, 200.0)
    step_px, step_rad = 1e-2, 1e-5
    for axis in (0, 1):
        fine, coarse = (
            (
                ground_of(camera, pixels + step * np.eye(2)[axis], 200.0).points
                - ground_of(camera, pixels - step * np.eye(2)[axis], 200.0).points
            )
            / (2 * step)
            for step in (step_px, 2 * step_px)
        )
        exact = ground.by_pixel[:, :, axis]
        # Where the lens folds, differences do not settle yet.
        settled = np.abs(coarse - fine) < 5e-4 * np.nanmax(np.abs(exact), initial=1e-3)
        assert np.count_nonzero(settled) > 0.9 * np.count_nonzero(~np.isnan(fine))
        _close(np.where(settled, fine, np.nan), exact)
    for name in ("pitch_rad", "yaw_rad"):
        turned = [
            ground_of(
                CameraModel(
                    camera.lens,
                    replace(camera.mounting, **{name: getattr(camera.mounting, name) + step}),
                ),
                pixels,
                200.0,
            ).points
            for step in (step_rad, -step_rad)
        ]
        by = ground.by_pitch if name == "pitch_rad" else ground.by_yaw
        _close((turned[0] - turned[1]) / (2 * step_rad), by)


def _close(numeric: np.ndarray, exact: np.ndarray) -> None:
    both = ~np.isnan(numeric) & ~np.isnan(exact)
    scale = np.abs(exact[both]).max(initial=1e-3)
    np.testing.assert_allclose(numeric[both] / scale, exact[both] / scale, atol=2e-3)


@pytest.mark.parametrize("kind", ["pinhole", "fisheye"])
def test_the_lens_models_are_opencvs(kind: str) -> None:
    focal = (1150.0, 1140.0)
    if kind == "pinhole":
        lens = Lens("pinhole", 1280, 720, *focal, 660.0, 380.0, (-0.24, -0.05, -0.001, 2e-4, 0.02))
    else:
        lens = Lens("fisheye", 1280, 720, 560.0, 555.0, 660.0, 380.0, (0.05, -0.01, 0.002, -5e-4))
    matrix = np.array([[lens.fx, 0.0, lens.cx], [0.0, lens.fy, lens.cy], [0.0, 0.0, 1.0]])
    rng = np.random.default_rng(3)
    points = np.c_[rng.uniform((-0.5, -0.3), (0.5, 0.3), (200, 2)), np.ones(200)]
    module = cv2 if kind == "pinhole" else cv2.fisheye
    # (N, 1, 3), the form that both take.
    still = np.zeros((2, 3, 1))
    expected = module.projectPoints(*(points[:, None], *still, matrix, np.array(lens.distortion)))[
        0
    ].reshape(-1, 2)
    np.testing.assert_allclose(lens.pixels_of(points[:, :2]), expected, atol=1e-6)
    np.testing.assert_allclose(lens.rays_of(expected).xy, points[:, :2], atol=1e-6)


def test_the_axes_are_those_of_iso_8855() -> None:
    lens = Lens("pinhole", 1280, 720, 1000.0, 1000.0, 640.0, 360.0, (0.0,) * 5)
    level = CameraModel(lens, Mounting(1.4))
    ahead, to_the_left = level.image_of(np.array([[20.0, 0.0], [20.0, 2.0]]))
    assert ahead == pytest.approx((640.0, 360.0 + 1000 * 1.4 / 20))
    assert to_the_left[0] == pytest.approx(640.0 - 100.0)
    # A camera that looks down sees the road higher in the picture; one to the left, to the right.
    down, left = (
        CameraModel(lens, replace(level.mounting, **{name: 0.02})).image_of(np.array([[20.0, 0.0]]))
        for name in ("pitch_rad", "yaw_rad")
    )
    assert down[0, 1] < ahead[1]
    assert left[0, 0] > ahead[0]
    # With its right side lower, the road's right side is higher in the picture.
    rolled = CameraModel(lens, replace(level.mounting, roll_rad=0.05))
    right_of, left_of = rolled.image_of(np.array([[20.0, -3.0], [20.0, 3.0]]))
    assert right_of[1] < left_of[1]


def test_nothing_is_known_near_the_horizon_or_far_away() -> None:
    lens = Lens("pinhole", 1280, 720, 1000.0, 1000.0, 640.0, 360.0, (0.0,) * 5)
    camera = CameraModel(lens, Mounting(1.4))
    rows = np.array([300.0, 360.0, 361.9, 362.1, 383.0, 384.0, 600.0])
    ground = ground_of(camera, np.stack([np.full(7, 640.0), rows], 1), 1000.0).points
    assert np.isnan(ground[:, 0]).tolist() == [True, True, True, False, False, False, False]
    assert ground[3, 0] == pytest.approx(1.4 / 2.1 * 1000)
    near = ground_of(camera, np.stack([np.full(7, 640.0), rows], 1)).points
    assert np.nanmax(near[:, 0]) <= FARTHEST_M
    assert np.isnan(near[3]).all()


def test_a_smaller_picture_of_the_same_shape_shows_the_same_road() -> None:
    small = CAMERA.scaled_to(640, 360)
    points = np.array([[8.0, 1.5], [30.0, -2.0]])
    # The middle of the first pixel is half a pixel from the edge, in either size.
    np.testing.assert_allclose(small.image_of(points), (CAMERA.image_of(points) + 0.5) / 2 - 0.5)
    with pytest.raises(ValueError, match=r"640 x 480 px.*1280 x 720"):
        CAMERA.scaled_to(640, 480)


@given(st.floats(700.0, 2000.0))
def test_a_pixel_that_the_distortion_never_reaches_has_no_ray(radius_px: float) -> None:
    # 1 + 3 k1 r^2 = 0 at r = 0.79: 0.53 of the focal length from the middle is the farthest.
    lens = Lens("pinhole", 1280, 720, 1000.0, 1000.0, 640.0, 360.0, (-0.53, 0.0, 0.0, 0.0, 0.0))
    assert np.isnan(lens.rays_of(np.array([[640.0 + radius_px, 360.0]])).xy).all()
