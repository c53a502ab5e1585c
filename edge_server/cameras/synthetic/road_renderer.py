"""A rendered drive along a road: a source of frames with known lanes."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge_server.cameras.frame import Recording
from edge_server.cameras.synthetic.road_drive import Drive
from edge_server.cameras.synthetic.road_objects import draw_roadside, draw_vehicle
from edge_server.cameras.synthetic.road_scene import TEXTURE_MIDDLE, TEXTURE_PX, RoadScene
from edge_server.cameras.synthetic.road_variants import varied
from edge_server.cameras.synthetic.road_view import FARTHEST_M, fill_polygons, look, marks_ahead
from edge_server.cameras.synthetic.road_weather import expose

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from numpy.typing import NDArray

    from edge_server.cameras.synthetic.road_scene import Branch, Line, Roadside
    from edge_server.cameras.synthetic.road_view import Pose, View

DEFAULT_FPS = 30.0

MAX_LANES = 5
FARTHEST_LABEL_M = 150.0
FARTHEST_DASH_M = 130.0
TEXTURE_ACROSS_M = 7.2
TEXTURE_ALONG_M = 24.0
TEXTURE_FADE_M = 70.0
PATCH_M, WORN_VIEW_M = 1.2, 70.0
BRANCH_POINTS = 40
APART_M = 0.5


def synthetic_road(
    *,
    seed: int = 0,
    fps: float | None = None,
    width: int = 1280,
    height: int = 720,
    frames: int = 0,
    manoeuvres: bool = False,
    conditions: Sequence[str] = (),
) -> Recording:
    """Drive along a road at `SPEED_MPS`; the same arguments always give the same images.

    Args:
        seed: selects the road.
        fps: frames per second, `DEFAULT_FPS` if None; 0 renders at full speed, with the steps of
            `DEFAULT_FPS`.
        width, height: of the images in pixels.
        frames: number of frames until the drive ends; 0 never ends.
        manoeuvres: departures, lane changes and braking; see `Drive`.
        conditions: names of `road_variants.VARIANTS`; a clear motorway if empty.
    """
    rate = DEFAULT_FPS if fps is None else fps
    step_s = 1 / (rate or DEFAULT_FPS)

    def images() -> Generator[NDArray[np.uint8], None, None]:
        scene = RoadScene.for_camera(seed)
        if conditions:
            scene = varied(scene, conditions, seed)
        drive = Drive(scene, manoeuvres=manoeuvres)
        for number in range(frames) if frames else itertools.count():
            time_s = number * step_s
            yield render(scene, drive.distance_m(time_s), width, height, drive.pose(time_s))[0]

    return Recording(images(), rate)


def render(
    scene: RoadScene,
    distance_m: float,
    width: int = 1280,
    height: int = 720,
    pose: Pose | None = None,
) -> tuple[NDArray[np.uint8], list[NDArray[np.float32]]]:
    """Render one frame of a drive: the same scene and distance always give the same pixels.

    A growing `distance_m` moves the camera along the road: dashes, trees and texture pass by and
    the curvature changes slowly.

    Args:
        scene: the scene to render.
        distance_m: distance driven since the start.
        width, height: of the image in pixels.
        pose: of the vehicle; None keeps its lane.

    Returns:
        image: (height, width, 3) uint8 BGR.
        lanes: at most five boundaries nearest the vehicle, each (N, 2) float32 x, y in pixels from
            the bottom of the image upwards, including parts hidden by traffic and parts left or
            right of the image.
    """
    view = look(scene.camera, scene.course, distance_m, width, height, pose=pose)
    image = paint_backdrop(view, scene.roadside)
    paint_surfaces(image, view, scene)
    for line in scene.lines:
        paint_line(image, view, line, distance_m)
    for branch in scene.branches:
        paint_branch(image, view, scene, branch, distance_m)
    shade_ground(image, view, ground_texture(view, scene.roadside, distance_m))
    draw_roadside(image, view, scene, distance_m)
    for vehicle in sorted(scene.vehicles, key=lambda vehicle: -vehicle.ahead_m):
        draw_vehicle(image, view, vehicle, distance_m)
    image = expose(image, view, scene, distance_m)
    return image, lane_labels(view, scene.lines, scene.branches, distance_m)


def horizon_row(view: View) -> int:
    """Return the first image row of the ground."""
    row_px = view.row_px[-1] if view.bend is None else view.horizon_px
    return int(np.clip(np.floor(row_px), 1, view.height - 1))


def paint_backdrop(view: View, roadside: Roadside) -> NDArray[np.uint8]:
    """Return an image with the sky above the horizon, and nothing below yet."""
    image = np.empty((view.height, view.width, 3), np.uint8)
    image[: horizon_row(view)] = cv2.resize(roadside.backdrop, (view.width, horizon_row(view)))
    return image


def spans(
    view: View, starts_m: NDArray[np.float64], length_m: float, reach_m: float
) -> list[NDArray[np.float64]]:
    """Return sample distances of the visible stretches, four per stretch."""
    begin = np.maximum(starts_m, view.z_m[0])
    end = np.minimum(starts_m + length_m, min(reach_m, view.z_m[-1]))
    return [np.linspace(a, b, 4) for a, b in zip(begin, end, strict=True) if b - a > 0.02]


def paint_surfaces(image: NDArray[np.uint8], view: View, scene: RoadScene) -> None:
    """Paint verge, shoulder and lanes."""
    place = scene.roadside
    edges_m = place.edge_left_m, place.edge_right_m
    ground = int(np.floor(view.row_px[-1])) if view.bend is None else horizon_row(view)
    image[ground:] = np.array(place.verge, np.uint8)
    fill_polygons(image, [view.strip(*edges_m, view.z_m)], place.shoulder)
    if scene.lines:
        outer_m = scene.lines[0].offset_m, scene.lines[-1].offset_m
        fill_polygons(image, [view.strip(*outer_m, view.z_m)], place.asphalt)


def paint_line(image: NDArray[np.uint8], view: View, line: Line, distance_m: float) -> None:
    """Paint the strokes of one line."""
    if line.dash_m >= line.period_m:
        stretches = [view.z_m]
    else:
        reach_m = min(FARTHEST_DASH_M, 60.0 * line.period_m)
        starts_m = marks_ahead(view, line.phase_m, line.period_m, distance_m, reach_m)
        stretches = spans(view, starts_m, line.dash_m, reach_m)
    if line.missing:
        stretches = _what_is_left(view, line, stretches, distance_m)
    for stroke_m in line.strokes_m:
        left_m = line.offset_m + stroke_m - line.width_m / 2
        fill_polygons(
            image,
            [view.strip(left_m, left_m + line.width_m, z_m) for z_m in stretches],
            line.colour,
        )


def _what_is_left(
    view: View, line: Line, stretches: list[NDArray[np.float64]], distance_m: float
) -> list[NDArray[np.float64]]:
    """Return the stretches without the patches that are gone: small ones, and whole lengths."""
    left = []
    for stretch in stretches:
        reach_m = min(float(stretch[-1]), WORN_VIEW_M)
        first = np.floor((distance_m + stretch[0]) / PATCH_M)
        number = np.arange(first, np.ceil((distance_m + reach_m) / PATCH_M))
        chance = 0.5 * _chance(number, line.phase_m) + 0.5 * _chance(number // 16, line.phase_m)
        begin = np.maximum(number * PATCH_M - distance_m, stretch[0])
        end = np.minimum((number + 1) * PATCH_M - distance_m, reach_m)
        kept = (chance > line.missing) & (end - begin > 0.02)
        left += [np.linspace(a, b, 3) for a, b in zip(begin[kept], end[kept], strict=True)]
        if stretch[-1] > reach_m:
            left.append(np.append(reach_m, view.z_m[view.z_m > reach_m]))
    return left


def _chance(number: NDArray[np.float64], phase: float) -> NDArray[np.float64]:
    """Return values from 0 to 1 that look random and are the same for the same number."""
    return np.asarray(np.modf(np.abs(np.sin(number * 12.9898 + phase * 78.233)) * 43758.5453)[0])


def branch_spans(view: View, branch: Branch, distance_m: float) -> list[NDArray[np.float64]]:
    """Return sample distances ahead of a branch's visible lengths, and of none that is shorter
    than 5 m."""
    reach_m = min(FARTHEST_LABEL_M, float(view.z_m[-1]))
    found = []
    for start_m in marks_ahead(view, branch.at_m, branch.period_m, distance_m, reach_m):
        begin = max(float(start_m), float(view.z_m[0]))
        end = min(float(start_m) + branch.length_m, reach_m)
        if end - begin > 5.0:
            found.append(np.geomspace(begin, end, BRANCH_POINTS))
    return found


def paint_branch(
    image: NDArray[np.uint8], view: View, scene: RoadScene, branch: Branch, distance_m: float
) -> None:
    """Paint the lane that leaves or joins, and its lines."""
    line = branch.line
    for z_m in branch_spans(view, branch, distance_m):
        inner_m, outer_m = branch.edges_m(np.mod(distance_m + z_m - branch.at_m, branch.period_m))
        road_m = np.full_like(outer_m, line.offset_m + branch.side * line.width_m)
        beyond_m = outer_m + branch.side * 0.8
        fill_polygons(image, [view.strip(road_m, beyond_m, z_m)], scene.roadside.asphalt)
        for edge_m in (inner_m, outer_m):
            there = np.isfinite(edge_m)
            if there.sum() > 1:
                left_m = edge_m[there] - line.width_m / 2
                strip = view.strip(left_m, left_m + line.width_m, z_m[there])
                fill_polygons(image, [strip], line.colour)


def ground_texture(view: View, place: Roadside, distance_m: float) -> NDArray[np.uint8]:
    """Return the brightness of the ground at half the image's size, 128 = unchanged."""
    rows = view.height - horizon_row(view)
    half_width, half_rows = (view.width + 1) // 2, (rows + 1) // 2
    row_px = horizon_row(view) + 2.0 * np.arange(half_rows)
    if view.bend is None:
        z_m = np.interp(-row_px, -view.row_px, view.z_m)
        centre_m = np.interp(z_m, view.z_m, view.centre_m)
    else:
        below_px = np.maximum(row_px - view.horizon_px, 1.0)
        z_m = np.minimum(view.scale_px * view.bend.below_m[0] / below_px, FARTHEST_M)
        centre_m = np.zeros_like(z_m)
    per_metre = TEXTURE_PX / TEXTURE_ACROSS_M
    across_step = (2.0 * per_metre / view.scale_px) * z_m
    across_start = -per_metre * centre_m - across_step * view.width / 4
    columns = np.arange(half_width, dtype=np.float32)
    map_x = across_step.astype(np.float32)[:, None] * columns
    map_x += np.mod(across_start, TEXTURE_PX).astype(np.float32)[:, None]
    along = np.mod((z_m + distance_m) * (TEXTURE_PX / TEXTURE_ALONG_M), TEXTURE_PX)
    map_y = np.repeat(along.astype(np.float32)[:, None], half_width, axis=1)
    shade = cv2.remap(place.texture, map_x, map_y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP)
    # Far away the texture is finer than a pixel; fading it prevents flicker.
    fade = np.clip(1.0 - z_m / TEXTURE_FADE_M, 0.15, 1.0).astype(np.float32)[:, None]
    faded = TEXTURE_MIDDLE + (shade.astype(np.float32) - TEXTURE_MIDDLE) * fade
    return np.asarray(faded, np.uint8)


