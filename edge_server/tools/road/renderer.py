"""A drive along a rendered road with departures, lane changes and braking; its truth is known."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

import cv2
import numpy as np

from edge_server.cameras.frame import Recording
from edge_server.tools.road.scene import (
    CLEAR,
    FARTHEST_M,
    TEXTURE_MIDDLE,
    TEXTURE_PX,
    Pose,
    RoadScene,
    fill_polygons,
    look,
    marks_ahead,
    scaled,
)
from edge_server.tools.road.variants import varied
from edge_server.tools.road.weather import expose

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from numpy.typing import NDArray

    from edge_server.tools.road.scene import Branch, Colour, DrawnVehicle, Line, Roadside, View

SPEED_MPS = 25.0
HALF_WIDTH_M = 0.95  # of the vehicle

# Every cycle has the same manoeuvres.
_CYCLE_S = 60.0
_FIRST_DEPARTURE_S, _SECOND_DEPARTURE_S = 8.0, 20.0
_CHANGE_S, _CHANGE_BACK_S = 32.0, 44.0
_CHANGE_TAKES_S = 4.5
_DEPARTURE_TAKES_S = 7.0
_BEYOND_M = 0.25  # a departure takes the wheels so far over the boundary
_BRAKING_S, _BRAKING_TAKES_S = 54.0, 2.5
_BRAKING_PITCH_RAD = math.radians(1.2)


@dataclass(frozen=True)
class Truth:
    """Where the vehicle is in its lane; axes as in ISO 8855, see `lanes.types.Ego`.

    Attributes:
        offset_m: from the middle of the lane in which the vehicle's middle is, positive to the
            left.
        heading_rad: positive where the vehicle points to the left of the lane's direction.
        curvature_1pm: positive bends to the left.
        width_m: of that lane.
        departing: the side on which a wheel is beyond the boundary without a lane change.
        changing: the side to which the vehicle changes its lane.
    """

    offset_m: float
    heading_rad: float
    curvature_1pm: float
    width_m: float
    departing: Literal["none", "left", "right"]
    changing: Literal["none", "left", "right"]


class Drive:
    """A vehicle on a scene's road: where it stands at each time.

    Args:
        scene: with at least two lanes.
        manoeuvres: in every minute two departures, a lane change and the change back, and braking;
            without them the vehicle keeps its lane.
    """

    def __init__(self, scene: RoadScene, *, manoeuvres: bool) -> None:
        self._scene = scene
        self._manoeuvres = manoeuvres
        offsets = [-line.offset_m for line in scene.lines]  # left first, positive to the left
        self._lines_m = offsets
        right_of = next(place for place, left_m in enumerate(offsets) if left_m < 0)
        self._lane_m = offsets[right_of - 1] - offsets[right_of]
        # A lane beside the vehicle's, on the left if there is one.
        self._to = 1.0 if right_of > 1 else -1.0

    @staticmethod
    def distance_m(time_s: float) -> float:
        """Return how far the vehicle has gone."""
        return SPEED_MPS * time_s

    def pose(self, time_s: float) -> Pose:
        """Return how the vehicle stands on the road."""
        if not self._manoeuvres:
            return Pose()
        left_m, after_s = self._left_m(time_s), time_s + 0.01
        # The renderer's middle of the lane is to the right by the pose and to the left by the sway.
        aside_m = self._left_m(after_s) - left_m + self._sway_m(time_s) - self._sway_m(after_s)
        heading_rad = math.atan(aside_m / (SPEED_MPS * 0.01))
        braking = _bump(time_s % _CYCLE_S - _BRAKING_S, _BRAKING_TAKES_S)
        return Pose(left_m, heading_rad, _BRAKING_PITCH_RAD * braking)

    def _sway_m(self, time_s: float) -> float:
        course = self._scene.course
        wave = 2 * math.pi * self.distance_m(time_s) / course.sway_wavelength_m
        return course.sway_m * math.sin(wave)

    def truth(self, time_s: float) -> Truth:
        """Return where the vehicle is in its lane."""
        course, pose = self._scene.course, self.pose(time_s)
        distance_m = self.distance_m(time_s)
        left_m = pose.left_m - self._sway_m(time_s)
        place = int(np.searchsorted([-line_m for line_m in self._lines_m], -left_m))
        upper_m, lower_m = self._lines_m[place - 1], self._lines_m[place]
        wave = 2 * math.pi * distance_m / course.curvature_wavelength_m + course.curvature_phase
        phase_s = time_s % _CYCLE_S
        changes = self._manoeuvres and any(
            begin <= phase_s <= begin + _CHANGE_TAKES_S for begin in (_CHANGE_S, _CHANGE_BACK_S)
        )
        side: Literal["none", "left", "right"] = "none"
        if upper_m - left_m < HALF_WIDTH_M:
            side = "left"
        elif left_m - lower_m < HALF_WIDTH_M:
            side = "right"
        back = phase_s >= _CHANGE_BACK_S
        to_left = (self._to > 0) != back
        return Truth(
            offset_m=left_m - (upper_m + lower_m) / 2,
            heading_rad=pose.heading_rad + course.heading_rad,
            curvature_1pm=-course.curvature_per_m * math.sin(wave),
            width_m=upper_m - lower_m,
            departing="none" if changes else side,
            changing=("left" if to_left else "right") if changes else "none",
        )

    def _left_m(self, time_s: float) -> float:
        """Return how far left of its first lane's middle the vehicle is."""
        phase_s = time_s % _CYCLE_S
        change = _ramp(phase_s - _CHANGE_S, _CHANGE_TAKES_S)
        change -= _ramp(phase_s - _CHANGE_BACK_S, _CHANGE_TAKES_S)
        swerve = _bump(phase_s - _FIRST_DEPARTURE_S, _DEPARTURE_TAKES_S)
        swerve -= _bump(phase_s - _SECOND_DEPARTURE_S, _DEPARTURE_TAKES_S)
        reach_m = self._lane_m / 2 - HALF_WIDTH_M + _BEYOND_M
        return self._to * (self._lane_m * change + reach_m * swerve)


