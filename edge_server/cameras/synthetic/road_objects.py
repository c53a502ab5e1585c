"""Objects on and beside a rendered road: barriers, trees and vehicles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge_server.cameras.synthetic.road_view import fill_polygons, marks_ahead, scaled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.cameras.synthetic.road_scene import DrawnVehicle, RoadScene
    from edge_server.cameras.synthetic.road_view import Colour, View

TREE_VIEW_M = 220.0
POST_SPACING_M, POST_VIEW_M = 4.0, 60.0


def draw_roadside(
    image: NDArray[np.uint8], view: View, scene: RoadScene, distance_m: float
) -> None:
    """Draw barriers along the pavement's edges and trees behind them, far ones first."""
    place = scene.roadside
    if place.tree_spacing_m:
        ahead = marks_ahead(view, 0.0, place.tree_spacing_m, distance_m, TREE_VIEW_M)
        for tree_m in ahead[::-1]:
            if view.z_m[0] < tree_m < view.z_m[-1]:
                number = round(float(tree_m + distance_m) / place.tree_spacing_m)
                _draw_tree(image, view, scene, tree_m, number)
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


def _draw_tree(
    image: NDArray[np.uint8], view: View, scene: RoadScene, tree_m: float, number: int
) -> None:
    """Draw a trunk and three crowns; the tree's number fixes side, size and colour in every
    frame."""
    rng = np.random.default_rng(abs(number))
    place = scene.roadside
    side = 1 if rng.random() < 0.5 else -1
    edge_m = place.edge_right_m if side > 0 else place.edge_left_m
    offset_m = edge_m + side * rng.uniform(5, 16)
    size_m = rng.uniform(2.5, 6.0)
    metre_px = view.scale_px / tree_m
    foot = view.project(offset_m, np.array((tree_m,)))[0]
    if abs(foot[0] - view.width / 2) > 0.5 * view.width + 2 * size_m * metre_px:
        return
    trunk = np.array(((-0.15, 0), (0.15, 0), (0.15, -size_m), (-0.15, -size_m)))
    fill_polygons(image, [foot + trunk * metre_px], (45.0, 60.0, 75.0))
    green = rng.uniform(0.7, 1.1) * np.array((45.0, 85.0, 62.0))
    for tone in (0.75, 0.9, 1.05):
        aside, above = rng.uniform(-0.3, 0.3), rng.uniform(0.8, 1.3)
        x, y = foot + metre_px * size_m * np.array((aside, -above))
        radius = max(int(metre_px * size_m * rng.uniform(0.3, 0.5)), 1)
        cv2.circle(image, (int(x), int(y)), radius, tuple(green * tone), -1, cv2.LINE_AA)


def draw_vehicle(
    image: NDArray[np.uint8], view: View, vehicle: DrawnVehicle, distance_m: float
) -> None:
    """Draw the rear of a box, its visible side, and the shadow under it."""
    rear_m = vehicle.ahead_m + vehicle.swing_m * np.sin(distance_m / 95.0 + vehicle.ahead_m)
    front_m = rear_m + 2.4 * vehicle.width_m
    if not view.z_m[0] < rear_m or front_m > view.z_m[-1]:
        return
    half_m = vehicle.width_m / 2
    left_m, right_m = vehicle.lane_m - half_m, vehicle.lane_m + half_m
    body = np.array(vehicle.colour)

    def face(z_m: float, a_m: float, b_m: float, low: float, high: float) -> NDArray[np.float64]:
        """Return an upright rectangle, from `low` to `high` of the vehicle's height."""
        at = np.array((z_m, z_m))
        bottom = view.project(np.array((a_m, b_m)), at, low * vehicle.height_m)
        top = view.project(np.array((b_m, a_m)), at, high * vehicle.height_m)
        return np.concatenate((bottom, top))

    def fill(outline: NDArray[np.float64], colour: NDArray[np.float64]) -> None:
        fill_polygons(image, [outline], tuple(np.clip(colour, 0, 255)))

    ends = np.array((rear_m - 0.3, front_m))
    fill(view.strip(left_m - 0.25, right_m + 0.25, ends), np.array((28.0, 28.0, 30.0)))
    [[middle_px, _]] = view.project(vehicle.lane_m, np.array((rear_m,)))
    side_m = right_m if middle_px < view.width / 2 else left_m
    near = face(rear_m, side_m, side_m, 0.12, 0.95)
    far = face(front_m, side_m, side_m, 0.12, 0.85)
    fill(np.stack((near[0], far[0], far[2], near[2])), 0.65 * body)
    fill(face(rear_m, left_m + 0.05, right_m - 0.05, 0.0, 0.2), np.array((18.0, 18.0, 18.0)))
    fill(face(rear_m, left_m, right_m, 0.13, 0.62), body)
    fill(face(rear_m, left_m + 0.12, right_m - 0.12, 0.6, 1.0), 0.92 * body)
    fill(face(rear_m, left_m + 0.25, right_m - 0.25, 0.64, 0.93), np.array((60.0, 52.0, 46.0)))
    for lamp_m in (left_m + 0.05, right_m - 0.3):
        fill(face(rear_m, lamp_m, lamp_m + 0.25, 0.42, 0.55), np.array((40.0, 40.0, 190.0)))