def shade_ground(image: NDArray[np.uint8], view: View, texture: NDArray[np.uint8]) -> None:
    """Multiply the ground with its brightness."""
    ground = image[horizon_row(view) :]
    shade = cv2.resize(texture, (view.width, len(ground)))
    cv2.multiply(ground, cv2.merge((shade, shade, shade)), dst=ground, scale=1 / TEXTURE_MIDDLE)


def lane_labels(
    view: View,
    lines: tuple[Line, ...],
    branches: tuple[Branch, ...] = (),
    distance_m: float = 0.0,
) -> list[NDArray[np.float32]]:
    """Return the nearest visible lines as polylines; those of branches after those of the road."""
    lanes = _labels_round(view, lines) if view.bend else _labels_ahead(view, lines)
    for branch in branches:
        for z_m in branch_spans(view, branch, distance_m):
            phase_m = np.mod(distance_m + z_m - branch.at_m, branch.period_m)
            inner_m, outer_m = branch.edges_m(phase_m)
            for edge_m in (inner_m, outer_m):
                # Where it is hardly apart from the road's edge, nobody sees two lines.
                there = np.nan_to_num(np.abs(edge_m - branch.line.offset_m)) > APART_M
                points = view.project(edge_m[there], z_m[there])
                points = points[points[:, 1] <= view.height]
                inside = (points[:, 0] >= 0) & (points[:, 0] < view.width)
                if inside.sum() >= 2:
                    lanes.append(points.astype(np.float32))
    return lanes[:MAX_LANES]