def _ramp(passed_s: float, takes_s: float) -> float:
    """Return 0 before, 1 after, and smoothly between."""
    share = min(max(passed_s / takes_s, 0.0), 1.0)
    return share**3 * (10 - 15 * share + 6 * share**2)


def _bump(passed_s: float, takes_s: float) -> float:
    """Return 1 in the middle of `takes_s`, 0 outside."""
    third_s = takes_s / 3
    return _ramp(passed_s, third_s) - _ramp(passed_s - 2 * third_s, third_s)


TREE_VIEW_M = 220.0
POST_SPACING_M, POST_VIEW_M = 4.0, 60.0


def draw_roadside(
    image: NDArray[np.uint8], view: View, scene: RoadScene, distance_m: float
) -> None:
    """Draw barriers along the pavement's edges and trees behind them, far ones first."""
    place = scene.roadside
    if place.tree_spacing_m:
        _draw_trees(image, view, place, distance_m)
    edges_m = place.edge_left_m - 0.3, place.edge_right_m + 0.3
    for edge_m, height_m in zip(edges_m, place.barrier_height_m, strict=True):
        if height_m:
            if place.rail:
                posts_m = marks_ahead(view, 0.0, POST_SPACING_M, distance_m, POST_VIEW_M)
                _draw_rail(image, view, (edge_m, height_m), place.barrier, posts_m)
                continue
            foot, top = view.project(edge_m, view.z_m), view.project(edge_m, view.z_m, height_m)
            fill_polygons(image, [np.concatenate((foot, top[::-1]))], place.barrier)
            ledge = view.project(edge_m, view.z_m, 0.85 * height_m)
            fill_polygons(image, [np.concatenate((ledge, top[::-1]))], scaled(place.barrier, 1.15))


def _draw_rail(
    image: NDArray[np.uint8],
    view: View,
    place_m: tuple[float, float],
    colour: Colour,
    posts_m: NDArray[np.float64],
) -> None:
    """Draw a rail on posts, at an offset and of a height."""
    edge_m, height_m = place_m
    for post_m in posts_m:
        if post_m > view.z_m[0]:
            at = np.array((post_m, post_m + 0.15))
            foot, top = view.project(edge_m, at), view.project(edge_m, at, height_m)
            fill_polygons(image, [np.concatenate((foot, top[::-1]))], scaled(colour, 0.6))
    for low, high, tone in ((0.55, 1.0, 1.0), (0.72, 0.84, 0.8)):
        below = view.project(edge_m, view.z_m, low * height_m)
        above = view.project(edge_m, view.z_m, high * height_m)
        fill_polygons(image, [np.concatenate((below, above[::-1]))], scaled(colour, tone))


