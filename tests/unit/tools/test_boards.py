"""Boards, and marks on the ground: what is refused, and the mounting that marks give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_server.errors import SettingsError
from edge_server.lanes.camera_model import CameraModel, Lens, Mounting
from edge_server.tools.boards import (
    BoardView,
    CalibrationBoard,
    board_on_ground,
    calibrate_lens,
    measure_mounting,
)

LENS = Lens("pinhole", 800, 450, 700.0, 695.0, 405.0, 228.0, (-0.22, 0.05, 0.001, -0.001, 0.0))
FISHEYE = Lens("fisheye", 800, 450, 400.0, 398.0, 402.0, 226.0, (0.03, -0.01, 0.002, 0.0))
VIEWS = Path(__file__).parents[4] / "shared/data/lanes/calibration"


def test_too_few_views_make_no_lens() -> None:
    with pytest.raises(SettingsError, match="found in 0 pictures, 4 are the least"):
        calibrate_lens([], 800, 450)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "chessboard",
        "chessboard:9x6",
        "chessboard:9x6:0",
        "chessboard:9x6:nan",
        "chessboard:2x6:0.03",
        "circles:9x6:0.03",
        "charuco:5x7:0.03",
        "charuco:5x7:0.03:0.04",
        "charuco:5x7:0.03:0.02:DICT_NONE",
        "charuco:5x7:0.03:0.02:legacy:DICT_5X5_100",
    ],
)
def test_a_board_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="board "):
        CalibrationBoard.of(text)


MOUNTING = Mounting(1.45, np.radians(3.0), np.radians(-1.0), np.radians(2.0), -1.4, 0.2)


def test_marks_on_the_ground_give_the_mounting() -> None:
    ground = np.array([[4.0, -1.5], [4.0, 1.5], [9.0, 1.8], [9.0, -1.8], [14.0, 0.0]])
    pixels = CameraModel(LENS, MOUNTING).image_of(ground)
    measured, error_px = measure_mounting(LENS, pixels, ground)
    assert error_px < 1e-3
    for name in ("height_m", "pitch_rad", "roll_rad", "yaw_rad", "x_m", "y_m"):
        assert getattr(measured, name) == pytest.approx(getattr(MOUNTING, name), abs=1e-4)
    # Clicks that are off by a pixel leave angles within what is stated.
    rng = np.random.default_rng(2)
    off = []
    for _ in range(40):
        shaken, _ = measure_mounting(LENS, pixels + rng.normal(0.0, 1.0, pixels.shape), ground)
        error = shaken.pitch_rad - MOUNTING.pitch_rad
        off.append(abs(error) / shaken.pitch_std_rad)
    assert np.mean(np.array(off) < 2.0) > 0.85


def test_a_board_that_lies_along_the_road_is_refused() -> None:
    board = CalibrationBoard.of("chessboard:9x6:0.2")
    grid = np.stack(np.meshgrid(np.arange(6), np.arange(9)), -1).reshape(-1, 2) * 50.0
    turned = grid.reshape(9, 6, 2).transpose(1, 0, 2).reshape(-1, 2).astype(np.float32)
    with pytest.raises(SettingsError, match="lay its 9 corners across"):
        board_on_ground(BoardView("p", turned, np.zeros((54, 3), np.float32)), board, 3.0, 1.0)


@pytest.mark.parametrize("count", [0, 3])
def test_too_few_marks_make_no_mounting(count: int) -> None:
    with pytest.raises(SettingsError, match="4 at least"):
        measure_mounting(LENS, np.zeros((count, 2)), np.zeros((count, 2)))
