"""What a training image's label says, before any network sees it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
from lane_training.augment import LABEL_ROWS_PX, Photographer, Sample, ground_warp, labels_on_rows
from lane_training.frames import frame_from_polylines
from lane_training.overlays import draw_curves, show_samples

if TYPE_CHECKING:
    from pathlib import Path


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