class Tree(NamedTuple):
    """A trunk and crowns, the same in every frame.

    Attributes:
        side: 1 to the right of the road, -1 to its left.
        beside_m: from the pavement's edge.
        crowns: of each, how far aside and above in heights of the tree, its radius, and its tone.
    """

    side: int
    beside_m: float
    height_m: float
    green: NDArray[np.float64]
    crowns: tuple[tuple[float, float, float, float], ...]


@lru_cache(maxsize=1024)
def _tree(number: int) -> Tree:
    rng = np.random.default_rng(number)
    side = 1 if rng.random() < 0.5 else -1
    beside_m, height_m = rng.uniform(5, 16), rng.uniform(2.5, 6.0)
    green = rng.uniform(0.7, 1.1) * np.array((45.0, 85.0, 62.0))
    crowns = tuple(
        (rng.uniform(-0.3, 0.3), rng.uniform(0.8, 1.3), rng.uniform(0.3, 0.5), tone)
        for tone in (0.75, 0.9, 1.05)
    )
    return Tree(side, beside_m, height_m, green, crowns)


def _draw_trees(image: NDArray[np.uint8], view: View, place: Roadside, distance_m: float) -> None:
    ahead_m = marks_ahead(view, 0.0, place.tree_spacing_m, distance_m, TREE_VIEW_M)[::-1]
    ahead_m = ahead_m[(view.z_m[0] < ahead_m) & (ahead_m < view.z_m[-1])]
    numbers = [round(each / place.tree_spacing_m) for each in (ahead_m + distance_m).tolist()]
    trees = [_tree(abs(number)) for number in numbers]
    edges_m = {1: place.edge_right_m, -1: place.edge_left_m}
    offsets_m = np.array([edges_m[tree.side] + tree.side * tree.beside_m for tree in trees])
    feet = view.project(offsets_m, ahead_m)
    for tree, tree_m, foot in zip(trees, ahead_m, feet, strict=True):
        metre_px, height_m = view.scale_px / tree_m, tree.height_m
        if abs(foot[0] - view.width / 2) > 0.5 * view.width + 2 * height_m * metre_px:
            continue
        trunk = np.array(((-0.15, 0), (0.15, 0), (0.15, -height_m), (-0.15, -height_m)))
        fill_polygons(image, [foot + trunk * metre_px], (45.0, 60.0, 75.0))
        for aside, above, share, tone in tree.crowns:
            x, y = foot + metre_px * height_m * np.array((aside, -above))
            radius = max(int(metre_px * height_m * share), 1)
            colour = tuple(tree.green * tone)
            cv2.circle(image, (int(x), int(y)), radius, colour, -1, cv2.LINE_AA)


def vehicle_outlines(
    view: View, vehicle: DrawnVehicle, distance_m: float
) -> list[NDArray[np.float64]]:
    """Return what is drawn of a vehicle, each (4, 2) px, also where nearer ones hide it: its shadow
    on the road, its visible side, and what its rear consists of. Empty where it is not in view."""
    rear_m = vehicle.ahead_m + vehicle.swing_m * np.sin(distance_m / 95.0 + vehicle.ahead_m)
    front_m = rear_m + 2.4 * vehicle.width_m
    if not view.z_m[0] < rear_m or front_m > view.z_m[-1]:
        return []
    half_m = vehicle.width_m / 2
    left_m, right_m = vehicle.lane_m - half_m, vehicle.lane_m + half_m
    ends = np.array((rear_m - 0.3, front_m))
    shadow = view.strip(left_m - 0.25, right_m + 0.25, ends)
    [[middle_px, _]] = view.project(vehicle.lane_m, np.array((rear_m,)))
    side_m = right_m if middle_px < view.width / 2 else left_m
    # Upright rectangles: from left to right, from and up to these parts of the vehicle's height.
    faces = np.array(
        (
            (left_m + 0.05, right_m - 0.05, 0.0, 0.2),
            (left_m, right_m, 0.13, 0.62),
            (left_m + 0.12, right_m - 0.12, 0.6, 1.0),
            (left_m + 0.25, right_m - 0.25, 0.64, 0.93),
            (left_m + 0.05, left_m + 0.05 + 0.25, 0.42, 0.55),
            (right_m - 0.3, right_m - 0.3 + 0.25, 0.42, 0.55),
            (side_m, side_m, 0.12, 0.95),
            (side_m, side_m, 0.12, 0.85),
        )
    )
    at_m = np.full((len(faces), 4), rear_m)
    at_m[-1] = front_m
    up_m = faces[:, (2, 2, 3, 3)] * vehicle.height_m
    *rear, near, far = view.project(faces[:, (0, 1, 1, 0)], at_m, up_m)
    return [shadow, np.stack((near[0], far[0], far[2], near[2])), *rear]


