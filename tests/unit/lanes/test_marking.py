"""Type and colour of markings, on rendered roads whose paint is known, in each pixel format."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
from unit.lanes.roads import as_format

from edge_server.lanes.camera_model import CameraModel, Lens, Mounting
from edge_server.lanes.paint import (
    NO_EVIDENCE,
    MarkingEvidence,
    accumulated,
    color_of,
    on_paint,
    type_of,
)
from edge_server.lanes.road_geometry import road_of
from edge_server.lanes.types import Lane
from edge_server.pixels import Image, PixelFormat
from edge_server.tools.road.renderer import render
from edge_server.tools.road.scene import RoadScene, look

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 1280, 720


def with_markings(lanes: Sequence[Lane], image: Image, camera: CameraModel) -> tuple[Lane, ...]:
    """Return the lanes with what this frame shows of their paint."""
    return on_paint(lanes, image, camera)[1]


def scene_and_lanes(
    seed: int, distance_m: float
) -> tuple[RoadScene, np.ndarray, CameraModel, tuple[Lane, ...]]:
    """Return a rendered road and its lanes on the ground, two px beside the truth."""
    scene = RoadScene.for_camera(seed)
    focal = scene.camera.focal * WIDTH
    lens = Lens(
        *("pinhole", WIDTH, HEIGHT, focal, focal, WIDTH / 2),
        scene.camera.horizon * HEIGHT,
        (0.0,) * 5,
    )
    camera = CameraModel(lens, Mounting(scene.camera.height_m))
    image, truth = render(scene, distance_m)
    rng = np.random.default_rng(seed)
    lanes = []
    for points in truth:
        rows = np.linspace(HEIGHT, 0, 72)
        rows = rows[(rows < points[0, 1]) & (rows > points[-1, 1])]
        x = np.interp(-rows, -points[:, 1], points[:, 0]) + rng.normal(0.0, 2.0)
        inside = (x >= 0) & (x < WIDTH)
        lanes.append(Lane(np.stack([x, rows], 1)[inside].astype(np.float32), 0.9))
    return scene, image, camera, road_of(lanes, camera).lanes


@pytest.mark.parametrize("seed", [0, 3, 7, 11])
def test_the_paint_of_a_rendered_road_is_seen(seed: int) -> None:
    found: Counter[tuple[str, bool]] = Counter()
    for distance_m in (0.0, 40.0):
        scene, image, camera, lanes = scene_and_lanes(seed, distance_m)
        middle_m = look(scene.camera, scene.course, distance_m, WIDTH, HEIGHT).centre_m[0]
        for lane in with_markings(lanes, Image.of_bgr(image), camera):
            if lane.ground is None:
                continue
            y_m = lane.ground.polynomial.coefficients[0]
            line = min(scene.lines, key=lambda each: abs(each.offset_m + middle_m + y_m))
            solid = "solid" if line.dash_m >= line.period_m else "dashed"
            yellow = "yellow" if line.colour[0] < 150 else "white"
            found["type", lane.type == solid] += 1
            found["color", lane.color == yellow] += 1
            # Nothing is called what it is not.
            assert lane.type in (solid, "unknown")
            assert lane.color in (yellow, "unknown")
    assert found["type", True] >= 6
    assert found["color", True] >= 6


@pytest.mark.parametrize("pixel_format", list(PixelFormat))
def test_every_pixel_format_shows_the_same_paint(pixel_format: PixelFormat) -> None:
    seeds = (seed for seed in range(40) if RoadScene.for_camera(seed).lines[0].colour[0] < 150)
    _, image, camera, lanes = scene_and_lanes(next(seeds), 0.0)
    expected = with_markings(lanes, Image.of_bgr(image), camera)
    assert {lane.color for lane in expected} >= {"white", "yellow"}
    seen = with_markings(lanes, as_format(image, pixel_format), camera)
    assert [lane.type for lane in seen] == [lane.type for lane in expected]
    if pixel_format is PixelFormat.GREY:
        assert {lane.color for lane in seen} == {"unknown"}
    else:
        assert [lane.color for lane in seen] == [lane.color for lane in expected]


def test_a_picture_that_its_decoder_made_smaller_shows_the_same_paint() -> None:
    _, image, camera, lanes = scene_and_lanes(7, 0.0)
    half = cv2.resize(image, (WIDTH // 2, HEIGHT // 2), interpolation=cv2.INTER_AREA)
    whole, smaller = (with_markings(lanes, Image.of_bgr(each), camera) for each in (image, half))
    assert {lane.type for lane in whole} >= {"solid", "dashed"}
    assert [(lane.type, lane.color) for lane in smaller] == [
        (lane.type, lane.color) for lane in whole
    ]


def test_a_road_without_paint_shows_nothing() -> None:
    scene, _, camera, lanes = scene_and_lanes(3, 0.0)
    bare, _ = render(replace(scene, lines=()), 0.0)
    for picture in (Image.of_bgr(bare), Image.grey(PixelFormat.NV12, WIDTH, HEIGHT)):
        seen = with_markings(lanes, picture, camera)
        assert {lane.type for lane in seen} == {"unknown"}
        assert {lane.color for lane in seen} == {"unknown"}


def test_lanes_above_the_horizon_and_none_show_nothing() -> None:
    _, image, camera, lanes = scene_and_lanes(3, 0.0)
    above = [replace(lane, points=lane.points * (1.0, 0.3)) for lane in lanes]
    seen = with_markings(above, Image.of_bgr(image), camera)
    assert {(lane.solid_evidence, lane.yellow_evidence) for lane in seen} == {(0.0, 0.0)}
    assert with_markings((), Image.of_bgr(image), camera) == ()


def test_frames_add_up_and_a_marking_that_changes_is_noticed() -> None:
    evidence = NO_EVIDENCE
    for _ in range(4):
        assert type_of(evidence.solid) == "unknown"
        evidence = accumulated(evidence, MarkingEvidence(0.9, -0.9))
    assert (type_of(evidence.solid), color_of(evidence.yellow)) == ("solid", "white")
    # One frame behind a lorry changes nothing; a line that ends is another one after some.
    for _ in range(100):
        evidence = accumulated(evidence, MarkingEvidence(4.0, 0.0))
    evidence = accumulated(evidence, MarkingEvidence(-4.0, 0.0))
    assert type_of(evidence.solid) == "solid"
    assert color_of(evidence.yellow) == "unknown"
    for _ in range(10):
        evidence = accumulated(evidence, MarkingEvidence(-2.0, 0.0))
    assert type_of(evidence.solid) == "dashed"
