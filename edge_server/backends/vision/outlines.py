"""What OpenCV does with boxes and masks: suppress boxes of one object, and outline areas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A smaller area is noise; an outline deviates from its cells by no more.
_FEWEST_CELLS = 4
_DEVIATION_CELLS = 1.0


def suppressed(
    boxes: NDArray[np.float64],
    scores: NDArray[np.float64],
    classes: NDArray[np.int64],
    overlap: float,
) -> NDArray[np.int64]:
    """Return the rows that stay, the highest score first: a box, (N, 4) x_min, y_min, x_max, y_max,
    suppresses those of its class that share more than `overlap` of the union with it."""
    corners = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)
    rows = cv2.dnn.NMSBoxesBatched(
        corners.tolist(), scores.tolist(), classes.tolist(), 0.0, overlap
    )
    kept = np.asarray(rows, np.int64).reshape(-1)
    return kept[np.argsort(-scores[kept], kind="stable")]


def outlines(area: NDArray[np.bool_]) -> list[NDArray[Any]]:
    """Return the outer outlines of the connected parts of `area`, each (N, 2) of column and row."""
    contours, _ = cv2.findContours(
        area.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE
    )
    return [
        cv2.approxPolyDP(contour, _DEVIATION_CELLS, True)[:, 0]
        for contour in contours
        if cv2.contourArea(contour) >= _FEWEST_CELLS
    ]
