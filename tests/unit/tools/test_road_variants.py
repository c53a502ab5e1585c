"""Other roads, light and weather: repeatable, and the labels still lie on the paint."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from edge_server.tools.road.renderer import lane_labels, render
from edge_server.tools.road.scene import (
    CLEAR,
    Conditions,
    Course,
    PinholeCamera,
    Pose,
    RoadScene,
    look,
)
from edge_server.tools.road.variants import VARIANTS, varied

WEATHER = {"night", "rain", "wet", "snow", "sun", "tunnel", "bonnet", "sensor"}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_condition_is_seen_and_repeatable(name: str) -> None:
    clear = RoadScene.for_camera(4)
    scene = varied(clear, (name,), 4)
    image, lanes = render(scene, 50.0, 320, 180)
    again, same = render(varied(clear, (name,), 4), 50.0, 320, 180)
    np.testing.assert_array_equal(image, again)
    assert len(lanes) == len(same)
    assert image.shape == (180, 320, 3)
    assert (image != render(clear, 50.0, 320, 180)[0]).mean() > 0.001
    for lane in lanes:
        assert (np.diff(lane[:, 1]) < 0).all()
        assert lane[:, 1].max() <= 180 + 1e-3


@pytest.mark.parametrize("name", sorted(WEATHER))
def test_weather_moves_no_line(name: str) -> None:
    clear = RoadScene.for_camera(5)
    _, lanes = render(varied(clear, (name,), 5), 80.0, 320, 180)
    for lane, same in zip(lanes, render(clear, 80.0, 320, 180)[1], strict=True):
        np.testing.assert_array_equal(lane, same)


def test_without_a_name_the_day_is_clear() -> None:
    clear = RoadScene.for_camera(1)
    assert clear.conditions == CLEAR == Conditions()
    image, _ = render(varied(clear, (), 1), 0.0, 320, 180)
    np.testing.assert_array_equal(image, render(clear, 0.0, 320, 180)[0])


def test_night_is_dark_but_for_the_headlights() -> None:
    scene = varied(RoadScene.for_camera(2), ("night",), 2)
    image, _ = render(scene, 30.0, 640, 360)
    sky, road = image[:80], image[260:330, 240:400]
    assert sky.mean() < 45
    assert np.percentile(road, 90) > 1.5 * np.percentile(sky, 90)


@pytest.mark.parametrize(
    ("name", "seed"), [*itertools.product(("bend", "fork", "merge", "crest", "left"), (1, 3))]
)
def test_labels_lie_on_the_paint(name: str, seed: int) -> None:
    scene = varied(RoadScene.for_camera(seed), (name,), seed)
    brightness_gained = []
    for distance_m in (0.0, 90.0, 180.0):
        image, lanes = render(scene, distance_m)
        brightness = image.max(axis=2).astype(int)
        for lane in lanes:
            near = lane[(lane[:, 1] > 0.58 * 720) & (lane[:, 1] < 719)]
            near = near[(near[:, 0] > 60) & (near[:, 0] < 1220)].round().astype(int)
            if len(near) > 6:
                on_paint = brightness[near[:, 1], near[:, 0]]
                beside = brightness[near[:, 1], near[:, 0] - 40]
                brightness_gained.append(np.percentile(on_paint - beside, 80))
    # Dashed lines have paint on a quarter of their length.
    assert np.median(brightness_gained) > 40


def test_a_double_line_is_labelled_at_its_stroke_nearer_to_the_vehicle() -> None:
    """On either side of it, as people label it."""
    scene = RoadScene.for_camera(3)
    line = replace(scene.lines[0], strokes_m=(-0.2, 0.2))
    for pose, stroke_m in ((Pose(), 0.2), (Pose(left_m=-2 * line.offset_m), -0.2)):
        view = look(scene.camera, scene.course, 0.0, 1280, 720, pose=pose)
        (lane,) = lane_labels(view, (line,))
        stroke = view.project(line.offset_m + stroke_m, view.z_m)
        at_label = np.interp(-lane[:, 1], -stroke[:, 1], stroke[:, 0])
        np.testing.assert_allclose(lane[:, 0], at_label, atol=1.0)


def test_a_tight_bend_is_a_circle_on_the_ground() -> None:
    """A line beside the middle of a road of constant curvature has its own radius."""
    radius_m, aside_m = 30.0, 1.75
    camera = PinholeCamera(0.6, 0.4, 1.4)
    # A quarter of a very long wave from its beginning: the curvature hardly changes.
    course = Course(1 / radius_m, 1e6, np.pi / 2, 0.0, 0.0, 0.0, 100.0, tight=True)
    view = look(camera, course, 0.0, 1280, 720)
    along_m = np.linspace(6.0, 33.0, 15)
    points = view.project(aside_m, along_m)
    ahead_m = view.scale_px * camera.height_m / (points[:, 1] - camera.horizon * 720)
    right_m = (points[:, 0] - 640) * ahead_m / view.scale_px
    from_centre_m = np.hypot(right_m - radius_m, ahead_m)
    np.testing.assert_allclose(from_centre_m, radius_m - aside_m, atol=0.02)


def test_a_gentle_bend_is_the_same_by_either_projection() -> None:
    camera = PinholeCamera(0.9, 0.42, 1.4)
    views = [
        look(camera, Course(1e-3, 900.0, 0.4, 0.0, 0.0, 0.1, 200.0, tight=tight), 50.0, 1280, 720)
        for tight in (False, True)
    ]
    along_m = np.linspace(8.0, 60.0, 20)
    plain, tight = (view.project(1.8, along_m) for view in views)
    np.testing.assert_allclose(plain, tight, atol=3.0)


def test_a_fork_leaves_the_road_once_in_a_period() -> None:
    scene = varied(RoadScene.for_camera(20), ("fork",), 20)
    [branch] = scene.branches
    phase_m = np.linspace(0, branch.length_m, 50)
    inner_m, outer_m = branch.edges_m(phase_m)
    assert outer_m[0] == pytest.approx(branch.line.offset_m)
    width_m = np.abs(outer_m - inner_m)[np.isfinite(inner_m)]
    np.testing.assert_allclose(width_m, branch.lane_m)
    away_m = branch.side * (inner_m[-1] - branch.line.offset_m)
    assert away_m == pytest.approx(branch.away_m)
    counts = {len(render(scene, float(d), 320, 180)[1]) for d in range(0, 260, 20)}
    assert len(counts) > 1