def draw_vehicle(
    image: NDArray[np.uint8], view: View, vehicle: DrawnVehicle, distance_m: float
) -> None:
    """Draw the rear of a box, its visible side, and the shadow under it."""
    body, lamp = np.array(vehicle.colour), (40.0, 40.0, 190.0)
    # As `vehicle_outlines` has them: shadow, side; underside, boot, cabin, window and two lamps.
    colours = [(28.0, 28.0, 30.0), 0.65 * body, np.full(3, 18.0), body, 0.92 * body]
    colours += [(60.0, 52.0, 46.0), lamp, lamp]
    outlines = vehicle_outlines(view, vehicle, distance_m)
    for outline, colour in zip(outlines, colours, strict=False):
        fill_polygons(image, [outline], tuple(np.clip(colour, 0, 255)))


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
        fps: frames per second, `DEFAULT_FPS` if None; 0 is lock-step, see `Pace`, with the steps of
            `DEFAULT_FPS`.
        width, height: of the images in pixels.
        frames: number of frames until the drive ends; 0 never ends.
        manoeuvres: departures, lane changes and braking; see `Drive`.
        conditions: names of `road_variants.VARIANTS`; a clear motorway if empty.
    """
    rate = fps or DEFAULT_FPS
    step_s = 1 / rate

    def images() -> Generator[NDArray[np.uint8], None, None]:
        scene = RoadScene.for_camera(seed)
        if conditions:
            scene = varied(scene, conditions, seed)
        drive = Drive(scene, manoeuvres=manoeuvres)
        for number in range(frames) if frames else itertools.count():
            time_s = number * step_s
            distance_m, pose = drive.distance_m(time_s), drive.pose(time_s)
            view = look(scene.camera, scene.course, distance_m, width, height, pose=pose)
            yield draw(view, scene, distance_m)

    return Recording(images(), rate, lockstep=fps == 0)


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
    image = draw(view, scene, distance_m)
    return image, lane_labels(view, scene.lines, scene.branches, distance_m)


def draw(view: View, scene: RoadScene, distance_m: float) -> NDArray[np.uint8]:
    """Return the image of `render`, (height, width, 3) uint8 BGR, of a view of its scene."""
    image = paint_backdrop(view, scene.roadside)
    paint_surfaces(image, view, scene)
    for line in scene.lines:
        paint_line(image, view, line, distance_m)
    for branch in scene.branches:
        paint_branch(image, view, scene, branch, distance_m)
    shade_ground(image, view, ground_texture(view, scene.roadside, distance_m))
    draw_roadside(image, view, scene, distance_m)
    for vehicle in sorted(scene.vehicles, key=attrgetter("ahead_m"), reverse=True):
        draw_vehicle(image, view, vehicle, distance_m)
    if scene.conditions == CLEAR:
        return image
    return expose(image, view, scene, distance_m)


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
) -> NDArray[np.float64]:
    """Return sample distances of the visible stretches, (N, 4)."""
    begin = np.maximum(starts_m, view.z_m[0])
    end = np.minimum(starts_m + length_m, min(reach_m, view.z_m[-1]))
    seen = end - begin > 0.02
    return np.linspace(begin[seen], end[seen], 4, axis=-1)


def paint_surfaces(image: NDArray[np.uint8], view: View, scene: RoadScene) -> None:
    """Paint verge, shoulder and lanes."""
    place = scene.roadside
    edges_m = place.edge_left_m, place.edge_right_m
    ground = int(np.floor(view.row_px[-1])) if view.bend is None else horizon_row(view)
    # By rows: numpy fills a picture pixel by pixel many times more slowly.
    image[ground:] = np.tile(np.array(place.verge, np.uint8), (view.width, 1))
    fill_polygons(image, [view.strip(*edges_m, view.z_m)], place.shoulder)
    if scene.lines:
        outer_m = scene.lines[0].offset_m, scene.lines[-1].offset_m
        fill_polygons(image, [view.strip(*outer_m, view.z_m)], place.asphalt)


def paint_line(image: NDArray[np.uint8], view: View, line: Line, distance_m: float) -> None:
    """Paint the strokes of one line."""
    if line.dash_m >= line.period_m:
        stretches = view.z_m[None]
    else:
        reach_m = min(FARTHEST_DASH_M, 60.0 * line.period_m)
        starts_m = marks_ahead(view, line.phase_m, line.period_m, distance_m, reach_m)
        stretches = spans(view, starts_m, line.dash_m, reach_m)
    for stroke_m in line.strokes_m:
        left_m = line.offset_m + stroke_m - line.width_m / 2
        worn = line.missing and len(stretches)
        kept = _what_is_left(view, line, stretches, distance_m) if worn else [stretches]
        strips = [view.strip(left_m, left_m + line.width_m, z_m) for z_m in kept]
        fill_polygons(image, itertools.chain(*strips), line.colour)


def _what_is_left(
    view: View, line: Line, stretches: NDArray[np.float64], distance_m: float
) -> list[NDArray[np.float64]]:
    """Return the stretches without the patches that are gone: small ones, and whole lengths; each
    array has stretches of as many samples, (N, S)."""
    begins, ends, far = [], [], []
    for stretch in stretches:
        reach_m = min(float(stretch[-1]), WORN_VIEW_M)
        first = np.floor((distance_m + stretch[0]) / PATCH_M)
        number = np.arange(first, np.ceil((distance_m + reach_m) / PATCH_M))
        chance = 0.5 * _chance(number, line.phase_m) + 0.5 * _chance(number // 16, line.phase_m)
        begin = np.maximum(number * PATCH_M - distance_m, stretch[0])
        end = np.minimum((number + 1) * PATCH_M - distance_m, reach_m)
        kept = (chance > line.missing) & (end - begin > 0.02)
        begins.append(begin[kept])
        ends.append(end[kept])
        if stretch[-1] > reach_m:
            far.append(np.append(reach_m, view.z_m[view.z_m > reach_m])[None])
    patches = np.linspace(np.concatenate(begins), np.concatenate(ends), 3, axis=-1)
    return [patches, *far]


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
    z_m = view.z_m[view.z_m <= FARTHEST_LABEL_M]
    if view.bend is None:
        bottom_m = np.interp(-float(view.height), -view.row_px, view.z_m)
        z_m = np.append(bottom_m, z_m[z_m > bottom_m])
    lanes = []
    for line in sorted(lines, key=lambda line: abs(line.offset_m))[:MAX_LANES]:
        points = view.project(_inner_m(view, line), z_m)
        if view.bend is not None:
            points = _up_to_the_turn(view, points)
        inside = (points[:, 0] >= 0) & (points[:, 0] < view.width)
        if inside.sum() >= 2:
            lanes.append(points.astype(np.float32))
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


def _up_to_the_turn(view: View, points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the points of a line in a tight bend, from the picture's lower edge to where it turns
    back; none where it is below the picture."""
    falls = np.append(np.diff(points[:, 1]) < -1e-3, True)
    first = int(np.argmax(points[:, 1] <= view.height))
    if points[first, 1] > view.height:
        return points[:0]
    if first:
        (x0, y0), (x1, y1) = points[first - 1], points[first]
        share = (view.height - y0) / min(y1 - y0, -1e-6)
        points[first - 1] = x0 + share * (x1 - x0), view.height
        first -= 1
    rest = points[first:]
    return rest[: len(rest) if falls[first:].all() else int(np.argmin(falls[first:])) + 1]
