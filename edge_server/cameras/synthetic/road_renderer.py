"""A rendered drive along a road: a source of frames with known lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge_server.cameras.frame import Pace
from edge_server.cameras.synthetic.road_objects import draw_roadside, draw_vehicle
from edge_server.cameras.synthetic.road_scene import TEXTURE_MIDDLE, TEXTURE_PX, RoadScene
from edge_server.cameras.synthetic.road_view import fill_polygons, look, marks_ahead, scaled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.cameras.synthetic.road_scene import Line
    from edge_server.cameras.synthetic.road_view import Colour, View

DEFAULT_FPS = 30.0
SPEED_M_S = 25.0

MAX_LANES = 5
FARTHEST_LABEL_M = 150.0
FARTHEST_DASH_M = 130.0
KERB_M = 0.2
SEAM_M, SEAM_REACH_M = 0.06, 90.0
JOINT_M, JOINT_REACH_M = 0.12, 60.0
ARROW_SPACING_M, ARROW_REACH_M = 40.0, 60.0
TEXTURE_ACROSS_M = 7.2
TEXTURE_ALONG_M = 24.0
TEXTURE_FADE_M = 70.0


class SyntheticRoad:
    """Drives along a road at `SPEED_M_S`; a FrameSource.

    The same arguments always give the same images.

    Attributes:
        truth: the lanes of the last image, in the form of `render`: each (N, 2)
            float32 x, y in pixels; empty before the first image.

    Args:
        seed: selects the road.
        fps: frames per second, `DEFAULT_FPS` if None; 0 renders at full speed, with the steps of
            `DEFAULT_FPS`.
        width_px, height_px: of the images.
        frames: number of frames until the drive ends; 0 never ends.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        fps: float | None = None,
        width_px: int = 1280,
        height_px: int = 720,
        frames: int = 0,
    ) -> None:
        rate = DEFAULT_FPS if fps is None else fps
        self.truth: list[NDArray[np.float32]] = []
        self._scene = RoadScene.for_camera(seed)
        self._step_m = SPEED_M_S / (rate or DEFAULT_FPS)
        self._width_px = width_px
        self._height_px = height_px
        self._frames = frames
        self._given = 0
        self._pace = Pace(rate)

    def read(self) -> NDArray[np.uint8] | None:
        """Return the next image, (H, W, 3) uint8 BGR, when it is due; None at the end."""
        if self._frames and self._given >= self._frames:
            return None
        distance_m = self._given * self._step_m
        image, self.truth = render(self._scene, distance_m, self._width_px, self._height_px)
        self._given += 1
        self._pace.wait()
        return image

    def close(self) -> None:
        """Do nothing: the source holds no resources."""


def render(
    scene: RoadScene, distance_m: float, width: int = 1280, height: int = 720
) -> tuple[NDArray[np.uint8], list[NDArray[np.float32]]]:
    """Render one frame of a drive: the same scene and distance always give the same pixels.

    A growing `distance_m` moves the camera along the road: dashes, trees and texture pass by and
    the curvature changes slowly.

    Args:
        scene: the scene to render.
        distance_m: distance driven since the start.
        width, height: of the image in pixels.

    Returns:
        image: (height, width, 3) uint8 BGR.
        lanes: at most five boundaries nearest the vehicle, each (N, 2) float32 x, y in pixels from
            the bottom of the image upwards, including parts hidden by traffic and parts left or
            right of the image.
    """
    view = look(scene.camera, scene.course, distance_m, width, height)
    horizon_row = int(np.clip(np.floor(view.row_px[-1]), 1, height - 1))
    image = np.empty((height, width, 3), np.uint8)
    image[:horizon_row] = cv2.resize(scene.roadside.backdrop, (width, horizon_row))
    ground = image[horizon_row:]
    _paint_ground(image, view, scene, distance_m)
    shade = _ground_brightness(view, scene, distance_m, horizon_row)
    cv2.multiply(ground, cv2.merge((shade, shade, shade)), dst=ground, scale=1 / TEXTURE_MIDDLE)
    draw_roadside(image, view, scene, distance_m)
    for vehicle in sorted(scene.vehicles, key=lambda vehicle: -vehicle.ahead_m):
        draw_vehicle(image, view, vehicle, distance_m)
    lanes = _lane_labels(view, scene.lines)
    if scene.camera.roll_rad:
        image, lanes = _roll(image, lanes, scene.camera.roll_rad)
    return image, lanes


