"""The confidence script finds a known distortion of probabilities, and edits the configuration."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from calibrate_confidence import (
    RENDERED_SEED,
    expected_calibration_error,
    far_from_left_out,
    fit,
    is_same,
    labels_of,
    read_parameters,
    with_parameters,
)
from evaluate_lane_model import HARD_SEED, Label, LabelError, hard_labels

from edge_server.lanes.decode import calibrated_confidence

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("temperature", "bias"), [(1.0, 0.0), (2.0, 0.5), (0.6, -0.7)])
def test_a_known_distortion_is_found(temperature: float, bias: float) -> None:
    rng = np.random.default_rng(4)
    scores = rng.uniform(0.3, 0.999, 20_000)
    chance = calibrated_confidence(scores, temperature, bias).astype(np.float64)
    right = rng.random(len(scores)) < chance
    found = fit(scores, right)
    assert found == pytest.approx((temperature, bias), abs=0.08)
    after = expected_calibration_error(calibrated_confidence(scores, *found), right)
    assert after < 0.015
    if temperature != 1.0:
        assert expected_calibration_error(scores, right) > 0.05


def test_a_score_that_says_nothing_keeps_its_order() -> None:
    scores = np.linspace(0.4, 0.99, 400)
    temperature, bias = fit(scores, np.arange(400) % 2 == 0)
    confidence = calibrated_confidence(scores, temperature, bias)
    assert (np.diff(confidence) >= 0).all()


def test_the_mapping_can_be_undone() -> None:
    scores = np.linspace(0.05, 0.98, 50)
    there = calibrated_confidence(scores, 1.7, 0.4)
    np.testing.assert_allclose(calibrated_confidence(there, 1 / 1.7, -0.4 * 1.7), scores, atol=1e-5)


def test_parameters_are_replaced_and_nothing_else() -> None:
    text = 'name: "lane_decode"\nparameters { key: "max_lanes" value { string_value: "5" } }\n'
    assert read_parameters(text) == (1.0, 0.0)
    once = with_parameters(text, (1.25, -0.5))
    assert read_parameters(once) == (1.25, -0.5)
    twice = with_parameters(once, (0.9, 0.1))
    assert read_parameters(twice) == (0.9, 0.1)
    assert twice.startswith(text)
    assert twice.count("confidence_bias") == 1


def test_frames_beside_those_that_training_saw_do_not_count() -> None:
    numbers = [100, 200, 230, 900]
    every = [
        json.dumps({"image": f"{n}.jpg", "raw_file": f"clips/0313-1/{n}/20.jpg"}) for n in numbers
    ]
    labels = [Label(f"{n}.jpg", np.zeros(1), np.zeros((1, 1))) for n in (230, 900)]
    assert [label.image for label in far_from_left_out(labels, every)] == ["900.jpg"]


def test_an_empty_line_is_no_label_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    label = '{"raw_file": "1.jpg", "h_samples": [1, 2], "lanes": [[1, 2]]}\n'
    file.write_text(f"{label}\n{label}")
    assert len(labels_of(file, None)[1]) == 2
    file.write_text(f"{label}no label\n")
    with pytest.raises(LabelError, match=r"labels\.jsonl:2: not JSON"):
        labels_of(file, range(1))


def test_a_lane_is_right_within_the_threshold_on_most_labelled_rows() -> None:
    rows = np.arange(300.0, 700.0, 10.0)
    line = np.where(rows > 400, 640.0, -2.0)
    assert is_same(rows, np.full(len(rows), 655.0), line)
    assert not is_same(rows, np.full(len(rows), 665.0), line)
    part = np.where(rows > 480, 640.0, np.nan)
    assert not is_same(rows, part, line)


def test_the_roads_to_fit_on_are_not_those_that_figures_are_of() -> None:
    fitted, measured = (hard_labels(1, seed)[0] for seed in (RENDERED_SEED, HARD_SEED))
    assert not np.array_equal(fitted.bgr(), measured.bgr())
    assert np.array_equal(hard_labels(1)[0].bgr(), measured.bgr())
