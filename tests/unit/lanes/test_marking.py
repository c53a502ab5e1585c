"""Type and colour of markings, on rendered roads whose paint is known, in each pixel format."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import cv2
import numpy as np
import pytest

from edge_server.lanes.camera_model import CameraModel, Lens, Mounting
from edge_server.lanes.road_geometry import road_of
from edge_server.lanes.tracking import (
    NO_EVIDENCE,
    MarkingEvidence,
    accumulated,
    color_of,
    marking_evidence,
    type_of,
    with_markings,
)
from edge_server.lanes.types import Lane
from edge_server.pixels import Colour, ColourMatrix, ColourRange, Image, PixelFormat
from edge_server.tools.road.renderer import render
from edge_server.tools.road.scene import RoadScene, look

WIDTH, HEIGHT = 1280, 720


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
    evidence = marking_evidence(lanes, Image.of_bgr(bare), camera)
    assert all(type_of(each.solid) == "unknown" for each in evidence)
    grey = Image.grey(PixelFormat.NV12, WIDTH, HEIGHT)
    assert marking_evidence(lanes, grey, camera) == [NO_EVIDENCE] * len(lanes)


def test_lanes_without_ground_stay_as_they_are() -> None:
    _, image, camera, lanes = scene_and_lanes(3, 0.0)
    bare = tuple(replace(lane, ground=None) for lane in lanes)
    assert with_markings(bare, Image.of_bgr(image), camera) == bare
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