def _spans(
    view: View, starts_m: NDArray[np.float64], length_m: float, reach_m: float
) -> list[NDArray[np.float64]]:
    """Return sample distances of the visible stretches, four per stretch."""
    begin = np.maximum(starts_m, view.z_m[0])
    end = np.minimum(starts_m + length_m, min(reach_m, view.z_m[-1]))
    return [np.linspace(a, b, 4) for a, b in zip(begin, end, strict=True) if b - a > 0.02]


def _paint_ground(
    image: NDArray[np.uint8], view: View, scene: RoadScene, distance_m: float
) -> None:
    """Paint surfaces, seams and markings, without texture or light."""
    _paint_surfaces(image, view, scene)
    _paint_seams(image, view, scene, distance_m)
    for line in scene.lines:
        _paint_line(image, view, line, distance_m)
    if scene.roadside.arrow and scene.lines:
        _paint_arrow(image, view, scene.lines[0].colour, distance_m)


def _paint_surfaces(image: NDArray[np.uint8], view: View, scene: RoadScene) -> None:
    """Paint verge, shoulder, lanes and kerbs."""
    place = scene.roadside
    edges_m = place.edge_left_m, place.edge_right_m
    image[int(np.floor(view.row_px[-1])) :] = np.array(place.verge, np.uint8)
    fill_polygons(image, [view.strip(*edges_m, view.z_m)], place.shoulder)
    if scene.lines:
        outer_m = scene.lines[0].offset_m, scene.lines[-1].offset_m
        fill_polygons(image, [view.strip(*outer_m, view.z_m)], place.asphalt)
    if place.kerb is not None:
        for edge_m in edges_m:
            strip = view.strip(edge_m - KERB_M / 2, edge_m + KERB_M / 2, view.z_m)
            fill_polygons(image, [strip], place.kerb)


def _paint_seams(image: NDArray[np.uint8], view: View, scene: RoadScene, distance_m: float) -> None:
    """Paint tar along the road and joints across it: dark lines that are no lane lines."""
    place = scene.roadside
    tar = scaled(place.asphalt, 0.6)
    near_m = view.z_m[view.z_m < SEAM_REACH_M]
    for offset_m in place.seam_offsets_m:
        strip = view.strip(offset_m - SEAM_M / 2, offset_m + SEAM_M / 2, near_m)
        fill_polygons(image, [strip], tar)
    if place.seam_m:
        starts_m = marks_ahead(view, 0.0, place.seam_m, distance_m, JOINT_REACH_M)
        spans_m = _spans(view, starts_m, JOINT_M, JOINT_REACH_M)
        edges_m = place.edge_left_m, place.edge_right_m
        fill_polygons(image, [view.strip(*edges_m, z_m) for z_m in spans_m], tar)


def _paint_line(image: NDArray[np.uint8], view: View, line: Line, distance_m: float) -> None:
    if line.dash_m >= line.period_m:
        spans = [view.z_m]
    else:
        reach_m = min(FARTHEST_DASH_M, 60.0 * line.period_m)
        starts_m = marks_ahead(view, line.phase_m, line.period_m, distance_m, reach_m)
        spans = _spans(view, starts_m, line.dash_m, reach_m)
    for stroke_m in line.strokes_m:
        left_m = line.offset_m + stroke_m - line.width_m / 2
        fill_polygons(
            image, [view.strip(left_m, left_m + line.width_m, z_m) for z_m in spans], line.colour
        )


def _paint_arrow(image: NDArray[np.uint8], view: View, colour: Colour, distance_m: float) -> None:
    """Paint arrows in the vehicle's lane: markings that are no lane lines."""
    for start_m in marks_ahead(view, 0.0, ARROW_SPACING_M, distance_m, ARROW_REACH_M):
        if start_m > view.z_m[0]:
            shaft = np.array((start_m, start_m + 3.0))
            head = np.array((start_m + 3.0, start_m + 3.0, start_m + 5.0))
            fill_polygons(image, [view.strip(-0.08, 0.08, shaft)], colour)
            fill_polygons(image, [view.project(np.array((-0.4, 0.4, 0.0)), head)], colour)


