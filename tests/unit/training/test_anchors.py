"""The anchors are the contract between every exported network and every decoder."""

from __future__ import annotations

import math

import numpy as np
from lane_training.anchors import lane_anchors

from edge_server.lanes.decode import FIRST_X_COLUMN

LEFT = (72, 60, 49, 39, 30, 22)
BOTTOM = (165, 150, 141, 131, 120, 108, 100, 90, 80, 72, 60, 49, 39, 30, 15)
RIGHT = (108, 120, 131, 141, 150, 158)


def published_anchor(start_x: float, start_y: float, angle_deg: float) -> list[float]:
    """One anchor, letter by letter as LaneATT's `generate_anchor` writes it."""
    slope = math.tan(math.radians(angle_deg))
    xs = [(start_x + (start_y - (1 - i / 71)) / slope) * 640 for i in range(72)]
    return [0.0, 0.0, 1.0 - start_y, start_x, 0.0, *xs]


def test_order_is_left_edge_then_bottom_then_right_edge() -> None:
    expected = [
        *(published_anchor(0.0, 1 - j / 71, angle) for j in range(72) for angle in LEFT),
        *(published_anchor(1 - j / 127, 1.0, angle) for j in range(128) for angle in BOTTOM),
        *(published_anchor(1.0, 1 - j / 71, angle) for j in range(72) for angle in RIGHT),
    ]
    anchors = lane_anchors()
    assert anchors.shape == (2784, 77)
    assert anchors.dtype == np.float32
    np.testing.assert_allclose(anchors, expected, rtol=1e-5, atol=1e-3)


def test_an_anchor_passes_through_its_start() -> None:
    anchors = lane_anchors()
    row = np.rint(anchors[:, 2] * 71).astype(int)
    at_start = anchors[np.arange(len(anchors)), FIRST_X_COLUMN + row]
    np.testing.assert_allclose(at_start, anchors[:, 3] * 640, atol=0.01)


def test_the_upright_bottom_anchor_stays_in_its_column() -> None:
    upright = lane_anchors()[432 + 7]
    np.testing.assert_allclose(upright[FIRST_X_COLUMN:], 640.0, atol=1e-3)
