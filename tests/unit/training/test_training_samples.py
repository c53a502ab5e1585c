"""What a training image's label says, before any network sees it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
from lane_training.augment import LABEL_ROWS_PX, Photographer, Sample, ground_warp, labels_on_rows
from lane_training.frames import frame_from_polylines, on_paint, polyline, taught_frame
from lane_training.overlays import draw_curves, show_samples

from edge_server.tools.road.renderer import render
from edge_server.tools.road.scene import RoadScene

if TYPE_CHECKING:
    from pathlib import Path

    from lane_training.frames import RoadFrame

ROWS = [float(y) for y in range(160, 720, 10)]


def test_a_lane_goes_on_below_its_label_but_not_below_a_fork() -> None:
    line = np.array([[300.0, 250.0], [300.0, 150.0]])
    to_the_bottom = np.array([[100.0, 355.0], [300.0, 150.0]])
    for begins in (False, True):
        labels, weights = labels_on_rows([line, to_the_bottom], begin_in_picture=begins)
        np.testing.assert_array_equal(weights, [1, 1, 0, 0, 0])
        # The one that begins nearest to the middle comes first.
        assert np.isnan(labels[0][LABEL_ROWS_PX > 251]).all() == begins
        assert np.isfinite(labels[1][LABEL_ROWS_PX > 151]).all()
        assert np.isnan(labels[:, LABEL_ROWS_PX < 149]).all()


def test_a_warped_image_keeps_what_its_label_does_not_know() -> None:
    lanes = [np.array([[x, 260.0], [x, 539.0]]) for x in (300.0, 600.0)]
    uncertain = [np.array([[800.0, 260.0], [800.0, 539.0]])]
    picture = np.zeros((540, 960, 3), np.uint8)
    frame = frame_from_polylines(picture, lanes, uncertain, complete=False, own_lane=True)
    sample = ground_warp(frame, np.random.default_rng(1), 0.3)
    assert (sample.complete, sample.own_lane) == (False, True)
    assert sorted(sample.lane_weight) == [0, 0, 0, 1, 1]
    bottoms = sample.x_px[:, 0]
    assert bottoms[sample.lane_weight == 1].max() < bottoms[:3].max()
    assert np.isnan(sample.vanishing_px).all()


def drawn_road() -> tuple[np.ndarray, list[list[float]]]:
    """A rendered road, 960x540, and its three nearest lines at `ROWS` of 1280x720."""
    image, lines = render(RoadScene.for_camera(7), 40.0)
    lanes = [
        np.interp(ROWS, line[::-1, 1], line[::-1, 0], -2.0, -2.0).tolist() for line in lines[:3]
    ]
    small = cv2.resize(image, (960, 540), interpolation=cv2.INTER_AREA)
    return np.asarray(small, np.uint8), lanes


def off_px(frame: RoadFrame, truth: RoadFrame) -> list[float]:
    """How far labels lie from the truth on the rows of both, median of each lane."""
    rows = np.arange(int(truth.top_px.max()) + 6, 500)
    return np.median(np.abs(frame.x_px - truth.x_px)[:, rows], axis=1).tolist()


def test_labels_beside_the_paint_move_onto_it_and_others_stay() -> None:
    bgr, lanes = drawn_road()
    points = [polyline(lane, ROWS) for lane in lanes]
    truth = frame_from_polylines(bgr, points)
    beside = frame_from_polylines(bgr, [line + np.array([4.0, 0.0]) for line in points])
    moved = on_paint(beside)
    assert max(off_px(moved, truth)) < 0.7
    assert min(off_px(beside, truth)) == pytest.approx(4.0, abs=0.01)
    assert moved.lane_weight.tolist() == beside.lane_weight.tolist()
    bare = frame_from_polylines(np.full_like(bgr, 90), points)
    np.testing.assert_array_equal(on_paint(bare).x_px, bare.x_px)
    assert not on_paint(bare, only_painted=True).lane_weight.any()
    # One line alone does not show how large the road is.
    alone = frame_from_polylines(bgr, [points[0] + np.array([4.0, 0.0])])
    np.testing.assert_array_equal(on_paint(alone).x_px, alone.x_px)


def test_lanes_of_networks_that_bend_away_from_the_paint_lie_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lane_training.frames.PLAUSIBLE_HORIZON", (0.3, 0.6))
    bgr, lanes = drawn_road()
    truth = frame_from_polylines(bgr, [polyline(lane, ROWS) for lane in lanes[:2]])
    bend_px = 12.0 * np.maximum(0.0, (500.0 - np.array(ROWS)) / 200.0)
    bent = [{"x": np.where(np.array(lane) > 0, lane + bend_px, -2.0)} for lane in lanes[:2]]
    frame = taught_frame(bgr, {"lanes": bent, "h_samples": ROWS}, (0, 0))
    assert frame is not None
    assert max(off_px(frame, truth)) < 1.0
    assert taught_frame(np.full_like(bgr, 90), {"lanes": bent, "h_samples": ROWS}, (0, 0)) is None


def test_light_moves_no_pixel_of_a_line() -> None:
    """A bright upright line is the brightest column of each row, whatever the light."""
    picture = np.full((360, 640, 3), 60, np.uint8)
    cv2.line(picture, (320, 0), (320, 359), (235, 235, 235), 9)
    rng = np.random.default_rng(3)
    photograph = Photographer(rng)
    for _ in range(40):
        seen = cv2.GaussianBlur(photograph(picture, rng, light=True), (0, 0), 3).max(axis=2)
        around = seen[260:330, 280:360].astype(int).sum(axis=0)
        assert abs(int(np.argmax(around)) + 280 - 320) <= 8


def test_pictures_for_people_are_drawn(tmp_path: Path) -> None:
    samples = Sample(
        np.zeros((360, 640, 3), np.uint8),
        *labels_on_rows([np.array([[320.0, 359.0], [320.0, 200.0]])]),
    )
    show_samples(tmp_path / "batch.png", itertools.repeat(samples), 6)
    batch = cv2.imread(str(tmp_path / "batch.png"))
    assert batch.shape == (2 * 360, 4 * 640, 3)
    assert batch[300, 320].any()
    names = ("class", "offset")
    draw_curves(tmp_path / "none.png", [(1, 2.0, 3.0)], names)
    assert not (tmp_path / "none.png").exists()
    draw_curves(tmp_path / "curves.png", [(s, 1 / s, 2 / s) for s in range(1, 50)], names)
    picture = cv2.imread(str(tmp_path / "curves.png"))
    assert (picture < 255).any(axis=2).mean() == pytest.approx(0.02, abs=0.015)
