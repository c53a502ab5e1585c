"""Many roads out of few: geometric warps that carry the lanes along, then light and lens."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge_server.lanes.decode import INPUT_WIDTH_PX, ROW_COUNT
from edge_server.tools.road.weather import draw_bonnet
from lane_training.anchors import INPUT_HEIGHT_PX
from lane_training.frames import FRAME_HEIGHT_PX, FRAME_WIDTH_PX, ROWS_PX, RoadFrame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAX_LANES = 5
GRID_PX = 4
LABEL_ROWS_PX = INPUT_HEIGHT_PX * np.linspace(1.0, 0.0, ROW_COUNT)
BEND_OFFSET_PX = 35.0
MINIMUM_GAP_PX = 2.0
BROADER = -0.25, 0.45
NIGHT_SHARE, STRETCH_SHARE, BONNET_SHARE = 0.08, 0.08, 0.12
BEGINS_ABOVE_PX = 0.93 * INPUT_HEIGHT_PX


@dataclass(frozen=True)
class Sample:
    """One training image.

    Attributes:
        bgr: (360, 640, 3) uint8.
        x_px: (5, 72) float32 x at the network's rows, bottom first; NaN above a lane's top.
        lane_weight: (5,) float32, of each lane's loss.
        complete, own_lane, vanishing_px: as in `RoadFrame`, in pixels of this image.
    """

    bgr: NDArray[np.uint8]
    x_px: NDArray[np.float32]
    lane_weight: NDArray[np.float32]
    complete: bool = True
    own_lane: bool = False
    vanishing_px: tuple[float, float] = (np.nan, np.nan)


def labels_on_rows(
    polylines: Sequence[NDArray[np.floating]],
    weights: Sequence[float] | NDArray[np.float32] | None = None,
    *,
    begin_in_picture: bool = False,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Labels (5, 72) and weights (5,), both float32, from polylines in input pixels.

    A lane goes straight on below its lowest point. With `begin_in_picture`, one that begins well
    above the lower edge, as at a fork, begins there.
    """
    labels = np.full((MAX_LANES, ROW_COUNT), np.nan, np.float32)
    kept = np.zeros(MAX_LANES, np.float32)
    middle = INPUT_WIDTH_PX / 2
    lowest_x = [abs(float(p[np.argmax(p[:, 1]), 0]) - middle) for p in polylines]
    for place, chosen in enumerate(np.argsort(lowest_x, kind="stable")[:MAX_LANES]):
        polyline = polylines[chosen]
        x, y = polyline[np.argsort(polyline[:, 1])].T
        back = max(0, len(x) - 8)
        slope = (x[-1] - x[back]) / max(y[-1] - y[back], 1e-3)
        below = np.maximum(LABEL_ROWS_PX - y[-1], 0.0) * slope
        labels[place] = np.interp(LABEL_ROWS_PX, y, x) + below
        labels[place, y[0] > LABEL_ROWS_PX] = np.nan
        if begin_in_picture and y[-1] < BEGINS_ABOVE_PX and 0 <= x[-1] < INPUT_WIDTH_PX:
            labels[place, y[-1] < LABEL_ROWS_PX] = np.nan
        kept[place] = 1.0 if weights is None else weights[chosen]
    return labels, kept


def _affine(rng: np.random.Generator, strength: float) -> NDArray[np.float64]:
    """(2, 3) from 960x540 to 640x360: turn, scale, shift; half the time a far shift in height, and
    half the time lanes as broad or narrow as another lens or another height shows them."""
    angle = np.radians(rng.uniform(-5, 5)) * strength
    scale = 1.0 + rng.uniform(-0.15, 0.2) * strength
    shift_x = rng.uniform(-60, 60) * strength
    shift_y = rng.uniform(-40, 95) if rng.random() < 0.5 else rng.uniform(-15, 15)
    broader = np.exp(rng.uniform(*BROADER) * strength) if rng.random() < 0.5 else 1.0
    turn = scale * np.array(((np.cos(angle), -np.sin(angle)), (np.sin(angle), np.cos(angle))))
    turn[0] *= broader
    pivot = np.array((FRAME_WIDTH_PX / 2, 0.55 * FRAME_HEIGHT_PX))
    moved = pivot - turn @ pivot + (shift_x, shift_y)
    return np.column_stack((turn, moved)) * (INPUT_WIDTH_PX / FRAME_WIDTH_PX)


