"""The 2784 line anchors of LaneATT, in the order every exported network relies on.

Source: Tabelini et al., "Keep your Eyes on the Lane" (LaneATT), `generate_anchors`, without the
top-k selection by hit frequency.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge_server.lanes.decode import (
    COLUMN_COUNT,
    FIRST_X_COLUMN,
    INPUT_WIDTH_PX,
    ROW_COUNT,
    START_Y_COLUMN,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

INPUT_HEIGHT_PX = 360
START_X_COLUMN = 3
EDGE_START_COUNT = 72
BOTTOM_START_COUNT = 128
LEFT_ANGLES_DEG = (72.0, 60.0, 49.0, 39.0, 30.0, 22.0)
RIGHT_ANGLES_DEG = (108.0, 120.0, 131.0, 141.0, 150.0, 158.0)
BOTTOM_ANGLES_DEG = (
    *(165.0, 150.0, 141.0, 131.0, 120.0, 108.0, 100.0, 90.0),
    *(80.0, 72.0, 60.0, 49.0, 39.0, 30.0, 15.0),
)
ANCHOR_COUNT = EDGE_START_COUNT * (
    len(LEFT_ANGLES_DEG) + len(RIGHT_ANGLES_DEG)
) + BOTTOM_START_COUNT * len(BOTTOM_ANGLES_DEG)


def anchor_lines() -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the start points and angles of all anchors: left edge, then bottom edge, then right
    edge.

    Returns:
        start_x: (2784,) float64, fraction of the image width.
        start_y: (2784,) float64, fraction of the image height, 0 = top, 1 = bottom.
        angle_deg: (2784,) float64; 90 points straight up, a smaller angle leans to the right.
    """
    edge_starts = np.linspace(1.0, 0.0, EDGE_START_COUNT)
    bottom_starts = np.linspace(1.0, 0.0, BOTTOM_START_COUNT)
    left, right = len(LEFT_ANGLES_DEG), len(RIGHT_ANGLES_DEG)
    bottom = len(BOTTOM_ANGLES_DEG)
    start_x = np.concatenate(
        (
            np.zeros(EDGE_START_COUNT * left),
            np.repeat(bottom_starts, bottom),
            np.ones(EDGE_START_COUNT * right),
        )
    )
    start_y = np.concatenate(
        (
            np.repeat(edge_starts, left),
            np.ones(BOTTOM_START_COUNT * bottom),
            np.repeat(edge_starts, right),
        )
    )
    angle_deg = np.concatenate(
        (
            np.tile(LEFT_ANGLES_DEG, EDGE_START_COUNT),
            np.tile(BOTTOM_ANGLES_DEG, BOTTOM_START_COUNT),
            np.tile(RIGHT_ANGLES_DEG, EDGE_START_COUNT),
        )
    )
    return start_x, start_y, angle_deg


def lane_anchors() -> NDArray[np.float32]:
    """Return all anchors as proposals with zero scores and zero length.

    Angles are measured in the unit square: the 640:360 aspect ratio does not enter, as in the
    source.

    Returns:
        anchors: (2784, 77) float32. Columns 0-1 zero, 2 start_y (0 = image BOTTOM), 3 start_x, 4
            length 0, 5..76 x in pixels of the 640-wide input at y = 360 * (1 - i / 71).
    """
    start_x, start_y, angle_deg = anchor_lines()
    row_y = np.linspace(1.0, 0.0, ROW_COUNT)
    run_per_rise = 1.0 / np.tan(np.radians(angle_deg))
    anchors = np.zeros((ANCHOR_COUNT, COLUMN_COUNT), np.float32)
    anchors[:, START_Y_COLUMN] = 1.0 - start_y
    anchors[:, START_X_COLUMN] = start_x
    anchors[:, FIRST_X_COLUMN:] = INPUT_WIDTH_PX * (
        start_x[:, None] + (start_y[:, None] - row_y) * run_per_rise[:, None]
    )
    return anchors
