"""Known roads, seen by known cameras: the truth that geometry is held against."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import cv2
import numpy as np
from hypothesis import strategies as st

from edge_server.lanes.camera_model import CameraModel, Lens, Mounting
from edge_server.lanes.types import Lane
from edge_server.pixels import Colour, ColourMatrix, ColourRange, Image, PixelFormat
from edge_server.tools.road.renderer import render
from edge_server.tools.road.scene import RoadScene

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

ROWS = 72


@dataclass(frozen=True)
class FlatRoad:
    """A clothoid with parallel boundaries, seen by a vehicle on it.

    Attributes:
        offset_m: of the vehicle from the middle of its lane, positive to the left.
        heading_rad: of the vehicle relative to the lane, positive to the left.
        curvature: of the middle of the lane beside the vehicle, 1/m, positive to the left.
        curvature_change: per metre, 1/m2.
    """

    offset_m: float = 0.0
    heading_rad: float = 0.0
    curvature: float = 0.0
    curvature_change: float = 0.0
    width_m: float = 3.6

    def boundary(self, lanes_left: float) -> NDArray[np.float64]:
        """Return ground points (N, 2) of the line so many lanes left of the middle: 0.5 is the ego
        lane's left boundary."""
        along = np.arange(-15.0, 140.0, 0.05)
        heading = along * (self.curvature + 0.5 * self.curvature_change * along)
        middle = np.cumsum(np.stack([np.cos(heading), np.sin(heading)], 1) * 0.05, axis=0)
        middle -= middle[np.argmin(np.abs(along))]
        left = np.stack([-np.sin(heading), np.cos(heading)], 1)
        points = middle + lanes_left * self.width_m * left - (0.0, self.offset_m)
        cos, sin = np.cos(-self.heading_rad), np.sin(-self.heading_rad)
        return points @ np.array([[cos, sin], [-sin, cos]])


def lane_of(
    ground: NDArray[np.float64], camera: CameraModel, score: float = 0.9, rising_1pm: float = 0.0
) -> Lane | None:
    """Return the line as a network gives it: a point in each of 72 rows that show it.

    Args:
        rising_1pm: vertical curvature of the road, of a sag positive.
    """
    ground = ground[ground[:, 0] > camera.mounting.x_m + 1.0]
    pixels = camera.image_of(ground, rising_1pm * (ground[:, 0] - camera.mounting.x_m) ** 2 / 2)
    lens = camera.lens
    inside = (pixels[:, 0] >= 0) & (pixels[:, 0] < lens.width)
    inside &= (pixels[:, 1] >= 0) & (pixels[:, 1] < lens.height)
    pixels = pixels[inside]
    # From the bottom up, as far as the line rises in the picture.
    rising = np.append(True, np.cumprod(np.diff(pixels[:, 1]) < 0).astype(bool))
    pixels = pixels[rising[: len(pixels)]]
    rows = np.linspace(lens.height, 0, ROWS)
    if len(pixels) < 2:
        return None
    rows = rows[(rows < pixels[0, 1]) & (rows > pixels[-1, 1])]
    x = np.interp(-rows, -pixels[:, 1], pixels[:, 0])
    points = np.stack([x, rows], 1).astype(np.float32)
    return Lane(points, score) if len(points) > 1 else None


def lanes_of(
    road: FlatRoad, camera: CameraModel, places: Sequence[float] = (1.5, 0.5, -0.5, -1.5)
) -> list[Lane]:
    """Return the boundaries at `places`, as `FlatRoad.boundary` counts them, that are seen."""
    lanes = [lane_of(road.boundary(place), camera) for place in places]
    return [lane for lane in lanes if lane is not None]


CAMERA = CameraModel(
    Lens("pinhole", 1280, 720, 1150.0, 1145.0, 650.0, 370.0, (-0.24, -0.05, -0.001, 0.0001, 0.02)),
    Mounting(1.4, np.radians(2.0), np.radians(0.5), np.radians(-1.0), -1.5, 0.1),
)