def _ground_brightness(
    view: View, scene: RoadScene, distance_m: float, horizon_row: int
) -> NDArray[np.uint8]:
    """Return (rows below the horizon, width) uint8, 128 = unchanged; rendered at half size, then
    enlarged."""
    place = scene.roadside
    rows = view.height - horizon_row
    half_width, half_rows = (view.width + 1) // 2, (rows + 1) // 2
    row_px = horizon_row + 2.0 * np.arange(half_rows)
    z_m = np.interp(-row_px, -view.row_px, view.z_m)
    per_metre = TEXTURE_PX / TEXTURE_ACROSS_M
    across_step = (2.0 * per_metre / view.scale_px) * z_m
    across_start = (
        -per_metre * np.interp(z_m, view.z_m, view.centre_m) - across_step * view.width / 4
    )
    columns = np.arange(half_width, dtype=np.float32)
    map_x = across_step.astype(np.float32)[:, None] * columns
    map_x += np.mod(across_start, TEXTURE_PX).astype(np.float32)[:, None]
    along = np.mod((z_m + distance_m) * (TEXTURE_PX / TEXTURE_ALONG_M), TEXTURE_PX)
    map_y = np.repeat(along.astype(np.float32)[:, None], half_width, axis=1)
    shade = cv2.remap(place.texture, map_x, map_y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP)
    # Far away the texture is finer than a pixel; fading it prevents flicker.
    fade = np.clip(1.0 - z_m / TEXTURE_FADE_M, 0.15, 1.0).astype(np.float32)[:, None]
    faded = TEXTURE_MIDDLE + (shade.astype(np.float32) - TEXTURE_MIDDLE) * fade
    brightness = faded.astype(np.uint8)
    if place.tree_spacing_m and place.tree_shadow < 1.0:
        brightness = _cast_tree_shadows(brightness, view, scene, distance_m, horizon_row)
    return np.asarray(cv2.resize(brightness, (view.width, rows)), np.uint8)


def _cast_tree_shadows(
    shade: NDArray[np.uint8], view: View, scene: RoadScene, distance_m: float, horizon_row: int
) -> NDArray[np.uint8]:
    """Add blotches across the road, one cluster per tree, in half-size pixels."""
    place = scene.roadside
    mask = np.zeros_like(shade)
    for tree_m in marks_ahead(view, 0.0, place.tree_spacing_m, distance_m, 80.0):
        seed = abs(round(float(tree_m + distance_m) / place.tree_spacing_m))
        rng = np.random.default_rng(seed)
        for _ in range(10):
            turn = np.linspace(0, 2 * np.pi, 9)[:-1]
            reach = rng.uniform(0.3, 1.8) * rng.uniform(0.6, 1.3, turn.shape)
            z_m = tree_m + rng.uniform(-5, 5) + reach * np.sin(turn)
            if z_m.min() > view.z_m[0]:
                offset_m = rng.uniform(place.edge_left_m - 2, place.edge_right_m) + reach * np.cos(
                    turn
                )
                blotch = (view.project(offset_m, z_m) - (0, horizon_row)) / 2
                fill_polygons(mask, [blotch], (255.0, 255.0, 255.0))
    dark = cv2.multiply(shade, place.tree_shadow)
    return np.asarray(np.where(cv2.blur(mask, (3, 3)) > 127, dark, shade), np.uint8)


def _lane_labels(view: View, lines: tuple[Line, ...]) -> list[NDArray[np.float32]]:
    """Return the nearest visible lines as polylines."""
    z_m = view.z_m[(view.row_px <= view.height) & (view.z_m <= FARTHEST_LABEL_M)]
    bottom_m = np.interp(-float(view.height), -view.row_px, view.z_m)
    z_m = np.append(bottom_m, z_m[z_m > bottom_m])
    lanes = []
    for line in sorted(lines, key=lambda line: abs(line.offset_m))[:MAX_LANES]:
        points = view.project(line.offset_m, z_m)
        inside = (points[:, 0] >= 0) & (points[:, 0] < view.width)
        if inside.sum() >= 2:
            lanes.append(points.astype(np.float32))
    return lanes


def _roll(
    image: NDArray[np.uint8], lanes: list[NDArray[np.float32]], roll_rad: float
) -> tuple[NDArray[np.uint8], list[NDArray[np.float32]]]:
    """Rotate the image about its centre, and the labels with it."""
    height, width = image.shape[:2]
    turn = cv2.getRotationMatrix2D((width / 2, height / 2), -np.degrees(roll_rad), 1.0)
    turned = cv2.warpAffine(image, turn, (width, height), borderMode=cv2.BORDER_REPLICATE)
    matrix, shift = turn[:, :2].astype(np.float32), turn[:, 2].astype(np.float32)
    return turned, [lane @ matrix.T + shift for lane in lanes]
