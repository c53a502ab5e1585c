"""The metric gives the numbers that TuSimple's own evaluation gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
from lane_training.tusimple import (
    ImageScore,
    lanes_at,
    lines_hit,
    own_lines,
    score_image,
    summarise,
)
from numpy.typing import NDArray

H_SAMPLES = np.arange(160.0, 720.0, 10.0)
Lanes = NDArray[np.float64]


def upright(*x_px: float) -> Lanes:
    return np.array([np.full(len(H_SAMPLES), x) for x in x_px]).reshape(-1, len(H_SAMPLES))


def published_score(pred: Lanes, gt: Lanes) -> tuple[float, float, float]:
    """`LaneEval.bench`, with lists and loops as published; the running time is left out."""
    angles = []
    for lane in gt:
        points = [(y, x) for y, x in zip(H_SAMPLES, lane, strict=True) if x >= 0]
        if len(points) < 2:
            angles.append(0.0)
            continue
        ys, xs = zip(*points, strict=True)
        mean_y, mean_x = sum(ys) / len(ys), sum(xs) / len(xs)
        covariance = sum((y - mean_y) * (x - mean_x) for y, x in points)
        angles.append(math.atan(covariance / sum((y - mean_y) ** 2 for y in ys)))
    if len(pred) > len(gt) + 2:
        return 0.0, 0.0, 1.0
    line_accs, fn, matched = [], 0, 0
    for lane, angle in zip(gt, angles, strict=True):
        limit = 20 / math.cos(angle)
        best = 0.0
        for candidate in pred:
            hits = 0
            for a, b in zip(candidate, lane, strict=True):
                hits += abs((a if a >= 0 else -100) - (b if b >= 0 else -100)) < limit
            best = max(best, hits / len(H_SAMPLES))
        if best < 0.85:
            fn += 1
        else:
            matched += 1
        line_accs.append(best)
    fp = len(pred) - matched
    if len(gt) > 4 and fn > 0:
        fn -= 1
    total = sum(line_accs)
    if len(gt) > 4:
        total -= min(line_accs)
    counted = max(min(4.0, len(gt)), 1.0)
    return total / counted, fp / len(pred) if len(pred) else 0.0, fn / counted


@pytest.mark.parametrize("seed", range(30))
def test_agrees_with_the_published_code(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slopes = rng.uniform(-1.5, 1.5, int(rng.integers(1, 7)))
    gt = rng.uniform(200, 1000, len(slopes))[:, None] + slopes[:, None] * (H_SAMPLES - 400)
    gt[:, : int(rng.integers(0, 30))] = -2
    gt[gt < 0] = -2
    pred = gt[: int(rng.integers(0, len(gt) + 1))] + rng.normal(0, 12, (1, len(H_SAMPLES)))
    pred = np.vstack((pred, upright(*rng.uniform(0, 1280, int(rng.integers(0, 3))))))
    score = score_image(pred, gt, H_SAMPLES)
    got = score.accuracy, score.false_positive, score.false_negative
    assert got == pytest.approx(published_score(pred, gt))


def test_a_perfect_prediction_scores_one() -> None:
    lanes = upright(300, 700)
    assert score_image(lanes, lanes, H_SAMPLES) == ImageScore(1.0, 0.0, 0.0)


def test_no_prediction_misses_everything_and_invents_nothing() -> None:
    score = score_image(upright(), upright(300, 700), H_SAMPLES)
    assert score == ImageScore(0.0, 0.0, 1.0)


def test_a_lane_twenty_pixels_off_is_missed_and_invented() -> None:
    assert score_image(upright(320), upright(300), H_SAMPLES) == ImageScore(0.0, 1.0, 1.0)
    assert score_image(upright(319), upright(300), H_SAMPLES) == ImageScore(1.0, 0.0, 0.0)


def test_flat_lanes_are_judged_across_not_sideways() -> None:
    slanted = upright(300) + 2 * (H_SAMPLES - H_SAMPLES[0])
    score = score_image(slanted + 40, slanted, H_SAMPLES)
    assert score.accuracy == 1.0


def test_of_five_labelled_lanes_the_worst_is_forgiven() -> None:
    labelled = upright(100, 300, 500, 700, 900)
    assert score_image(labelled[:4], labelled, H_SAMPLES) == ImageScore(1.0, 0.0, 0.0)


def test_three_spare_predictions_forfeit_the_image() -> None:
    labelled = upright(300)
    predicted = upright(300, 500, 700, 900)
    assert score_image(predicted, labelled, H_SAMPLES) == ImageScore(0.0, 0.0, 1.0)


def test_arrays_of_other_rows_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"predicted: expected shape \(lanes, 56\), got \(1, 5\)"):
        score_image(np.zeros((1, 5)), upright(300), H_SAMPLES)


def test_lanes_are_read_between_rows() -> None:
    y = 1 - np.arange(72) / 71
    lane = (0.2 + 0.5 * y).astype(np.float32)[None]
    [xs] = lanes_at(lane, H_SAMPLES)
    np.testing.assert_allclose(xs, 1280 * (0.2 + 0.5 * H_SAMPLES / 720), atol=1e-3)


def test_a_lane_is_absent_beyond_its_ends() -> None:
    lane = np.full((1, 72), np.nan, np.float32)
    lane[0, 10:31] = 0.5
    [xs] = lanes_at(lane, H_SAMPLES)
    ends = 720 * (1 - 30 / 71 - 0.01), 720 * (1 - 10 / 71 + 0.01)
    covered = (ends[0] <= H_SAMPLES) & (ends[1] >= H_SAMPLES)
    np.testing.assert_array_equal(xs[covered], 640.0)
    np.testing.assert_array_equal(xs[~covered], -2.0)


def test_a_lane_without_points_is_absent_everywhere() -> None:
    assert (lanes_at(np.full((1, 72), np.nan, np.float32), H_SAMPLES) == -2).all()


def test_the_summary_is_the_mean_and_f1_of_the_means() -> None:
    summary = summarise([ImageScore(1.0, 0.0, 0.0), ImageScore(0.9, 0.0712, 0.0602)])
    assert summary.accuracy == pytest.approx(0.95)
    # LaneATT's ResNet-18 on TuSimple: FP 3.56 %, FN 3.01 %, F1 96.71 %.
    assert summary.f1 == pytest.approx(0.9671, abs=5e-5)


def test_no_image_has_no_summary() -> None:
    with pytest.raises(ValueError, match="at least one image"):
        summarise([])


def test_a_labelled_line_is_found_on_85_percent_of_its_own_rows() -> None:
    labelled = upright(400.0, 800.0)
    labelled[0, :16] = -2.0  # 40 rows are left
    for missed, found in ((6, True), (7, False)):
        seen = upright(419.0, 1100.0, 1200.0, 100.0)
        seen[0, 16 : 16 + missed] = -2.0
        # Lanes elsewhere do not count against it, and the other line is not there.
        np.testing.assert_array_equal(lines_hit(seen, labelled, H_SAMPLES), [found, False])
    assert not lines_hit(upright(421.0), labelled, H_SAMPLES).any()
    assert not lines_hit(upright(), labelled, H_SAMPLES).any()


def test_the_own_lane_is_between_the_nearest_lines_of_both_sides() -> None:
    labelled = upright(100.0, 500.0, 700.0, 1200.0)
    np.testing.assert_array_equal(own_lines(labelled, H_SAMPLES)[:, 0], [500, 700])
    np.testing.assert_array_equal(own_lines(labelled[2:], H_SAMPLES)[:, 0], [700])
    assert len(own_lines(upright(), H_SAMPLES)) == 0
    # It leans across the middle: its foot counts, not its top.
    leaning = np.linspace(500.0, 900.0, len(H_SAMPLES))
    both = np.stack((leaning, np.full_like(leaning, 400.0)))
    np.testing.assert_array_equal(own_lines(both, H_SAMPLES)[:, 0], [400, 500])
