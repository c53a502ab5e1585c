"""Rendered roads are repeatable, coherent, and their labels lie on the paint."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from edge_server.tools.road.renderer import render, vehicle_outlines
from edge_server.tools.road.scene import RoadScene, look

SEEDS = range(6)


def test_the_same_seed_and_distance_give_the_same_pixels() -> None:
    first, lanes = render(RoadScene.for_camera(3), 120.0, 320, 180)
    second, again = render(RoadScene.for_camera(3), 120.0, 320, 180)
    np.testing.assert_array_equal(first, second)
    for lane, same in zip(lanes, again, strict=True):
        np.testing.assert_array_equal(lane, same)


def test_other_seeds_give_other_roads() -> None:
    first, _ = render(RoadScene.for_camera(1), 0.0, 320, 180)
    second, _ = render(RoadScene.for_camera(2), 0.0, 320, 180)
    assert (first != second).mean() > 0.5


def test_rendering_changes_no_scene() -> None:
    scene = RoadScene.for_camera(5)
    before, _ = render(scene, 10.0, 320, 180)
    render(scene, 500.0, 320, 180)
    after, _ = render(scene, 10.0, 320, 180)
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("size", [(1280, 720), (640, 360), (321, 181)])
def test_the_image_has_the_requested_size(size: tuple[int, int]) -> None:
    image, _ = render(RoadScene.for_camera(0), 0.0, *size)
    assert image.shape == (size[1], size[0], 3)
    assert image.dtype == np.uint8


@pytest.mark.parametrize("seed", SEEDS)
def test_a_camera_sees_three_or_four_lines(seed: int) -> None:
    _, lanes = render(RoadScene.for_camera(seed), 40.0)
    assert 3 <= len(lanes) <= 4


@pytest.mark.parametrize("seed", SEEDS)
def test_labels_lie_on_the_paint_of_solid_lines(seed: int) -> None:
    scene = RoadScene.for_camera(seed)
    image, lanes = render(scene, 0.0)
    by_distance = sorted(scene.lines, key=lambda line: abs(line.offset_m))
    brightness = image.max(axis=2).astype(int)
    checked = 0
    for line, lane in zip(by_distance, lanes, strict=False):
        near = lane[(lane[:, 1] > 0.52 * 720) & (lane[:, 1] < 719)]
        near = near[(near[:, 0] > 60) & (near[:, 0] < 1220)].round().astype(int)
        if line.dash_m < line.period_m or len(near) < 4:
            continue
        on_paint = brightness[near[:, 1], near[:, 0]]
        beside = brightness[near[:, 1], near[:, 0] - 40]
        assert np.median(on_paint - beside) > 40
        checked += 1
    assert checked


def test_dashes_come_towards_the_camera() -> None:
    scene = RoadScene.for_camera(0)
    nearest = sorted(scene.lines, key=lambda line: abs(line.offset_m))
    place, dashed = next((i, line) for i, line in enumerate(nearest) if line.dash_m < line.period_m)

    def along_the_line(distance_m: float) -> np.ndarray:
        image, lanes = render(scene, distance_m)
        points = lanes[place][(lanes[place][:, 1] < 715) & (lanes[place][:, 1] > 400)]
        rows, columns = points[:, 1].round().astype(int), points[:, 0].round().astype(int)
        return image[rows, columns.clip(0, 1279)].max(axis=1).astype(float)

    start = along_the_line(0.0)
    assert start.max() - start.min() > 60
    one_period_on = np.abs(along_the_line(dashed.period_m) - start).mean()
    half_a_period_on = np.abs(along_the_line(dashed.period_m / 2) - start).mean()
    assert half_a_period_on > 2 * one_period_on


def test_a_drive_is_smooth() -> None:
    scene = RoadScene.for_camera(4)
    tracks = [render(scene, float(distance), 320, 180)[1] for distance in range(0, 60, 2)]
    for before, after in itertools.pairwise(tracks):
        assert len(before) == len(after)
        for lane, moved in zip(before, after, strict=True):
            assert abs(lane[0, 0] - moved[0, 0]) < 6


@pytest.mark.parametrize("seed", SEEDS)
def test_a_vehicle_is_drawn_within_its_outlines_and_reaches_their_edges(seed: int) -> None:
    scene = RoadScene.for_camera(seed)
    for vehicle in scene.vehicles:
        alone = replace(scene, vehicles=(vehicle,))
        with_it, without = (
            render(each, 40.0)[0].astype(int) for each in (alone, replace(alone, vehicles=()))
        )
        view = look(scene.camera, scene.course, 40.0, 1280, 720)
        shadow, *body = vehicle_outlines(view, vehicle, 40.0)
        rows, columns = np.nonzero(np.abs(with_it - without).max(axis=2) > 12)
        drawn = np.array((columns.min(), rows.min(), columns.max(), rows.max()))
        points = np.concatenate((shadow, *body))
        low, high = points.min(axis=0), points.max(axis=0)
        assert (drawn[:2] >= low - 2).all()
        assert (drawn[2:] <= high + 2).all()
        # Its shadow is darker than any road; what it is made of may be as grey as what is behind.
        np.testing.assert_allclose(drawn[3], high[1], atol=3)
