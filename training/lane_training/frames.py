"""Labelled road images as training reads them: one size, lanes known on every row."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import cv2
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

FRAME_WIDTH_PX, FRAME_HEIGHT_PX = 960, 540
LABEL_WIDTH_PX = 1280
# Lanes are followed this far below the image, so that an image moved up still has its lines.
ROWS_PX = FRAME_HEIGHT_PX + 160
TRAINING_FRAMES = range(84)
PEEK_FRAMES = range(84, 88)
EVALUATION_FRAMES = range(88, 110)
CLIP_TRAINING_SHARE = 2 / 3
# Stills of the first and fourth project are kept for looking at overlays.
TRAINING_STILLS = "p5_"
# Lanes beside the two that the teacher labels: left and right, known from watching the footage.
NEIGHBOURS = {"highway_960x540.mp4": (1, 0), "highway_1280x720.mp4": (0, 1), "stills": (0, 1)}
HOOK_PX = 7.0
VANISHING_GAP_PX = 8.0
SHORTEST_TAUGHT = 8
TAUGHT_WEIGHT = 0.5
# Of the taught cameras, as a share of the height.
PLAUSIBLE_HORIZON, USUAL_HORIZON = (0.54, 0.64), 0.59


@dataclass(frozen=True)
class RoadFrame:
    """An image and its lanes in 960x540 pixels.

    Attributes:
        bgr: (540, 960, 3) uint8, or None for a geometry without an image.
        x_px: (L, 700) float32, every lane on every row, left to right, extrapolated straight.
        top_px: (L,) float32 first row of each lane.
        lane_weight: (L,) float32 of each lane's loss; 0 for a lane that may be there or not.
        complete: whether every lane of the image is labelled, up to its end.
        own_lane: whether the lanes with a weight are the two lines of the vehicle's own lane.
        vanishing_px: x, y where the lanes meet; NaN if that is not known.
    """

    bgr: NDArray[np.uint8] | None
    x_px: NDArray[np.float32]
    top_px: NDArray[np.float32]
    lane_weight: NDArray[np.float32]
    complete: bool = True
    own_lane: bool = False
    vanishing_px: tuple[float, float] = (np.nan, np.nan)

    @property
    def left_count(self) -> int:
        """Lanes left of the middle of the image's bottom edge."""
        return int((self.x_px[:, FRAME_HEIGHT_PX - 1] < FRAME_WIDTH_PX / 2).sum())


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All records of a JSON-lines file, gzipped or not."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in content.splitlines()]


def polyline(xs: list[float], h_samples: list[float]) -> Floats:
    """(N, 2) x, y of a lane in 960x540 pixels, top to bottom, absent points dropped."""
    points = np.array(
        [(x, y) for x, y in zip(xs, h_samples, strict=True) if x >= 0], np.float64
    ).reshape(-1, 2)
    return np.array(points, np.float64).reshape(-1, 2) * (FRAME_WIDTH_PX / LABEL_WIDTH_PX)


def on_every_row(points: Floats) -> NDArray[np.float32]:
    """(700,) x of a polyline on all rows, straight on beyond both its ends."""
    rows = np.arange(ROWS_PX, dtype=np.float64)
    x, y = points[:, 0], points[:, 1]
    inside = np.interp(rows, y, x)
    tail, head = points[-8:], points[:4]
    below = np.polyfit(tail[:, 1], tail[:, 0], 1)[0] if len(tail) > 1 else 0.0
    above = np.polyfit(head[:, 1], head[:, 0], 1)[0] if len(head) > 1 else 0.0
    inside += np.where(rows > y[-1], (rows - y[-1]) * below, 0.0)
    inside -= np.where(rows < y[0], (y[0] - rows) * above, 0.0)
    return inside.astype(np.float32)


def frame_from_polylines(
    bgr: NDArray[np.uint8] | None,
    lanes: list[Floats],
    uncertain: Sequence[Floats] = (),
    *,
    weight: float = 1.0,
    **attributes: Any,
) -> RoadFrame:
    """Lanes sorted left to right and followed over all rows; `uncertain` ones have no weight."""
    certain = [lane for lane in lanes if len(lane) >= 2]
    lanes = [*certain, *(lane for lane in uncertain if len(lane) >= 2)]
    x_px = np.array([on_every_row(lane) for lane in lanes], np.float32).reshape(-1, ROWS_PX)
    top_px = np.array([lane[0, 1] for lane in lanes], np.float32)
    weights = np.where(np.arange(len(lanes)) < len(certain), weight, 0.0).astype(np.float32)
    order = np.argsort(x_px[:, FRAME_HEIGHT_PX - 1])
    return RoadFrame(bgr, x_px[order], top_px[order], weights[order], **attributes)


