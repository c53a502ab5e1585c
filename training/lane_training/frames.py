"""Labelled road images as training reads them: one size, lanes known on every row."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import cv2
import numpy as np

from lane_training.paint_finder import FEWEST_ROWS, Paint, Scale, find_paint, meeting, scale_of

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
# Of the taught cameras, as a share of the height.
PLAUSIBLE_HORIZON = 0.54, 0.64
# A label moves onto paint that is so near it, and seen in this share of its rows.
LABEL_NEAR_PX, LABEL_NEAR_M, TAUGHT_NEAR_M = 6.0, 0.12, 0.5
LEAST_PAINTED = 0.15


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


def _straight_line(lane: Floats) -> Floats:
    """(2,) with x = line[0] * y + line[1], without the hooked far end that a teacher adds."""
    lower = lane[len(lane) * 2 // 5 :]
    line = np.polyfit(lower[:, 1], lower[:, 0], 1)
    good = np.abs(lane[:, 0] - np.polyval(line, lane[:, 1])) < HOOK_PX
    first = len(good) - int(np.argmin(good[::-1])) if not good.all() else 0
    kept = lane[first:] if len(lane) - first >= 5 else lower
    return np.asarray(np.polyfit(kept[:, 1], kept[:, 0], 1))


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


def _is_long(paint: Paint) -> bool:
    return len(paint.rows) >= FEWEST_ROWS and paint.share >= LEAST_PAINTED


def _correction(paint: Paint, line: NDArray[np.float32], scale: Scale, near_m: float) -> Floats:
    """(700,) by how much a line on every row lies beside its paint; NaN where too little is near.

    Smooth over the rows with paint, and as on the last of them beyond.
    """
    off = paint.x_px - line[paint.rows.astype(int)]
    near = np.abs(off) <= np.maximum(LABEL_NEAR_PX, near_m * scale.metre_px(paint.rows))
    rows, off = paint.rows[near], off[near]
    if not _is_long(Paint(rows, off, paint.looked)):
        return np.full(ROWS_PX, np.nan)

    def design(rows: Floats) -> Floats:
        u = (rows - scale.horizon_px) / FRAME_HEIGHT_PX
        return np.stack([np.ones(len(u)), u, 0.02 / (u + 0.02)], axis=1)

    weight = np.ones(len(rows))
    for _ in range(4):
        root = np.sqrt(weight)[:, None]
        fit = np.linalg.lstsq(design(rows) * root, off * root[:, 0], rcond=None)[0]
        weight = 1.0 / np.maximum(1.0, np.abs(off - design(rows) @ fit) / 1.0)
    return np.asarray(design(np.clip(np.arange(float(ROWS_PX)), rows[0], rows[-1])) @ fit)


def on_paint(
    frame: RoadFrame, near_m: float = LABEL_NEAR_M, *, only_painted: bool = False
) -> RoadFrame:
    """The frame with its lines moved onto their paint.

    People and networks label beside it, most of all far away. A line stays where its paint is not
    seen; with `only_painted` it may then be there or not. Without both lines of the own lane the
    size of the road is not known, and all stay.
    """
    assert frame.bgr is not None
    luma = np.ascontiguousarray(frame.bgr[..., 1])
    feet, middle = frame.x_px[:, FRAME_HEIGHT_PX - 1], FRAME_WIDTH_PX / 2
    certain = np.flatnonzero(frame.lane_weight > 0)
    own = [certain[feet[certain] <= middle][-1:], certain[feet[certain] > middle][:1]]
    points = []
    for x, top in zip(frame.x_px, frame.top_px.tolist(), strict=True):
        rows = np.arange(min(max(round(top), 0), FRAME_HEIGHT_PX - 2), FRAME_HEIGHT_PX)
        points.append(np.stack((x[rows], rows), 1).astype(np.float64))
    scale = scale_of(*(points[side[0]] for side in own)) if all(map(len, own)) else None
    if scale is None:
        return frame
    x_px, weights = frame.x_px.copy(), frame.lane_weight.copy()
    for place in certain:
        line = points[place]
        line = line[(line[:, 0] >= 0) & (line[:, 0] < FRAME_WIDTH_PX)]
        moved = np.full(ROWS_PX, np.nan)
        if len(line) > FEWEST_ROWS:
            moved = _correction(find_paint(luma, line, scale), x_px[place], scale, near_m)
        if not np.isnan(moved[0]):
            x_px[place] += moved.astype(np.float32)
        elif only_painted:
            weights[place] = 0.0
    return replace(frame, x_px=x_px, lane_weight=weights)


def taught_frame(
    bgr: NDArray[np.uint8], record: dict[str, Any], neighbours: tuple[int, int]
) -> RoadFrame | None:
    """A frame that networks labelled, on the paint; None without paint of both lines of the lane.

    The paint of these lines shows where they meet and how the road bends; the lines of the
    neighbouring lanes follow from equal spacing. The label counts as complete; a neighbouring line
    without paint may be there or not.
    """
    lanes = [polyline(lane["x"], record["h_samples"]) for lane in record["lanes"]]
    lines = [_straight_line(lane) for lane in lanes if len(lane) >= SHORTEST_TAUGHT]
    left, right = _own_lane(lines)
    row = _meeting_row(left[-1], right[0]) if left and right else None
    if row is None:
        return None
    y = np.arange(np.ceil(row) + VANISHING_GAP_PX, FRAME_HEIGHT_PX)
    guess = [np.stack((np.polyval(line, y), y), 1) for line in (left[-1], right[0])]
    scale = scale_of(*guess)
    if scale is None:
        return None
    luma = np.ascontiguousarray(bgr[..., 1])
    paints = [find_paint(luma, line, scale) for line in guess]
    if not all(map(_is_long, paints)):
        return None
    met = meeting([(paint.rows, paint.x_px) for paint in paints], row)
    slope_left, slope_right = met.slopes
    slopes = slope_left + (slope_right - slope_left) * np.arange(-neighbours[0], 2 + neighbours[1])
    y = np.arange(np.ceil(met.row_px) + VANISHING_GAP_PX, FRAME_HEIGHT_PX)
    road = [np.stack((met.line(slope, y), y), 1) for slope in slopes]
    frame = frame_from_polylines(bgr, road, vanishing_px=(met.x_px, met.row_px))
    return on_paint(frame, TAUGHT_NEAR_M, only_painted=True)


def taught_frames(data: Path) -> list[list[RoadFrame]]:
    """The first two thirds of each clip and the training stills, with labels on the paint."""
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
    kept = [[frame for frame in group if frame is not None] for group in groups]
    return [group for group in kept if group]