@st.composite
def cameras(draw: st.DrawFn) -> CameraModel:
    """Dashboard cameras, from a narrow lens to a fisheye."""

    def between(low: float, high: float) -> float:
        return draw(st.floats(low, high))

    width, height = draw(st.sampled_from([(1280, 720), (1920, 1080), (1640, 590), (1280, 960)]))
    kind = draw(st.sampled_from(["pinhole", "pinhole", "fisheye"]))
    if kind == "pinhole":
        focal = between(0.75, 1.3) * width
        distortion = (between(-0.25, 0.05), between(-0.05, 0.05), 0.001, -0.001, 0.0)
    else:
        focal = between(0.4, 0.6) * width
        distortion = (between(-0.05, 0.08), between(-0.01, 0.01), 0.001, 0.0)
    lens = Lens(
        kind,
        width,
        height,
        focal,
        focal * between(0.98, 1.02),
        width * between(0.48, 0.52),
        height * between(0.45, 0.55),
        distortion,
    )
    return CameraModel(
        lens,
        Mounting(
            between(1.1, 2.5),
            np.radians(between(-2.0, 6.0)),
            np.radians(between(-3.0, 3.0)),
            np.radians(between(-4.0, 4.0)),
            between(-2.0, 1.0),
            between(-0.3, 0.3),
        ),
    )


@st.composite
def flat_roads(draw: st.DrawFn) -> FlatRoad:
    """Roads of motorways and country, with a vehicle that keeps its lane."""
    bend = 1.0 / draw(st.floats(150.0, 3000.0)) * draw(st.sampled_from([-1.0, 0.0, 1.0]))
    return FlatRoad(
        draw(st.floats(-0.7, 0.7)),
        np.radians(draw(st.floats(-2.0, 2.0))),
        bend,
        draw(st.floats(-2e-5, 2e-5)),
        draw(st.floats(3.0, 3.9)),
    )


def noisy(lanes: Sequence[Lane], rng: np.random.Generator, std_px: float) -> list[Lane]:
    """Return the lanes with errors across the picture that vary slowly along each line."""
    changed = []
    for lane in lanes:
        white = rng.standard_normal(len(lane.points) + 5)
        slow = np.convolve(white, np.full(6, 6**-0.5), "valid")
        points = lane.points.copy()
        points[:, 0] += std_px * slow
        changed.append(replace(lane, points=points))
    return changed


def as_format(image: np.ndarray, pixel_format: PixelFormat) -> Image:
    """Return the BGR image in another format, BT.601, limited range."""
    if pixel_format is PixelFormat.BGR:
        return Image.of_bgr(image)
    i420 = cv2.cvtColor(image, cv2.COLOR_BGR2YUV_I420)
    height, width = image.shape[:2]
    if pixel_format is PixelFormat.I420:
        return Image.of_packed(pixel_format, i420[..., None])
    luma = i420[:height]
    u, v = i420[height:].reshape(2, height // 2, width // 2)
    if pixel_format is PixelFormat.NV12:
        chroma = np.stack([u, v], -1).reshape(height // 2, width)
        return Image.of_packed(pixel_format, np.concatenate([luma, chroma])[..., None])
    if pixel_format is PixelFormat.YUY2:
        packed = np.empty((height, width, 2), np.uint8)
        packed[..., 0] = luma
        packed[:, 0::2, 1] = np.repeat(u, 2, axis=0)
        packed[:, 1::2, 1] = np.repeat(v, 2, axis=0)
        return Image.of_packed(pixel_format, packed)
    full = Colour(ColourMatrix.BT601, ColourRange.FULL)
    return Image.of_packed(
        PixelFormat.GREY, cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)[..., None], full
    )


def bent_lines(
    seed: int, distance_m: float = 0.0, *, bare: bool = False
) -> tuple[np.ndarray, CameraModel, list[Lane], list[np.ndarray]]:
    """Return a picture, its camera, lines as of a network whose horizon is 6 px too high, and the
    truth on their rows."""
    scene = RoadScene.for_camera(seed)
    scene = replace(scene, vehicles=(), lines=() if bare else scene.lines)
    image, _ = render(scene, distance_m)
    _, lines = render(RoadScene.for_camera(seed), distance_m)
    focal, horizon = scene.camera.focal * 1280, scene.camera.horizon * 720
    lens = Lens("pinhole", 1280, 720, focal, focal, 1280 / 2, horizon, (0.0,) * 5)
    camera = CameraModel(lens, Mounting(scene.camera.height_m))
    lanes, truth = [], []
    for line in lines:
        rows = np.linspace(720, 0, 72)
        rows = rows[(rows < line[0, 1]) & (rows > max(line[-1, 1], horizon + 15))]
        x = np.interp(rows, line[::-1, 1], line[::-1, 0])
        outwards = np.sign(x[0] - 1280 / 2) * 6.0 * (720 - rows) / (720 - horizon)
        inside = (x >= 0) & (x < 1280)
        truth.append(x[inside])
        lanes.append(Lane(np.stack([x + outwards, rows], 1)[inside].astype(np.float32), 0.9))
    return image, camera, lanes, truth
