"""The TuSimple lane metric: accuracy, false positives and false negatives of an image.

Source: TuSimple benchmark `evaluate/lane.py`; F1 as LaneATT reports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edge_server.lanes.decode import ROW_COUNT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

IMAGE_WIDTH_PX = 1280
IMAGE_HEIGHT_PX = 720
ABSENT = -2.0
PIXEL_THRESHOLD = 20.0
MATCH_ACCURACY = 0.85
COUNTED_LANES = 4
SPARE_PREDICTIONS = 2
# A lane is assumed to reach this far past its first and last point, as a fraction of the height.
END_MARGIN = 0.01
# Replaces absent x in comparisons: absent in both lanes is equal, absent in one is far off.
FAR_AWAY_PX = -100.0


@dataclass(frozen=True)
class ImageScore:
    """Scores of one image, each 0..1.

    Attributes:
        accuracy: fraction of label points matched, mean over at most four lanes.
        false_positive: fraction of the predicted lanes that match no label.
        false_negative: fraction of the label lanes (four at most) that no prediction matches.
    """

    accuracy: float
    false_positive: float
    false_negative: float


@dataclass(frozen=True)
class DatasetScore:
    """Means over images, and F1 = 2PR / (P + R) with P = 1 - FP and R = 1 - FN."""

    accuracy: float
    false_positive: float
    false_negative: float
    f1: float


def lanes_at(x: NDArray[np.float32], h_samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sample decoded lanes at TuSimple's rows.

    Args:
        x: (K, 72) fraction of the width, NaN where absent, row i at y = 1 - i / 71.
        h_samples: (H,) y in pixels of the 720-high image.

    Returns:
        (K, H) float64 x in pixels of the 1280-wide image, -2 where the lane is absent.
    """
    if x.ndim != 2 or x.shape[1] != ROW_COUNT:
        raise ValueError(f"lanes: expected shape (K, {ROW_COUNT}), got {x.shape}")
    # np.interp needs increasing y: from the top of the image downwards.
    row_y = np.linspace(0.0, 1.0, ROW_COUNT)
    wanted_y = np.asarray(h_samples, np.float64) / IMAGE_HEIGHT_PX
    result = np.full((len(x), len(wanted_y)), ABSENT)
    for lane, downwards in zip(result, x[:, ::-1], strict=True):
        present = ~np.isnan(downwards)
        if not present.any():
            continue
        y = row_y[present]
        covered = (wanted_y >= y[0] - END_MARGIN) & (wanted_y <= y[-1] + END_MARGIN)
        at_rows = np.interp(wanted_y[covered], y, downwards[present])
        lane[covered] = at_rows * IMAGE_WIDTH_PX
    return result


def score_image(
    predicted: NDArray[np.float64], labelled: NDArray[np.float64], h_samples: NDArray[np.float64]
) -> ImageScore:
    """Score the predicted lanes of one image.

    Args:
        predicted: (P, H) x in pixels of the 1280-wide image, negative where absent.
        labelled: (G, H) likewise.
        h_samples: (H,) y in pixels.

    Raises:
        ValueError: the arrays do not share the number of rows.
    """
    rows = len(h_samples)
    for name, lanes in (("predicted", predicted), ("labelled", labelled)):
        if lanes.ndim != 2 or lanes.shape[1] != rows:
            raise ValueError(f"{name}: expected shape (lanes, {rows}), got {lanes.shape}")
    if len(predicted) > len(labelled) + SPARE_PREDICTIONS:
        return ImageScore(0.0, 0.0, 1.0)
    line_accuracy = np.zeros(len(labelled))
    if len(predicted) and len(labelled):
        thresholds = np.array([line_threshold_px(lane, h_samples) for lane in labelled])
        a = np.where(predicted < 0, FAR_AWAY_PX, predicted)
        b = np.where(labelled < 0, FAR_AWAY_PX, labelled)
        met = np.abs(a[:, None] - b[None]) < thresholds[:, None]
        line_accuracy = met.mean(axis=2).max(axis=0)
    matched = int((line_accuracy >= MATCH_ACCURACY).sum())
    missed = len(labelled) - matched
    total = float(line_accuracy.sum())
    if len(labelled) > COUNTED_LANES:
        missed = max(missed - 1, 0)
        total -= float(np.min(line_accuracy))
    counted = max(min(len(labelled), COUNTED_LANES), 1)
    return ImageScore(
        accuracy=total / counted,
        false_positive=(len(predicted) - matched) / len(predicted) if len(predicted) else 0.0,
        false_negative=missed / counted,
    )


def line_threshold_px(lane: NDArray[np.float64], h_samples: NDArray[np.float64]) -> float:
    """Return the match threshold: 20 px across the lane, which is more along the row the flatter
    the lane lies."""
    present = lane >= 0
    if present.sum() < 2:
        return PIXEL_THRESHOLD
    slope = np.polyfit(np.asarray(h_samples, np.float64)[present], lane[present], 1)[0]
    return float(PIXEL_THRESHOLD / np.cos(np.arctan(slope)))


def lines_hit(
    predicted: NDArray[np.float64], labelled: NDArray[np.float64], h_samples: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Which labelled lines are found, where not every line of the image is labelled.

    A line is found by a lane that is within TuSimple's threshold on 85 % of the labelled rows;
    lanes elsewhere count neither for nor against.

    Args:
        predicted, labelled, h_samples: as for `score_image`.

    Returns:
        (G,) bool.
    """
    hits = np.zeros(len(labelled), bool)
    for place, line in enumerate(labelled):
        rows = line >= 0
        met = np.abs(predicted[:, rows] - line[rows]) < line_threshold_px(line, h_samples)
        met &= predicted[:, rows] >= 0
        hits[place] = bool((met.mean(axis=1) >= MATCH_ACCURACY).any()) if rows.any() else False
    return hits


def own_lines(labelled: NDArray[np.float64], h_samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """The lines of the vehicle's own lane: on each side the one whose lower half leads to the
    bottom of the image nearest its middle; lines without two points are none.

    Args:
        labelled, h_samples: as for `score_image`.

    Returns:
        (0..2, H) float64.
    """
    feet = np.full(len(labelled), np.nan)
    for place, line in enumerate(labelled):
        rows = np.flatnonzero(line >= 0)
        lower = rows[-max(2, len(rows) // 2) :]
        if len(rows) > 1:
            slope, start = np.polyfit(h_samples[lower], line[lower], 1)
            feet[place] = slope * IMAGE_HEIGHT_PX + start - IMAGE_WIDTH_PX / 2
    left, right = np.where(feet <= 0, -feet, np.inf), np.where(feet > 0, feet, np.inf)
    chosen = [int(np.argmin(side)) for side in (left, right) if len(side) and side.min() < np.inf]
    return labelled[chosen]


def summarise(scores: Sequence[ImageScore]) -> DatasetScore:
    """Return the means over at least one image.

    Raises:
        ValueError: `scores` is empty.
    """
    if not scores:
        raise ValueError("scores: expected at least one image, got none")
    accuracy, false_positive, false_negative = np.mean(
        [(s.accuracy, s.false_positive, s.false_negative) for s in scores], axis=0
    )
    precision, recall = 1.0 - false_positive, 1.0 - false_negative
    f1 = 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0
    return DatasetScore(float(accuracy), float(false_positive), float(false_negative), float(f1))
