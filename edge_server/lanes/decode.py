"""From LaneATT proposals to lanes: scores, non-maximum suppression and valid rows.

Source: LaneATT `lib/models/laneatt.py` (`proposals_to_pred`) and `lib/nms/src/nms_kernel.cu`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The network's input.
INPUT_WIDTH_PX = 640

# Columns of a proposal: two scores; the start, of which y = 0 is the BOTTOM of the image; the
# length in rows; and the x of each row in pixels of the input, from the bottom at y = 1 - i / 71.
ROW_COUNT = 72
NEGATIVE_COLUMN = 0
POSITIVE_COLUMN = 1
START_Y_COLUMN = 2
LENGTH_COLUMN = 4
FIRST_X_COLUMN = 5
COLUMN_COUNT = FIRST_X_COLUMN + ROW_COUNT

LAST_ROW = ROW_COUNT - 1
_ROWS = np.arange(ROW_COUNT)
# Logits of 32 bits differ by less from those of 64.
_MARGIN_ERROR = 1e-3
# Bounds the decoding time of a frame with very many proposals; a road yields some dozens.
MAX_CANDIDATES = 512
MIN_POINTS = 2


@dataclass(frozen=True)
class DecodedLanes:
    """Lanes of one image, best first.

    Attributes:
        x: (K, 72) float32, fraction of the image width, 0..1; NaN where the lane has no point.
            Row i lies at y = 1 - i / 71 of the image height, so row 0 is the bottom row.
        scores: (K,) float32, 0..1, descending.
    """

    x: NDArray[np.float32]
    scores: NDArray[np.float32]


def decode_lanes(
    proposals: NDArray[np.float32],
    *,
    score_threshold: float,
    nms_threshold_px: float,
    max_lanes: int,
    scores: Literal["logits", "prob"] = "logits",
) -> DecodedLanes:
    """Keep the best proposals without duplicates and cut each to its valid rows.

    A lane has the rows from its start up to its length, and below its start every row down to the
    first row outside the image. Only the 512 best proposals above the threshold are considered; a
    proposal with a non-finite value is ignored, and so is a lane of fewer than 2 points.

    Args:
        proposals: (N, 77) float32, columns as above.
        score_threshold: minimum score of a proposal (exclusive), 0..1.
        nms_threshold_px: two lanes with a smaller mean distance are duplicates; pixels of the
            640-wide input.
        scores: whether columns 0-1 hold raw logits or probabilities.

    Raises:
        ValueError: the array has another shape, or every score is NaN, which means a failed network
            rather than an empty road.
    """
    if proposals.ndim != 2 or proposals.shape[1] != COLUMN_COUNT:
        raise ValueError(f"proposals: expected shape (N, {COLUMN_COUNT}), got {proposals.shape}")
    positive, negative = proposals[:, POSITIVE_COLUMN], proposals[:, NEGATIVE_COLUMN]
    margin, least = positive, score_threshold
    if scores == "logits":
        with np.errstate(invalid="ignore"):
            margin = positive - negative
        odds = score_threshold / (1.0 - score_threshold)
        least = math.log(odds) - _MARGIN_ERROR if odds else -math.inf
    # Of some thousands of proposals only those are computed that may pass.
    likely = proposals[margin > least].astype(np.float64)
    if not len(likely) and len(margin) and np.isnan(margin).all():
        raise ValueError("proposals: no score is a number; the network's output is broken")
    score = likely[:, POSITIVE_COLUMN]
    if scores == "logits":
        score = _sigmoid(score - likely[:, NEGATIVE_COLUMN])
    usable = np.flatnonzero((score > score_threshold) & np.isfinite(likely).all(axis=1))
    best_first = usable[np.argsort(-score[usable], kind="stable")][:MAX_CANDIDATES]
    kept = best_first[_suppress(likely[best_first], nms_threshold_px, max_lanes)]
    lanes = likely[kept]
    x = lanes[:, FIRST_X_COLUMN:] / INPUT_WIDTH_PX
    part = _valid_rows(x, lanes)
    whole = part.sum(axis=1) >= MIN_POINTS
    x = np.where(part, x, np.nan)[whole]
    return DecodedLanes(x.astype(np.float32), score[kept][whole].astype(np.float32))


def calibrated_confidence(
    scores: NDArray[np.floating], temperature: float, bias: float
) -> NDArray[np.float32]:
    """Return the share of lanes with such a score that are right: their logit by `temperature`,
    plus `bias`; the order of the scores stays.

    Args:
        temperature: above 0; 1 with bias 0 leaves scores as they are.
        bias: of the logit.

    Source: Guo et al., On Calibration of Modern Neural Networks (2017); Platt (1999) for the bias.
    """
    if (temperature, bias) == (1.0, 0.0):
        return np.asarray(scores, np.float32)
    sure = np.minimum(np.maximum(np.asarray(scores, np.float64), 1e-9), 1.0 - 1e-9)
    logit = np.log(sure / (1.0 - sure)) / temperature + bias
    return _sigmoid(logit).astype(np.float32)


def _sigmoid(logit: NDArray[np.float64]) -> NDArray[np.float64]:
    # Beyond 60 it is 0 or 1 in any precision; the limits keep exp from overflowing.
    return np.asarray(1.0 / (1.0 + np.exp(-np.minimum(np.maximum(logit, -60.0), 60.0))))


def _suppress(candidates: NDArray[np.float64], threshold_px: float, max_lanes: int) -> list[int]:
    """Suppress greedily; candidates are sorted best first. Return the indices of the kept ones.

    Two lanes are compared on their shared rows; lanes without shared rows are both kept.
    """
    x_px = candidates[:, FIRST_X_COLUMN:]
    start = np.trunc(candidates[:, START_Y_COLUMN, None] * LAST_ROW + 0.5)
    span = candidates[:, LENGTH_COLUMN, None] - 1.0
    end = np.trunc(start + span + 0.5 - (span < 0))
    rows = ((start <= _ROWS) & (end >= _ROWS)).astype(np.float64)
    waiting = np.ones(len(candidates), bool)
    kept: list[int] = []
    while len(kept) < max_lanes and waiting.any():
        best = int(np.argmax(waiting))
        kept.append(best)
        too_far_px = np.abs(x_px - x_px[best])
        too_far_px -= threshold_px
        too_far_px *= rows
        waiting &= too_far_px @ rows[best] >= 0.0
        waiting[best] = False
    return kept


def _valid_rows(x: NDArray[np.float64], lanes: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which rows belong to the lanes, (K, 72).

    Args:
        x: of the lanes, a fraction of the width.
    """
    start = np.rint(lanes[:, START_Y_COLUMN, None] * LAST_ROW)
    end = start + np.rint(lanes[:, LENGTH_COLUMN, None]) - 1.0
    inside = (x >= 0.0) & (x <= 1.0)
    above = start <= _ROWS
    # True where every row from here up to the start is inside the image.
    reaches_start = np.logical_and.accumulate((inside | above)[:, ::-1], axis=1)[:, ::-1]
    # LaneATT keeps points to the right of the image and drops those to its left; points on either
    # side are invisible to the camera, so both are dropped here.
    return inside & (end >= _ROWS) & (above | reaches_start)