def _resized(bgr: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return cv2.resize(bgr, (FRAME_WIDTH_PX, FRAME_HEIGHT_PX), interpolation=cv2.INTER_AREA)


def geometries(data: Path) -> list[RoadFrame]:
    """Roads that people labelled, without their images."""
    frames = []
    for record in read_jsonl(data / "tusimple_geometry.jsonl.gz"):
        lanes = [polyline(xs, record["h_samples"]) for xs in record["lanes"]]
        frame = frame_from_polylines(None, lanes)
        if len(frame.x_px) >= 3:
            frames.append(frame)
    return frames


def clip_frames(path: Path) -> list[NDArray[np.uint8]]:
    """Every frame of a video, BGR."""
    video, frames = cv2.VideoCapture(str(path)), []
    while (grabbed := video.read())[0]:
        frames.append(np.asarray(grabbed[1], np.uint8))
    return frames


def _straight_part(lane: Floats) -> tuple[Floats, Floats]:
    """Cuts the hooked far end that a teacher adds.

    Returns:
        kept: (N, 2) the points on the straight.
        line: (2,) with x = line[0] * y + line[1].
    """
    lower = lane[len(lane) * 2 // 5 :]
    line = np.polyfit(lower[:, 1], lower[:, 0], 1)
    good = np.abs(lane[:, 0] - np.polyval(line, lane[:, 1])) < HOOK_PX
    first = len(good) - int(np.argmin(good[::-1])) if not good.all() else 0
    kept = lane[first:] if len(lane) - first >= 5 else lower
    return kept, np.polyfit(kept[:, 1], kept[:, 0], 1)


def _own_lane(lines: list[Floats]) -> tuple[list[Floats], list[Floats]]:
    """Lines that reach the bottom of the image left and right of its middle, in order."""
    bottoms = [float(np.polyval(line, FRAME_HEIGHT_PX)) for line in lines]
    order = [lines[i] for i in np.argsort(bottoms)]
    bottoms.sort()
    middle, far_right = FRAME_WIDTH_PX / 2, 1.1 * FRAME_WIDTH_PX
    left = [line for line, x in zip(order, bottoms, strict=True) if 0 < x < middle]
    right = [line for line, x in zip(order, bottoms, strict=True) if middle < x < far_right]
    return left, right


def _meeting_row(a: Floats, b: Floats) -> float | None:
    """The row on which two lines meet, if a horizon can be there."""
    row = float((b[1] - a[1]) / (a[0] - b[0]))
    low, high = PLAUSIBLE_HORIZON
    return row if low < row / FRAME_HEIGHT_PX < high else None


def taught_frame(
    bgr: NDArray[np.uint8], record: dict[str, Any], neighbours: tuple[int, int]
) -> RoadFrame | None:
    """A frame labelled by the teacher networks, repaired: straight to the vanishing point.

    Where both lines of the vehicle's lane are known, the lines of the neighbouring lanes follow
    from equal spacing on a straight road, and the label counts as complete.
    """
    lanes = [polyline(lane["x"], record["h_samples"]) for lane in record["lanes"]]
    parts = [_straight_part(lane) for lane in lanes if len(lane) >= SHORTEST_TAUGHT]
    if not parts:
        return None
    left, right = _own_lane([line for _, line in parts])
    row = _meeting_row(left[-1], right[0]) if left and right else None
    if row is None:
        row = USUAL_HORIZON * FRAME_HEIGHT_PX
        guide = (left or right or [parts[0][1]])[-1]
        top = row + VANISHING_GAP_PX
        known = [np.vstack(((np.polyval(line, top), top), kept)) for kept, line in parts]
        vanishing = (float(np.polyval(guide, row)), row)
        return frame_from_polylines(
            bgr, known, complete=False, weight=TAUGHT_WEIGHT, vanishing_px=vanishing
        )
    vanishing = (float(np.polyval(left[-1], row)), row)
    slope_left, slope_right = left[-1][0], right[0][0]
    pitch = slope_right - slope_left
    slopes = slope_left + pitch * np.arange(-neighbours[0], 2 + neighbours[1])
    y = np.linspace(row + VANISHING_GAP_PX, FRAME_HEIGHT_PX - 1, 20)
    straight = [np.stack((vanishing[0] + slope * (y - row), y), 1) for slope in slopes]
    return frame_from_polylines(bgr, straight, weight=TAUGHT_WEIGHT, vanishing_px=vanishing)


def taught_frames(data: Path) -> list[list[RoadFrame]]:
    """The first two thirds of each clip and the training stills, each with repaired labels."""
    groups: list[list[RoadFrame | None]] = []
    records = read_jsonl(data / "clips" / "teacher_labels.jsonl")
    for clip in sorted({record["clip"] for record in records}):
        images = clip_frames(data / "clips" / clip)
        group = [record for record in records if record["clip"] == clip]
        groups.append(
            [
                taught_frame(_resized(images[record["frame"]]), record, NEIGHBOURS[clip])
                for record in group
                if record["frame"] < CLIP_TRAINING_SHARE * len(images)
            ]
        )
    stills = [
        record
        for record in read_jsonl(data / "stills" / "teacher_labels.jsonl")
        if record["image"].startswith(TRAINING_STILLS)
    ]
    images = [cv2.imread(str(data / "stills" / record["image"])) for record in stills]
    groups.append(
        [
            taught_frame(_resized(bgr), record, NEIGHBOURS["stills"])
            for bgr, record in zip(images, stills, strict=True)
        ]
    )
    return [[frame for frame in group if frame and len(frame.x_px)] for group in groups]
