"""Rendered training roads have labels that a network can learn from."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from lane_training.roads import clear_road, render_road, road_in, sample_road


@pytest.mark.parametrize("seed", range(20))
def test_labels_run_upwards_from_the_bottom_without_crossing(seed: int) -> None:
    scene = clear_road(np.random.default_rng(seed))
    _, lanes = render_road(scene, 70.0, 640, 360)
    assert len(lanes) <= 5
    for lane in lanes:
        assert lane.dtype == np.float32
        assert lane.shape[1] == 2
    if scene.roll_rad:
        return
    bottoms = [float(lane[0, 0]) for lane in lanes]
    in_order = [lanes[i] for i in np.argsort(bottoms)]
    for lane in in_order:
        assert lane[0, 1] == pytest.approx(360, abs=0.5)
        assert (np.diff(lane[:, 1]) < 0).all()
    for left, right in itertools.pairwise(in_order):
        np.testing.assert_allclose(left[:, 1], right[:, 1], atol=1e-3)
        assert (right[:, 0] > left[:, 0]).all()


@pytest.mark.parametrize("seed", range(30))
def test_a_road_in_any_conditions_has_labels_that_run_upwards(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scene = sample_road(rng)
    image, lanes = render_road(scene, 70.0, 640, 360)
    assert image.shape == (360, 640, 3)
    assert len(lanes) <= 5
    for lane in lanes:
        assert np.isfinite(lane).all()
        assert getattr(scene, "roll_rad", 0.0) or (np.diff(lane[:, 1]) < 0).all()


@pytest.mark.parametrize("name", ["night", "rain", "bend", "fork"])
def test_a_hard_road_has_a_line(name: str) -> None:
    for seed in range(5):
        scene = road_in((name,), np.random.default_rng(seed))
        assert len(render_road(scene, 70.0, 640, 360)[1]) >= 1


def test_some_training_roads_have_no_line() -> None:
    counts = [len(sample_road(np.random.default_rng(seed)).lines) for seed in range(60)]
    assert 0 < counts.count(0) < 20
    assert max(counts) >= 4
