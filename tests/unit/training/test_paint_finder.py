"""The paint finder: paint as the measure of lines has one place along the whole line."""

from __future__ import annotations

import cv2
import numpy as np
from lane_training.paint_finder import Scale, find_paint

HORIZON_PX, LANE_PX = 300, 1.5  # so many px wide is the lane in each row below the horizon
METRE_PX = LANE_PX / 3.6


def test_the_two_strokes_of_a_double_line_are_one_paint() -> None:
    """In the distance they cannot be told apart: followed singly nearby, the line would bend."""
    rows = np.arange(HORIZON_PX, 720)
    below = rows - HORIZON_PX
    middle = 640 - LANE_PX / 2 * below
    luma = np.full((720, 1280), 110, np.uint8)
    for aside_m in (-0.12, 0.12):
        edges = [middle + (aside_m + side_m) * METRE_PX * below for side_m in (-0.055, 0.055)]
        outline = np.concatenate(
            [np.stack([edges[0], rows], 1), np.stack([edges[1], rows], 1)[::-1]]
        )
        cv2.fillPoly(luma, [np.round(16 * outline).astype(np.int32)], 190, cv2.LINE_AA, 4)
    luma = np.asarray(cv2.GaussianBlur(luma, (0, 0), 2.0), np.uint8)

    beside = np.stack([middle + 0.03 * METRE_PX * below, rows], axis=1)[40:]
    paint = find_paint(luma, beside, Scale(HORIZON_PX, LANE_PX))

    off_m = (paint.x_px - np.interp(paint.rows, rows, middle)) / (
        METRE_PX * (paint.rows - HORIZON_PX)
    )
    assert paint.share > 0.9
    assert np.ptp(off_m) < 0.05, off_m
