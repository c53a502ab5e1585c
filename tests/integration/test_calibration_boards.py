"""Boards in pictures give the lens that took them, and the place of the camera."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from support.board_pictures import POSES, BoardCamera

from edge_server.lanes.camera_model import CameraModel, Lens, Mounting
from edge_server.tools.boards import (
    CalibrationBoard,
    board_on_ground,
    calibrate_lens,
    find_board,
    measure_mounting,
)

LENS = Lens("pinhole", 800, 450, 700.0, 695.0, 405.0, 228.0, (-0.22, 0.05, 0.001, -0.001, 0.0))
FISHEYE = Lens("fisheye", 800, 450, 400.0, 398.0, 402.0, 226.0, (0.03, -0.01, 0.002, 0.0))
MOUNTING = Mounting(1.45, np.radians(3.0), np.radians(-1.0), np.radians(2.0), -1.4, 0.2)
VIEWS = Path(__file__).parents[3] / "shared/data/lanes/calibration"


@pytest.mark.parametrize(
    ("text", "lens"),
    [
        ("chessboard:9x6:0.025", LENS),
        pytest.param("charuco:11x8:0.022:0.016:DICT_5X5_100", LENS, marks=pytest.mark.long),
        ("chessboard:9x6:0.025", FISHEYE),
    ],
)
def test_the_lens_that_took_the_pictures_comes_back(text: str, lens: Lens) -> None:
    board, camera = CalibrationBoard.of(text), BoardCamera(lens)
    found = [
        find_board(str(number), camera.picture(board, *pose), board)
        for number, pose in enumerate(POSES)
    ]
    views = [view for view in found if view is not None]
    assert len(views) >= 8
    result = calibrate_lens(views, lens.width, lens.height, lens.kind)
    assert result.error_px < 0.3
    assert (result.lens.fx, result.lens.fy) == pytest.approx((lens.fx, lens.fy), rel=0.01)
    assert (result.lens.cx, result.lens.cy) == pytest.approx((lens.cx, lens.cy), abs=4.0)
    # What counts: where the pixels look, over most of the picture.
    rng = np.random.default_rng(1)
    pixels = rng.uniform((150, 90), (650, 360), (50, 2))
    off = result.lens.rays_of(pixels).xy - lens.rays_of(pixels).xy
    assert np.abs(off).max() * lens.fx < 3.0
    assert len(result.residuals) == len(result.errors_px) == len(views)


def test_a_legacy_board_is_not_taken_for_a_new_one() -> None:
    """An even number of rows, as printed before OpenCV 4.6: its corners lie elsewhere."""
    legacy = CalibrationBoard.of("charuco:11x8:0.022:0.016:DICT_5X5_100:legacy")
    picture = BoardCamera(LENS).picture(legacy, *POSES[0])
    assert find_board("", picture, replace(legacy, legacy=False)) is None
    assert find_board("", picture, legacy) is not None


def test_a_board_on_the_ground_gives_the_mounting() -> None:
    lens = replace(LENS, width=1280, height=720, fx=1100.0, fy=1100.0, cx=640.0, cy=360.0)
    model = CameraModel(lens, replace(MOUNTING, pitch_rad=np.radians(8.0)))
    board = CalibrationBoard.of("chessboard:9x6:0.2")
    picture = BoardCamera(lens).picture_on_ground(board, model, 2.5, 0.9)
    view = find_board("", picture, board)
    assert view is not None
    places = board_on_ground(view, board, 2.5, 0.9)
    measured = measure_mounting(lens, view.corners.astype(np.float64), places)[0]
    assert measured.height_m == pytest.approx(1.45, abs=0.02)
    assert measured.pitch_rad == pytest.approx(np.radians(8.0), abs=np.radians(0.3))
    assert measured.yaw_rad == pytest.approx(model.mounting.yaw_rad, abs=np.radians(0.3))
    assert (measured.x_m, measured.y_m) == pytest.approx((-1.4, 0.2), abs=0.03)


@pytest.mark.skipif(not VIEWS.is_dir(), reason=f"needs the pictures in {VIEWS}")
def test_real_views_give_what_opencvs_sample_gives() -> None:
    """`samples/python/calibrate.py` of OpenCV, with its own window and flags, beside ours."""
    board = CalibrationBoard.of("chessboard:9x6:0.025")
    views, places, corners = [], [], []
    grid = np.zeros((54, 3), np.float32)
    grid[:, :2] = np.indices((9, 6)).T.reshape(-1, 2) * 0.025
    for path in sorted(VIEWS.glob("*.jpg")):
        image = cv2.imread(str(path))
        view = find_board(path.name, image, board)
        if view is None or image.shape[:2] != (720, 1280):
            continue
        views.append(view)
        grey = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
        found, seen = cv2.findChessboardCorners(grey, (9, 6))
        assert found
        term = (cv2.TERM_CRITERIA_EPS + cv2.TERM_CRITERIA_COUNT, 30, 0.1)
        corners.append(cv2.cornerSubPix(grey, seen, (5, 5), (-1, -1), term).reshape(-1, 2))
        places.append(grid)
    assert len(views) == 15
    result = calibrate_lens(views, 1280, 720)
    sample_px, matrix, *_ = cv2.calibrateCamera(places, corners, (1280, 720), None, None)
    assert result.error_px < 1.05 * sample_px, (result.error_px, sample_px)
    assert result.lens.fx == pytest.approx(matrix[0, 0], rel=0.01)
    assert result.covered > 0.9
