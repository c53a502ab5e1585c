"""Rendered roads with the boxes of their vehicles and the area that a vehicle can drive on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import cv2
import numpy as np

from edge_server.lanes.decode import INPUT_WIDTH_PX
from edge_server.tools.road.renderer import branch_spans, vehicle_outlines
from edge_server.tools.road.scene import RoadScene, fill_polygons, look
from edge_server.tools.road.weather import draw_bonnet
from lane_training.anchors import INPUT_HEIGHT_PX
from lane_training.augment import Photographer
from lane_training.roads import LONGEST_DRIVE_M, TrainingRoad, render_road, sample_road

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.tools.road.scene import Conditions, View

LABELS = "car", "lorry"
LORRY_HEIGHT_M = 2.3
# A vehicle of which less can be seen, or that is smaller in the network's input, is neither a
# vehicle nor background.
LEAST_SEEN = 0.35
LEAST_PX = 4.0
INPUT_PX = 320, 192
# The map of the drivable area has cells of so many pixels of the input.
CELL_PX = 4
MOST_VEHICLES = 8
CAMERA_SHARE = 0.25


@dataclass(frozen=True)
class RoadTruth:
    """What is in a rendered picture.

    Attributes:
        boxes: (N, 4) float64, x_min, y_min, x_max, y_max in px, cut at the picture's edges.
        classes: (N,) int64 of `LABELS`; -1 for a vehicle that is hardly seen.
        drivable: (height, width) bool, whether the pavement is seen there.
    """

    boxes: NDArray[np.float64]
    classes: NDArray[np.int64]
    drivable: NDArray[np.bool_]


def truth_of(scene: RoadScene, distance_m: float, width: int, height: int) -> RoadTruth:
    """Return what `render` draws of the vehicles and the pavement; both without roll."""
    view = look(scene.camera, scene.course, distance_m, width, height)
    place = scene.roadside
    outer_m = place.edge_left_m, place.edge_right_m
    drivable = _filled(view, [view.strip(*outer_m, view.z_m)])
    for branch in scene.branches:
        for z_m in branch_spans(view, branch, distance_m):
            _, edge_m = branch.edges_m(np.mod(distance_m + z_m - branch.at_m, branch.period_m))
            drivable |= _filled(view, [view.strip(branch.line.offset_m, edge_m, z_m)])
    if scene.conditions.bonnet:
        drivable &= ~_under_bonnet(view, scene.conditions)
    boxes, classes = [], []
    hidden = np.zeros_like(drivable)
    for vehicle in sorted(scene.vehicles, key=lambda each: each.ahead_m):
        outlines = vehicle_outlines(view, vehicle, distance_m)[1:]
        if not outlines:
            continue
        corners = np.concatenate(outlines)
        corners = np.stack((corners.min(axis=0), corners.max(axis=0)))
        cut = np.clip(corners, 0.0, (width, height))
        sides = np.ptp(cut, axis=0)
        if sides.min() <= 0:
            continue
        mask = _filled(view, outlines)
        seen = np.count_nonzero(mask & ~hidden) / max(np.count_nonzero(mask), 1)
        seen *= sides.prod() / np.ptp(corners, axis=0).prod()
        hidden |= mask
        small = (sides * INPUT_PX < LEAST_PX * np.array((width, height))).any()
        boxes.append(cut.reshape(4))
        is_lorry = vehicle.height_m > LORRY_HEIGHT_M
        classes.append(-1 if small or seen < LEAST_SEEN else int(is_lorry))
    return RoadTruth(
        np.array(boxes, np.float64).reshape(-1, 4),
        np.array(classes, np.int64),
        drivable & ~hidden,
    )


def _filled(view: View, outlines: list[NDArray[np.float64]]) -> NDArray[np.bool_]:
    mask = np.zeros((view.height, view.width), np.uint8)
    fill_polygons(mask, outlines, (255.0, 255.0, 255.0))
    return mask > 127


def _under_bonnet(view: View, weather: Conditions) -> NDArray[np.bool_]:
    """Return where `expose` draws the bonnet."""
    picture = np.full((view.height, view.width, 3), 255.0, np.float32)
    draw_bonnet(picture, weather.bonnet, 0.0, np.random.default_rng(weather.seed))
    return picture[..., 0] < 250


class RoadSample(NamedTuple):
    """A picture as the network sees it, with its truth.

    Attributes:
        bgr: (192, 320, 3) uint8.
        boxes: (8, 5) float32, x_min, y_min, x_max, y_max in px of `bgr`, and the class; -2 where
            there is no vehicle.
        drivable: (48, 80) bool.
    """

    bgr: NDArray[np.uint8]
    boxes: NDArray[np.float32]
    drivable: NDArray[np.bool_]


def sample(seed: int) -> RoadSample:
    """Return a random road in random light; the same seed always gives the same."""
    rng = np.random.default_rng(seed)
    if rng.random() < CAMERA_SHARE:
        scene = RoadScene.for_camera(int(rng.integers(1 << 31)))
    else:
        scene = level(sample_road(rng))
    distance_m = rng.uniform(0, LONGEST_DRIVE_M)
    image, _ = render_road(scene, distance_m, INPUT_WIDTH_PX, INPUT_HEIGHT_PX)
    truth = truth_of(scene, distance_m, INPUT_WIDTH_PX, INPUT_HEIGHT_PX)
    image = _photographer()(image, rng, light=True)
    how = cv2.INTER_LINEAR if rng.random() < 0.5 else cv2.INTER_AREA
    boxes = np.full((MOST_VEHICLES, 5), -2.0, np.float32)
    count = len(truth.boxes)
    scale = INPUT_PX[0] / INPUT_WIDTH_PX, INPUT_PX[1] / INPUT_HEIGHT_PX
    boxes[:count, :4], boxes[:count, 4] = truth.boxes * (scale * 2), truth.classes
    cells = INPUT_PX[0] // CELL_PX, INPUT_PX[1] // CELL_PX
    covered = cv2.resize(truth.drivable.astype(np.float32), cells, interpolation=cv2.INTER_AREA)
    return RoadSample(cv2.resize(image, INPUT_PX, interpolation=how), boxes, covered > 0.5)


@lru_cache(maxsize=1)
def _photographer() -> Photographer:
    # It makes its noise once, which takes longer than a road.
    return Photographer(np.random.default_rng(0))


def level(scene: RoadScene) -> RoadScene:
    """Return the scene without roll, which `truth_of` does not know."""
    return replace(scene, roll_rad=0.0) if isinstance(scene, TrainingRoad) else scene
