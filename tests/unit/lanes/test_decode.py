"""Decoding agrees with LaneATT's published Python and CUDA code, written out literally here.

But for one thing: the published code keeps points to the right of the image.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_server.lanes.decode import DecodedLanes, calibrated_confidence, decode_lanes

Proposals = NDArray[np.float32]


def lane(
    x_px: float | list[float], *, start: int = 0, length: float = 72, score: float = 0.9
) -> list[float]:
    """A proposal with a probability in column 1, for `scores="prob"`."""
    xs = x_px if isinstance(x_px, list) else [x_px] * 72
    return [1 - score, score, start / 71, 0.0, length, *xs]


def decode(
    rows: list[list[float]] | Proposals,
    *,
    score_threshold: float = 0.5,
    nms_threshold_px: float = 45.0,
    max_lanes: int = 5,
) -> DecodedLanes:
    return decode_lanes(
        np.asarray(rows, np.float32),
        score_threshold=score_threshold,
        nms_threshold_px=nms_threshold_px,
        max_lanes=max_lanes,
        scores="prob",
    )


def published_distance_below(a: NDArray[np.float64], b: NDArray[np.float64], limit: float) -> bool:
    """`devIoU` of nms_kernel.cu; int() truncates like the C cast it stands for."""
    start_a, start_b = int(a[2] * 71 + 0.5), int(b[2] * 71 + 0.5)
    end_a = int(start_a + a[4] - 1 + 0.5 - (1 if a[4] - 1 < 0 else 0))
    end_b = int(start_b + b[4] - 1 + 0.5 - (1 if b[4] - 1 < 0 else 0))
    start, end = max(start_a, start_b), min(end_a, end_b, 71)
    if end < start:
        return False
    total = sum(abs(a[5 + i] - b[5 + i]) for i in range(start, end + 1))
    return bool(total < limit * (end - start + 1))


def published_decode(
    proposals: Proposals, score_threshold: float, limit: float, top_k: int
) -> list[list[float]]:
    """NMS and `proposals_to_pred`, row by row."""
    likely = [np.asarray(p, np.float64) for p in proposals if float(p[1]) > score_threshold]
    likely.sort(key=lambda p: -p[1])
    kept: list[NDArray[np.float64]] = []
    for candidate in likely:
        if len(kept) < top_k and not any(
            published_distance_below(best, candidate, limit) for best in kept
        ):
            kept.append(candidate)
    lanes = []
    for proposal in kept:
        xs = proposal[5:] / 640
        start, length = round(proposal[2] * 71), round(proposal[4])
        end = min(start + length - 1, 71)
        row = [math.nan] * 72
        for i in range(start, end + 1):
            row[i] = xs[i]
        for i in range(start - 1, -1, -1):
            if not 0 <= xs[i] <= 1:
                break
            if i <= end:
                row[i] = xs[i]
        row = [x if 0 <= x <= 1 else math.nan for x in row]
        if sum(not math.isnan(x) for x in row) > 1:
            lanes.append(row)
    return lanes


@st.composite
def road(draw: st.DrawFn) -> Proposals:
    """Straight proposals, some alike, some outside the image, some without length."""
    count = draw(st.integers(0, 12))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    proposals = np.zeros((count, 77), np.float32)
    proposals[:, 1] = rng.permutation(count) / max(count, 1)
    proposals[:, 2] = rng.integers(0, 72, count) / 71
    proposals[:, 4] = rng.uniform(-5, 80, count)
    proposals[:, 5:] = rng.choice((-80, 60, 100, 300, 600), count)[:, None] + rng.uniform(
        -9, 9, count
    )[:, None] * np.arange(72)
    return proposals


@given(road(), st.sampled_from((0.0, 0.3, 0.7)), st.sampled_from((5.0, 45.0)), st.integers(1, 5))
def test_agrees_with_the_published_code(
    proposals: Proposals, threshold: float, limit: float, top_k: int
) -> None:
    decoded = decode(proposals, score_threshold=threshold, nms_threshold_px=limit, max_lanes=top_k)
    expected = published_decode(proposals, threshold, limit, top_k)
    np.testing.assert_allclose(
        decoded.x, np.array(expected, np.float64).reshape(-1, 72), rtol=1e-6, atol=1e-6
    )


@given(road())
def test_lanes_come_best_first(proposals: Proposals) -> None:
    decoded = decode(proposals, score_threshold=0.1)
    assert (np.diff(decoded.scores) <= 0).all()
    assert decoded.x.dtype == decoded.scores.dtype == np.float32
    assert decoded.x.shape == (len(decoded.scores), 72)


def test_logits_become_probabilities() -> None:
    proposal = lane(320.0)
    proposal[0], proposal[1] = -1.0, 1.5
    decoded = decode_lanes(
        np.array([proposal], np.float32), score_threshold=0.5, nms_threshold_px=45, max_lanes=5
    )
    assert decoded.scores[0] == pytest.approx(1 / (1 + math.exp(-2.5)))


def test_the_score_must_exceed_the_threshold() -> None:
    assert len(decode([lane(320.0, score=0.5)], score_threshold=0.5).x) == 0


def test_row_zero_is_the_bottom_row() -> None:
    [x] = decode([lane(64.0, start=0, length=10)]).x
    np.testing.assert_allclose(x[:10], 0.1, rtol=1e-6)
    assert np.isnan(x[10:]).all()


def test_a_lane_reaches_down_from_its_start_until_it_leaves_the_image() -> None:
    xs = [float(700 - 5 * i) for i in range(72)]
    [x] = decode([lane(xs, start=40, length=10)]).x
    assert np.isnan(x[:12]).all()
    assert not np.isnan(x[12:50]).any()
    assert np.isnan(x[50:]).all()


def test_a_gap_below_the_start_ends_the_lane_there() -> None:
    xs = [100.0] * 72
    xs[20] = -50.0
    [x] = decode([lane(xs, start=30, length=10)]).x
    assert np.isnan(x[:21]).all()
    assert not np.isnan(x[21:40]).any()


def test_of_two_near_lanes_the_better_stays() -> None:
    decoded = decode([lane(300.0, score=0.6), lane(340.0, score=0.8), lane(500.0, score=0.7)])
    np.testing.assert_allclose(decoded.x[:, 0] * 640, (340, 500), rtol=1e-6)


def test_lanes_that_share_no_row_are_both_kept() -> None:
    low, high = lane(320.0, start=0, length=10), lane(320.0, start=40, length=10, score=0.8)
    assert len(decode([low, high]).x) == 2


def test_a_suppressed_lane_suppresses_nothing() -> None:
    chain = [lane(300.0, score=0.9), lane(330.0, score=0.8), lane(360.0, score=0.7)]
    decoded = decode(chain, nms_threshold_px=45.0)
    np.testing.assert_allclose(decoded.x[:, 0] * 640, (300, 360), rtol=1e-6)


def test_a_lane_of_one_point_is_rejected() -> None:
    assert len(decode([lane(320.0, start=0, length=1)]).x) == 0


@pytest.mark.parametrize("column", [2, 4, 30])
def test_a_proposal_that_is_not_finite_is_ignored(column: int) -> None:
    broken = lane(320.0)
    broken[column] = math.nan
    assert len(decode([broken, lane(100.0, score=0.8)]).x) == 1


def test_proposals_without_a_score_that_is_a_number_are_no_empty_road() -> None:
    with pytest.raises(ValueError, match="no score is a number"):
        decode(np.full((3, 77), np.nan, np.float32))


def test_logits_that_are_not_finite_are_ignored() -> None:
    rows = [lane(100.0), lane(300.0), lane(500.0)]
    rows[0][0] = rows[0][1] = math.inf
    rows[1][1] = math.nan
    decoded = decode_lanes(
        np.array(rows, np.float32), score_threshold=0.5, nms_threshold_px=45, max_lanes=5
    )
    np.testing.assert_allclose(decoded.x[:, 0] * 640, 500.0, rtol=1e-6)


@pytest.mark.parametrize("shape", [(77,), (1, 2784, 77), (2784, 76)])
def test_another_shape_is_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected shape \(N, 77\), got") as refused:
        decode(np.zeros(shape, np.float32))
    assert str(shape) in str(refused.value)


def test_confidence_keeps_the_order_and_by_default_the_score() -> None:
    scores = np.array([0.999, 0.9, 0.5, 0.38], np.float32)
    np.testing.assert_array_equal(calibrated_confidence(scores, 1.0, 0.0), scores)
    confidence = calibrated_confidence(scores, 2.0, 0.3)
    assert (np.diff(confidence) < 0).all()
    assert confidence.dtype == np.float32
    assert confidence[2] == pytest.approx(1 / (1 + np.exp(-0.3)))
    assert np.isfinite(calibrated_confidence(np.array([0.0, 1.0]), 0.01, 0.0)).all()