def _inner_m(view: View, line: Line) -> float:
    """Where people label a line, sideways from the lane's middle: at a double line's stroke that is
    nearer to the vehicle."""
    vehicle_m = -float(view.centre_m[0])
    strokes_m = (line.offset_m + stroke_m for stroke_m in line.strokes_m)
    return min(strokes_m, key=lambda place_m: abs(place_m - vehicle_m))


def _labels_round(view: View, lines: tuple[Line, ...]) -> list[NDArray[np.float32]]:
    """Return the lines of a tight bend, from the picture's lower edge to where they turn back."""
    lanes = []
    for line in sorted(lines, key=lambda line: abs(line.offset_m))[:MAX_LANES]:
        points = view.project(_inner_m(view, line), view.z_m[view.z_m <= FARTHEST_LABEL_M])
        falls = np.append(np.diff(points[:, 1]) < -1e-3, True)
        first = int(np.argmax(points[:, 1] <= view.height))
        if points[first, 1] > view.height:
            continue
        if first:
            (x0, y0), (x1, y1) = points[first - 1], points[first]
            share = (view.height - y0) / min(y1 - y0, -1e-6)
            points[first - 1] = x0 + share * (x1 - x0), view.height
            first -= 1
        rest = points[first:]
        rest = rest[: len(rest) if falls[first:].all() else int(np.argmin(falls[first:])) + 1]
        inside = (rest[:, 0] >= 0) & (rest[:, 0] < view.width)
        if inside.sum() >= 2:
            lanes.append(rest.astype(np.float32))
    return lanes


def _labels_ahead(view: View, lines: tuple[Line, ...]) -> list[NDArray[np.float32]]:
    z_m = view.z_m[(view.row_px <= view.height) & (view.z_m <= FARTHEST_LABEL_M)]
    bottom_m = np.interp(-float(view.height), -view.row_px, view.z_m)
    z_m = np.append(bottom_m, z_m[z_m > bottom_m])
    lanes = []
    for line in sorted(lines, key=lambda line: abs(line.offset_m))[:MAX_LANES]:
        points = view.project(_inner_m(view, line), z_m)
        inside = (points[:, 0] >= 0) & (points[:, 0] < view.width)
        if inside.sum() >= 2:
            lanes.append(points.astype(np.float32))
    return lanes
