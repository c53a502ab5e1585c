"""Convert lanes between polylines and rows of x, the protocol's form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.lanes.types import Lane

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ABSENT_X = -2.0  # TuSimple's mark for "no lane on this row"


def lanes_from_rows(points: NDArray[np.float32], scores: NDArray[np.float32]) -> tuple[Lane, ...]:
    """Return lanes as polylines, without the rows on which the lane has no point.

    Args:
        points: (K, 72, 2) float32, (x, y) in px, bottom row first, x < 0 where absent.
        scores: (K,) float32, 0..1.
    """
    # A NaN coordinate stays: the payload reports such a lane and leaves it out.
    present = ~(points[..., 0] < 0)
    return tuple(
        Lane(rows[mask], float(score))
        for rows, mask, score in zip(points, present, scores, strict=True)
        if mask.sum() > 1
    )