def _source_grid(affine: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Where every fourth pixel of the result lies before the affine step: x, y (90, 160)."""
    inverse = cv2.invertAffineTransform(affine)
    x = (np.arange(INPUT_WIDTH_PX // GRID_PX) + 0.5) * GRID_PX - 0.5
    y = (np.arange(INPUT_HEIGHT_PX // GRID_PX)[:, None] + 0.5) * GRID_PX - 0.5
    return (
        inverse[0, 0] * x + inverse[0, 1] * y + inverse[0, 2],
        inverse[1, 0] * x + inverse[1, 1] * y + inverse[1, 2],
    )


def _sampled(
    bgr: NDArray[np.uint8], x: NDArray[np.float64], y: NDArray[np.float64], border: int
) -> NDArray[np.uint8]:
    size = (INPUT_WIDTH_PX, INPUT_HEIGHT_PX)
    map_x = cv2.resize(x.astype(np.float32), size)
    map_y = cv2.resize(y.astype(np.float32), size)
    return cv2.remap(bgr, map_x, map_y, cv2.INTER_LINEAR, borderMode=border)


def _moved_lanes(
    x_px: NDArray[np.floating],
    top_px: NDArray[np.floating],
    weights: NDArray[np.float32],
    affine: NDArray[np.float64],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Lanes given on 960x540 rows, through the affine step, onto the network's rows."""
    lanes, kept = [], []
    for x, top, weight in zip(x_px, top_px, weights, strict=True):
        rows = np.arange(max(round(float(top)), 0), ROWS_PX, 4)
        if len(rows) > 2:
            lanes.append(np.stack((x[rows], rows), 1) @ affine[:, :2].T + affine[:, 2])
            kept.append(float(weight))
    return labels_on_rows(lanes, kept)


def _border(rng: np.random.Generator) -> int:
    return int(rng.choice((cv2.BORDER_REPLICATE, cv2.BORDER_REFLECT_101, cv2.BORDER_CONSTANT)))


def ground_warp(frame: RoadFrame, rng: np.random.Generator, strength: float) -> Sample:
    """The same road from another place in its lane and with another bend."""
    assert frame.bgr is not None
    affine = _affine(rng, strength)
    horizon = frame.vanishing_px[1]
    if np.isnan(horizon):
        horizon = float(frame.top_px.min()) - 6.0
    sideways = rng.uniform(-0.35, 0.35) * strength
    bend = rng.normal(0, 1500) * strength * (rng.random() < 0.7)
    depth = FRAME_HEIGHT_PX - horizon + BEND_OFFSET_PX

    def shift(y: NDArray[np.float64]) -> NDArray[np.float64]:
        below = np.maximum(y - horizon, 0.0)
        return sideways * below + bend * (1.0 / (below + BEND_OFFSET_PX) - 1.0 / depth)

    x, y = _source_grid(affine)
    image = _sampled(frame.bgr, x - shift(y), y, _border(rng))
    moved = frame.x_px + shift(np.arange(ROWS_PX, dtype=np.float64))
    vanishing = np.array((*frame.vanishing_px, 1.0))
    vanishing[0] += shift(vanishing[1:2])[0]
    vanishing_x, vanishing_y = affine @ vanishing
    labels, weights = _moved_lanes(moved, frame.top_px, frame.lane_weight, affine)
    point = float(vanishing_x), float(vanishing_y)
    return Sample(image, labels, weights, frame.complete, frame.own_lane, point)


class GeometryWarp:
    """Bends the road of a labelled image, row by row, onto a road that someone else labelled."""

    def __init__(self, roads: list[RoadFrame]) -> None:
        self._alike: dict[tuple[int, int], list[RoadFrame]] = defaultdict(list)
        for road in roads:
            self._alike[len(road.x_px), road.left_count].append(road)

    def __call__(self, frame: RoadFrame, rng: np.random.Generator, strength: float) -> Sample:
        """A sample, or a ground warp where no road has the same lanes left and right."""
        assert frame.bgr is not None
        roads = self._alike.get((len(frame.x_px), frame.left_count), [])
        if not roads or not frame.complete:
            return ground_warp(frame, rng, strength)
        road = roads[int(rng.integers(len(roads)))]
        affine = _affine(rng, 0.5 * strength)
        source_top, goal_top = float(frame.top_px.min()), float(road.top_px.min())
        stretch = (FRAME_HEIGHT_PX - source_top) / (FRAME_HEIGHT_PX - goal_top)
        rows = np.arange(ROWS_PX, dtype=np.float64)
        source_rows = source_top + (rows - goal_top) * np.where(rows > goal_top, stretch, 1.0)

        goal = self._spread(road.x_px[:, np.maximum(rows, goal_top).astype(int)])
        wanted = np.clip(np.maximum(source_rows, source_top), 0, ROWS_PX - 1)
        source = self._spread(frame.x_px[:, wanted.astype(int)])

        x, y = _source_grid(affine)
        row = np.clip(np.round(y).astype(int), 0, ROWS_PX - 1)
        goal_at, source_at = goal[:, row], source[:, row]
        source_x = source_at[0] + (x - goal_at[0])
        for left in range(len(goal) - 1):
            span = goal_at[left + 1] - goal_at[left]
            share = (x - goal_at[left]) / span
            within = source_at[left] + share * (source_at[left + 1] - source_at[left])
            source_x = np.where(share > 0, within, source_x)
        beyond = x > goal_at[-1]
        source_x = np.where(beyond, source_at[-1] + (x - goal_at[-1]), source_x)
        image = _sampled(frame.bgr, source_x, np.interp(y, rows, source_rows), _border(rng))
        top = goal_top + (frame.top_px - source_top) / stretch
        return Sample(image, *_moved_lanes(goal, top, frame.lane_weight, affine))

    @staticmethod
    def _spread(x_px: NDArray[np.floating]) -> NDArray[np.float64]:
        """Keeps lanes in order and apart on every row, so that the map can be inverted."""
        ramp = MINIMUM_GAP_PX * np.arange(len(x_px))[:, None]
        return np.asarray(np.maximum.accumulate(x_px - ramp, axis=0) + ramp, np.float64)


class Photographer:
    """Another light, lens and sensor; never moves a pixel."""

    def __init__(self, rng: np.random.Generator) -> None:
        shape = (8, INPUT_HEIGHT_PX + 64, INPUT_WIDTH_PX + 64, 3)
        self._noise = rng.integers(-64, 65, shape, np.int8)

    def __call__(
        self, bgr: NDArray[np.uint8], rng: np.random.Generator, *, light: bool
    ) -> NDArray[np.uint8]:
        """A new image; `light` leaves out what hides parts of the road."""
        if not light:
            bgr = self._occlude(bgr, rng)
            bgr = self._shadow(bgr, rng)
        if rng.random() < BONNET_SHARE:
            picture = bgr.astype(np.float32)
            draw_bonnet(picture, rng.uniform(0.04, 0.2), 1.0, rng)
            bgr = np.clip(picture, 0, 255).astype(np.uint8)
        if rng.random() < NIGHT_SHARE:
            bgr = self._night(bgr, rng)
        bgr = cv2.LUT(bgr, self._tone_curve(rng))
        if rng.random() < STRETCH_SHARE:
            bgr = self._stretch(bgr)
        if rng.random() < 0.25:
            grey = cv2.cvtColor(cv2.cvtColor(bgr, cv2.COLOR_BGR2GRAY), cv2.COLOR_GRAY2BGR)
            keep = rng.uniform(0, 0.8)
            bgr = cv2.addWeighted(bgr, keep, grey, 1 - keep, 0)
        if rng.random() < 0.3:
            bgr = cv2.GaussianBlur(bgr, (0, 0), rng.uniform(0.4, 1.4))
        if rng.random() < 0.35:
            bgr = self._add_noise(bgr, rng)
        if rng.random() < 0.25:
            quality = int(rng.integers(10, 85))
            _, coded = cv2.imencode(".jpg", bgr, (cv2.IMWRITE_JPEG_QUALITY, quality))
            bgr = cv2.imdecode(coded, cv2.IMREAD_COLOR)
        return np.asarray(bgr, np.uint8)

    @staticmethod
    def _night(bgr: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        """Darkness, a pool of headlight on the road, and now and then a lamp that dazzles."""
        x = np.arange(0, INPUT_WIDTH_PX, GRID_PX, dtype=np.float32)
        y = np.arange(0, INPUT_HEIGHT_PX, GRID_PX, dtype=np.float32)[:, None]
        middle = rng.normal(320, 50), rng.uniform(230, 330)
        reach = rng.uniform(120, 320), rng.uniform(50, 110)
        pool = np.exp(
            -0.5 * (((x - middle[0]) / reach[0]) ** 2 + ((y - middle[1]) / reach[1]) ** 2)
        )
        exposed = 1.0 if rng.random() < 0.65 else rng.uniform(1.3, 2.5)
        light = exposed * (rng.uniform(0.05, 0.3) + rng.uniform(0.3, 0.9) * pool)
        glow = np.zeros_like(light)
        for _ in range(int(rng.choice(4, p=(0.5, 0.25, 0.15, 0.1)))):
            lamp, size = (rng.uniform(0, INPUT_WIDTH_PX), rng.uniform(110, 230)), rng.uniform(3, 45)
            away = np.hypot(x - lamp[0], y - lamp[1]) / size
            glow += rng.uniform(80, 300) / (1.0 + away**2) * (away < 8)
        size_px = (INPUT_WIDTH_PX, INPUT_HEIGHT_PX)
        shade = cv2.resize(light, size_px)[..., None] * rng.normal(1, 0.08, 3).astype(np.float32)
        lit = bgr * shade + cv2.resize(glow, size_px)[..., None]
        return np.clip(lit, 0, 255).astype(np.uint8)

    @staticmethod
    def _stretch(bgr: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Contrast stretched to the full range in each channel, as photo programs do."""
        low, high = np.percentile(bgr[::4, ::4].reshape(-1, 3), (1, 99), axis=0)
        stretched = (bgr - low) * (255.0 / np.maximum(high - low, 8.0))
        return np.clip(stretched, 0, 255).astype(np.uint8)

    @staticmethod
    def _tone_curve(rng: np.random.Generator) -> NDArray[np.uint8]:
        level = np.linspace(0, 1, 256)[:, None]
        curve = level ** np.exp(rng.normal(0, 0.3)) * rng.normal(1, 0.18) + rng.normal(0, 0.04)
        tinted = curve * rng.normal(1, 0.06, 3)
        return (np.clip(tinted, 0, 1) * 255).astype(np.uint8).reshape(1, 256, 3)

    def _add_noise(self, bgr: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        top, left = rng.integers(0, 64, 2)
        noise = self._noise[int(rng.integers(8)), top:, left:][:INPUT_HEIGHT_PX, :INPUT_WIDTH_PX]
        scaled = cv2.multiply(noise.astype(np.int16), rng.uniform(0.05, 0.45))
        return np.asarray(cv2.add(bgr, scaled, dtype=cv2.CV_8U), np.uint8)

    @staticmethod
    def _shadow(bgr: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        if rng.random() > 0.3:
            return bgr
        dark = cv2.multiply(bgr, rng.uniform(0.35, 0.8))
        mask = np.zeros(bgr.shape[:2], np.uint8)
        for _ in range(int(rng.integers(1, 4))):
            middle = rng.uniform((0, 150), (INPUT_WIDTH_PX, INPUT_HEIGHT_PX))
            corners = middle + rng.normal(0, 1, (5, 2)) * (160, 40)
            cv2.fillConvexPoly(mask, cv2.convexHull(corners.astype(np.int32)), 1)
        return np.where(mask[..., None] > 0, dark, bgr)

    @staticmethod
    def _occlude(bgr: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        """Pastes pieces of the picture elsewhere on the road, and plain boxes."""
        bgr = bgr.copy()
        for _ in range(int(rng.choice(4, p=(0.55, 0.2, 0.15, 0.1)))):
            height, width = int(rng.integers(12, 70)), int(rng.integers(15, 110))
            y, y_from = rng.integers(110, INPUT_HEIGHT_PX - height, 2)
            x, x_from = rng.integers(0, INPUT_WIDTH_PX - width, 2)
            patch = bgr[y_from : y_from + height, x_from : x_from + width].copy()
            if rng.random() < 0.4:
                patch[:] = rng.integers(10, 235, 3)
            bgr[y : y + height, x : x + width] = patch
        return bgr
