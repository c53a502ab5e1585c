"""How good the exported model is, and at which score a proposal should count as a lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cv2
import numpy as np
from numpy.typing import NDArray

from edge_server.lanes.decode import INPUT_WIDTH_PX, DecodedLanes, decode_lanes
from lane_training.anchors import INPUT_HEIGHT_PX
from lane_training.tusimple import (
    DatasetScore,
    ImageScore,
    lanes_at,
    lines_hit,
    score_image,
    summarise,
)

if TYPE_CHECKING:
    from lane_training.augment import Sample
    from lane_training.material import Labelled

NMS_THRESHOLD_PX = 45.0
MAX_LANES = 5
THRESHOLDS = tuple(np.round(np.arange(0.2, 0.71, 0.025), 3))
# Thresholds whose score differs by less are equally good.
PLATEAU = 0.002
BOOTSTRAP_DRAWS = 4000
H_SAMPLES = np.arange(160.0, 720.0, 10.0)

Infer = Callable[[NDArray[np.uint8]], NDArray[np.float32]]


@dataclass(frozen=True)
class Examined:
    """One image with what the model said about it.

    Attributes:
        proposals: (2784, 77) float32.
        labels: (G, H) x in pixels of the 1280-wide image, -2 where absent.
        h_samples: (H,) y in pixels of the 720-high image.
        source: the camera that it is of.
    """

    proposals: NDArray[np.float32]
    labels: NDArray[np.float64]
    h_samples: NDArray[np.float64]
    source: str = ""


@dataclass(frozen=True)
class Found:
    """Of a source of which only the own lane is labelled: how many of its lines are found.

    Attributes:
        share: of the lines, with its 95 % bootstrap interval over images.
    """

    images: int
    lines: int
    share: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Measured:
    """A data set's score and its 95 % bootstrap intervals over images."""

    images: int
    score: DatasetScore
    accuracy_interval: tuple[float, float]
    f1_interval: tuple[float, float]


def network_view(bgr: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(360, 640, 3), as the serving path sees a frame."""
    return np.asarray(cv2.resize(bgr, (INPUT_WIDTH_PX, INPUT_HEIGHT_PX)), np.uint8)


def examine_labelled(labelled: Sequence[Labelled], infer: Infer) -> list[Examined]:
    """Images that people labelled; label lanes without a point are dropped."""
    examined = []
    for each in labelled:
        bgr = each.bgr()
        labels, rows = each.in_1280(bgr.shape)
        labels = labels[(labels >= 0).any(axis=1)]
        # The metric cannot reward an empty answer on an empty road.
        if len(labels):
            examined.append(Examined(infer(network_view(bgr)), labels, rows, each.source))
    return examined


def examine_rendered(samples: Sequence[Sample], infer: Infer) -> list[Examined]:
    """Rendered roads, labelled where the lines are inside the image."""
    examined = []
    for sample in samples:
        inside = (sample.x_px >= 0) & (sample.x_px < INPUT_WIDTH_PX)
        x = np.where(inside, sample.x_px / INPUT_WIDTH_PX, np.nan).astype(np.float32)
        labels = lanes_at(x[inside.sum(axis=1) > 1], H_SAMPLES)
        # The metric cannot reward an empty answer on an empty road.
        if len(labels):
            examined.append(Examined(infer(sample.bgr), labels, H_SAMPLES))
    return examined


def decode(proposals: NDArray[np.float32], threshold: float) -> DecodedLanes:
    """The shipped decoding."""
    return decode_lanes(
        proposals,
        score_threshold=threshold,
        nms_threshold_px=NMS_THRESHOLD_PX,
        max_lanes=MAX_LANES,
    )


def score_each(examined: Sequence[Examined], threshold: float) -> list[ImageScore]:
    """TuSimple scores of every image."""
    return [
        score_image(
            lanes_at(decode(image.proposals, threshold).x, image.h_samples),
            image.labels,
            image.h_samples,
        )
        for image in examined
    ]


def choose_threshold(examined: Sequence[Examined]) -> float:
    """The middle of the plateau on which F1 is best; accuracy does not count false lines."""
    merit = np.array([summarise(score_each(examined, each)).f1 for each in THRESHOLDS])
    plateau = np.flatnonzero(merit >= merit.max() - PLATEAU)
    return float(THRESHOLDS[plateau[len(plateau) // 2]])


def measure(examined: Sequence[Examined], threshold: float) -> Measured:
    """Score and intervals at one threshold."""
    return measured(score_each(examined, threshold))


def measured(scores: Sequence[ImageScore]) -> Measured:
    """Means and their 95 % intervals, by drawing images anew."""
    rng = np.random.default_rng(0)
    draws = rng.integers(0, len(scores), (BOOTSTRAP_DRAWS, len(scores)))
    columns = np.array([(s.accuracy, s.false_positive, s.false_negative) for s in scores])
    accuracy, false_positive, false_negative = columns[draws].mean(axis=1).T
    precision, recall = 1.0 - false_positive, 1.0 - false_negative
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-9)
    return Measured(len(scores), summarise(scores), _interval(accuracy), _interval(f1))


def find_lines(examined: Sequence[Examined], threshold: float) -> dict[str, Found]:
    """How many of the labelled lines are found, by source."""
    counts: dict[str, list[tuple[int, int]]] = {}
    for image in examined:
        predicted = lanes_at(decode(image.proposals, threshold).x, image.h_samples)
        hits = lines_hit(predicted, image.labels, image.h_samples)
        counts.setdefault(image.source, []).append((int(hits.sum()), len(hits)))
    return {source: found(pairs) for source, pairs in sorted(counts.items())}


def found(pairs: Sequence[tuple[int, int]]) -> Found:
    """Share and interval of images with so many lines found, of so many."""
    table = np.array(pairs)
    draws = np.random.default_rng(0).integers(0, len(table), (BOOTSTRAP_DRAWS, len(table)))
    hits, lines = table[draws].sum(axis=1).T
    total = int(table[:, 1].sum())
    return Found(len(table), total, table[:, 0].sum() / total, _interval(hits / lines))


def _interval(draws: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(draws, (2.5, 97.5))
    return float(low), float(high)
