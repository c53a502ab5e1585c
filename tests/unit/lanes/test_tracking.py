"""LaneTracker: identity, smoothness, short gaps, lane changes; nothing that was never detected."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.lanes.tracking import LaneFilter, LaneTracker, correct, polynomials, predict
from edge_server.lanes.types import GroundLane, Lane, Polynomial, VehicleState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

FRAME_S = 1 / 30
SPEED_MPS = 25.0
X_M = np.linspace(6.0, 45.0, 20)
# What a network's pixel does on the ground: more with the distance.
SIGMA_M = 0.03 + 0.004 * X_M


def to_image(ground: NDArray[np.float64]) -> NDArray[np.float64]:
    """A pinhole camera of 1000 px, 1.4 m above the road, at the origin."""
    x, y = ground.T
    return np.stack((640 - 1000 * y / x, 360 + 1400 / x), axis=1)


@dataclass
class Road:
    """Straight parallel markings, and a vehicle that moves sideways among them.

    Attributes:
        markings_m: their offsets from the road's axis, positive to the left.
        vehicle_m: the vehicle's offset from the axis at a time in s.
    """

    markings_m: Sequence[float]
    vehicle_m: Callable[[float], float] = lambda _: 0.0
    curvature_1pm: float = 0.0
    noise: np.random.Generator | None = None

    def truth(self, marking_m: float, time_s: float) -> NDArray[np.float64]:
        sideways_mps = (self.vehicle_m(time_s + 0.01) - self.vehicle_m(time_s)) / 0.01
        heading = sideways_mps / SPEED_MPS
        return np.array([marking_m - self.vehicle_m(time_s), -heading, self.curvature_1pm / 2, 0.0])

    def lanes(self, time_s: float, *, without: frozenset[float] = frozenset()) -> list[Lane]:
        return [self._lane(m, time_s) for m in self.markings_m if m not in without]

    def _lane(self, marking_m: float, time_s: float) -> Lane:
        powers = np.vander(X_M, 4, increasing=True)
        y_m = powers @ self.truth(marking_m, time_s)
        if self.noise is not None:
            y_m = y_m + self.noise.normal(0, SIGMA_M)
        weighted = powers[:, :3] / SIGMA_M[:, None]
        covariance = np.zeros((4, 4))
        covariance[:3, :3] = np.linalg.inv(weighted.T @ weighted)
        coefficients = np.zeros(4)
        coefficients[:3] = covariance[:3, :3] @ weighted.T @ (y_m / SIGMA_M)
        points = np.stack((X_M, y_m), axis=1)
        polynomial = Polynomial(coefficients, covariance, float(X_M[0]), float(X_M[-1]))
        image = to_image(points).astype(np.float32)
        return Lane(image, 0.9, ground=GroundLane(points.astype(np.float32), polynomial))


MOTION = VehicleState(0, SPEED_MPS, 0.0)


def drive(
    road: Road,
    frames: int,
    tracker: LaneTracker | None = None,
    *,
    first: int = 0,
    gap: Callable[[int], frozenset[float]] = lambda _: frozenset(),
    motion: VehicleState = MOTION,
) -> list[tuple[Lane, ...]]:
    tracker = tracker or LaneTracker()
    return [
        tracker.update(
            road.lanes(n * FRAME_S, without=gap(n)), int(n * FRAME_S * 1e9), motion, to_image
        )
        for n in range(first, first + frames)
    ]


def ids(lanes: Sequence[Lane]) -> list[int]:
    return [lane.id for lane in lanes]


def offset_m(lane: Lane) -> float:
    assert lane.ground is not None
    return float(lane.ground.polynomial.coefficients[0])


def test_a_marking_has_a_number_once_three_frames_of_five_show_it() -> None:
    shown = drive(Road([1.8, -1.8]), 5)
    assert [ids(lanes) for lanes in shown] == [[0, 0], [0, 0], [1, 2], [1, 2], [1, 2]]
    assert [lane.index for lane in shown[-1]] == [-1, 1]


def test_markings_are_numbered_outwards_from_the_vehicle() -> None:
    last = drive(Road([5.4, -1.8, 1.8, -5.4]), 4)[-1]
    assert [lane.index for lane in last] == [-2, 1, -1, 2]


@pytest.mark.parametrize("motion", [MOTION, VehicleState(0)])
def test_the_jitter_of_the_offset_is_halved(motion: VehicleState) -> None:
    road = Road([1.8, -1.8], curvature_1pm=1 / 400, noise=np.random.default_rng(7))
    tracker = LaneTracker()
    raw, tracked = [], []
    for n in range(300):
        lanes = road.lanes(n * FRAME_S)
        result = tracker.update(lanes, int(n * FRAME_S * 1e9), motion, to_image)
        if n > 30:
            raw.append(offset_m(lanes[0]))
            tracked.append(offset_m(result[0]))
    assert np.abs(np.diff(tracked)).mean() < np.abs(np.diff(raw)).mean() / 2
    assert np.std(tracked) < np.std(raw) / 1.5
    assert abs(np.mean(tracked) - 1.8) < 0.05


def test_the_covariance_covers_the_error() -> None:
    inside = []
    for seed in range(40):
        road = Road([1.8], noise=np.random.default_rng(seed))
        lane = drive(road, 40)[-1][0]
        assert lane.ground is not None
        polynomial = lane.ground.polynomial
        error = polynomial.coefficients[0] - 1.8
        inside.append(abs(error) < 2 * np.sqrt(polynomial.covariance[0, 0]))
    assert np.mean(inside) > 0.9


def test_the_heading_follows_a_quick_lane_change() -> None:
    """3.6 m aside within 2.5 s, ten frames a second: up to 6 degrees."""

    def aside_m(time_s: float) -> float:
        share = min(max((time_s - 1.0) / 2.5, 0.0), 1.0)
        return 3.6 * share**3 * (10 - 15 * share + 6 * share**2)

    for seed in range(4):
        road = Road([5.4, 1.8, -1.8], aside_m, noise=np.random.default_rng(seed))
        tracker = LaneTracker()
        for n in range(45):
            motion = VehicleState(0, SPEED_MPS)
            lane = tracker.update(road.lanes(n / 10), n * 10**8, motion, to_image)[0]
            assert lane.ground is not None
            error_rad = lane.ground.polynomial.coefficients[1] - road.truth(5.4, n / 10)[1]
            if n > 5:
                assert abs(error_rad) < math.radians(0.7)


def test_the_covariance_covers_what_a_wrong_yaw_does_to_a_moving_vehicle() -> None:
    """Lines that seem to lead aside pull the estimate aside for as long as the vehicle drives."""
    by_angles = np.zeros((4, 3))
    by_angles[1, 1] = math.radians(0.2)
    off = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        yaw = float(rng.normal())
        estimate = None
        for lane in (Road([1.8], noise=rng).lanes(n * FRAME_S)[0] for n in range(60)):
            assert lane.ground is not None
            seen = lane.ground.polynomial
            coefficients = seen.coefficients + yaw * by_angles[:, 1]
            covariance = seen.covariance + by_angles @ by_angles.T
            ends = seen.x_min_m, seen.x_max_m
            detection = Polynomial(coefficients, covariance, *ends, by_angles)
            estimate = estimate or LaneFilter(detection)
            predict([estimate], FRAME_S, VehicleState(0, SPEED_MPS))
            correct([estimate], [detection])
        assert estimate is not None
        std = np.sqrt(np.diag(polynomials([estimate])[0].covariance))
        off.append(np.abs(estimate.mean[:4] - (1.8, 0.0, 0.0, 0.0)) / std)
    within = (np.array(off) < 2.0).mean(axis=0)
    assert (within > 0.9).all(), within
    assert (np.median(off, axis=0)[:2] > 0.2).all()


def test_a_vehicle_whose_yaw_rate_is_not_known_is_taken_to_turn_with_its_road() -> None:
    road = Road([1.8, -1.8], curvature_1pm=1 / 300)
    for lane in drive(road, 60, motion=VehicleState(0, SPEED_MPS))[-1]:
        assert lane.ground is not None
        assert abs(lane.ground.polynomial.coefficients[1]) < 1e-5


def test_a_known_speed_makes_lanes_smoother() -> None:
    jitter = []
    for speed_mps in (None, SPEED_MPS):
        tracker, offsets = LaneTracker(), []
        road = Road([1.8, -1.8], noise=np.random.default_rng(4))
        for n in range(100):
            at_ns = int(n * FRAME_S * 1e9)
            state = VehicleState(at_ns, speed_mps)
            offsets.append(
                offset_m(tracker.update(road.lanes(n * FRAME_S), at_ns, state, to_image)[0])
            )
        jitter.append(np.abs(np.diff(offsets[30:])).mean())
    assert jitter[1] < 0.7 * jitter[0]


def test_a_gap_is_bridged_for_half_a_second_and_its_lanes_are_predicted() -> None:
    tracker = LaneTracker()
    road = Road([1.8, -1.8])
    drive(road, 10, tracker)
    shown = drive(road, 30, tracker, first=10, gap=lambda _: frozenset({1.8}))
    predicted = [next((lane for lane in lanes if lane.predicted), None) for lanes in shown]
    bridged = [lane for lane in predicted if lane is not None]
    shares = [lane is not None for lane in predicted]
    assert all(shares[:14])
    assert not any(shares[15:])
    assert all(lane.id == 1 and lane.index == -1 for lane in bridged)
    scores = [lane.score for lane in bridged]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] < 0.9 / 3
    assert abs(offset_m(bridged[-1]) - 1.8) < 0.05
    # Its pixels are those of its ground points.
    ground = bridged[0].ground
    assert ground is not None
    assert np.allclose(bridged[0].points, to_image(ground.points.astype(np.float64)), atol=0.1)


def test_a_marking_comes_back_with_its_number() -> None:
    tracker = LaneTracker()
    road = Road([1.8, -1.8])
    drive(road, 10, tracker)
    drive(road, 10, tracker, first=10, gap=lambda _: frozenset({1.8}))
    assert ids(drive(road, 1, tracker, first=20)[0]) == [1, 2]


def test_one_false_detection_is_not_continued() -> None:
    tracker = LaneTracker()
    road = Road([1.8, -1.8])
    drive(road, 10, tracker)
    seen = drive(Road([1.8, -1.8, -4.0]), 1, tracker, first=10)[0]
    assert ids(seen) == [1, 2, 0]
    after = drive(road, 20, tracker, first=11)
    assert all(len(lanes) == 2 for lanes in after)


def test_the_numbers_stay_in_a_lane_change_and_the_sides_are_handed_over() -> None:
    def to_the_left(time_s: float) -> float:
        return 3.6 * float(np.clip((time_s - 1) / 4, 0, 1))

    road = Road([5.4, 1.8, -1.8], to_the_left, noise=np.random.default_rng(3))
    tracker = LaneTracker()
    changes = []
    indices = []
    for n in range(200):
        lanes = tracker.update(
            road.lanes(n * FRAME_S),
            int(n * FRAME_S * 1e9),
            VehicleState(0, SPEED_MPS, 0.0),
            to_image,
        )
        assert len(lanes) == 3
        if n > 3:
            assert ids(lanes) == [1, 2, 3]
            changes.append(tracker.lane_change)
            indices.append(tuple(lane.index for lane in lanes))
    assert indices[0] == (-2, -1, 1)
    assert indices[-1] == (-1, 1, 2)
    assert sum(a != b for a, b in itertools.pairwise(indices)) == 1
    runs = [change for change, _ in itertools.groupby(changes)]
    assert runs == ["none", "left", "none"]


def test_weaving_over_a_marking_for_a_moment_hands_no_side_over() -> None:
    road = Road([1.8, -1.8], lambda t: 2.2 if 1.0 <= t < 1.2 else 1.6)
    shown = drive(road, 60)
    assert {tuple(lane.index for lane in lanes) for lanes in shown[5:]} == {(-1, 1)}


def test_everything_is_forgotten_after_a_long_gap_and_no_number_is_used_again() -> None:
    tracker = LaneTracker()
    road = Road([1.8, -1.8])
    drive(road, 5, tracker)
    later = drive(road, 5, tracker, first=300)
    assert ids(later[0]) == [0, 0]
    assert set(ids(later[-1])).isdisjoint({1, 2})


def test_time_that_runs_backwards_moves_nothing() -> None:
    tracker = LaneTracker()
    road = Road([1.8, -1.8])
    drive(road, 10, tracker)
    shown = drive(road, 3, tracker, first=2)
    assert [ids(lanes) for lanes in shown] == [[1, 2]] * 3
    assert abs(offset_m(shown[-1][0]) - 1.8) < 0.01


def test_lanes_without_a_place_on_the_ground_are_returned_as_they_are() -> None:
    lane = Lane(np.array([[100, 700], [200, 400]], np.float32), 0.8)
    tracker = LaneTracker()
    assert tracker.update([lane], 0, VehicleState(0), to_image) == (lane,)


@given(st.lists(st.sets(st.sampled_from([5.4, 1.8, -1.8])), min_size=1, max_size=60))
def test_nothing_appears_that_was_not_detected_within_half_a_second(
    missing: list[set[float]],
) -> None:
    tracker = LaneTracker()
    road = Road([5.4, 1.8, -1.8])
    last_seen: dict[float, float] = {}
    for n, without in enumerate(missing):
        time_s = n * FRAME_S
        lanes = drive(road, 1, tracker, first=n, gap=lambda _, w=without: frozenset(w))[0]
        detected = [lane for lane in lanes if not lane.predicted]
        assert [round(offset_m(lane), 1) for lane in detected] == [
            m for m in road.markings_m if m not in without
        ]
        for marking_m in set(road.markings_m) - without:
            last_seen[marking_m] = time_s
        for lane in lanes:
            nearest = min(road.markings_m, key=lambda m, lane=lane: abs(m - offset_m(lane)))
            assert abs(nearest - offset_m(lane)) < 0.3
            assert time_s - last_seen[nearest] <= 0.5 + 1e-6
        known = [lane.id for lane in lanes if lane.id]
        assert len(known) == len(set(known))


def test_the_paint_of_a_track_is_what_its_frames_show_together() -> None:
    road, tracker = Road((1.8, -1.8)), LaneTracker()
    lanes: tuple[Lane, ...] = ()
    for number in range(12):
        # Dashes are between the vehicle's and the next one in every other frame.
        seen = [
            replace(lane, type="unknown", solid_evidence=each, yellow_evidence=1.0)
            for lane, each in zip(
                road.lanes(number * FRAME_S), (1.0, (-3.0, 1.0)[number % 2]), strict=True
            )
        ]
        lanes = tracker.update(seen, round(number * FRAME_S * 1e9), MOTION, to_image)
    assert [(lane.type, lane.color) for lane in lanes] == [
        ("solid", "yellow"),
        ("dashed", "yellow"),
    ]
    gone = tracker.update([], round(12 * FRAME_S * 1e9), MOTION, to_image)
    assert all(lane.predicted for lane in gone)
    assert {lane.type for lane in gone} == {"solid", "dashed"}


@given(st.integers(0, 2**32 - 1))
def test_what_moves_two_lines_alike_leaves_their_width_as_certain(seed: int) -> None:
    """Of the many factors of a covariance, two lines have to have those that are alike."""
    rng = np.random.default_rng(seed)
    filters = []
    # About the prior, where all directions are equally uncertain, and eigenvectors arbitrary.
    scale = np.array([2.0, 0.25, 0.015, 1e-4])[:, None]
    for _ in range(2):
        factor = scale * (np.eye(4) + 1e-3 * rng.normal(size=(4, 4)))
        each = LaneFilter(Polynomial(np.zeros(4), np.eye(4), 5.0, 40.0, np.zeros((4, 3))))
        each.moved[:4, :4] = factor @ factor.T
        filters.append(each)
    left, right = (each.by_angles[0] for each in polynomials(filters))
    assert np.linalg.norm(left - right) < 0.02 * np.linalg.norm(left)


def test_what_frames_have_in_common_stays_uncertain_however_many_there_are() -> None:
    by_angles = np.zeros((4, 3))
    by_angles[1, 1] = math.radians(0.2)
    covariance = by_angles @ by_angles.T + np.diag([1e-4, 1e-6, 1e-10, 1e-14])
    detection = Polynomial(np.array([1.8, 0.0, 0.0, 0.0]), covariance, 4.0, 50.0, by_angles)
    filter_ = LaneFilter(detection)
    for _ in range(100):
        predict([filter_], 0.04, VehicleState(0, 25.0, 0.0))
        correct([filter_], [detection])
    covariance = polynomials([filter_])[0].covariance
    # A vehicle that keeps its place tells a little of where its camera looks.
    assert math.sqrt(covariance[1, 1]) > math.radians(0.15)
    assert math.sqrt(covariance[1, 1]) < math.radians(0.4)


@given(seed=st.integers(0, 1 << 32))
def test_no_detection_or_motion_ends_it_or_makes_a_deviation_that_is_none(seed: int) -> None:
    """Lines known for certain, or hardly at all, at any speed, with gaps: the camera's thread runs
    it, and nobody catches what numpy would raise."""
    rng = np.random.default_rng(seed)
    sizes = np.array([0.1, 0.01, 1e-3, 1e-5])[:, None]

    def detection(scale: float) -> Polynomial:
        apart, angles = rng.normal(size=(4, 4)) * sizes, rng.normal(size=(4, 3)) * sizes * scale
        covariance = scale**2 * apart @ apart.T + angles @ angles.T
        least_m = rng.uniform(2, 20)
        mean = rng.normal(size=4) * sizes[:, 0]
        return Polynomial(mean, covariance, least_m, least_m + rng.uniform(0.5, 100), angles)

    filters = [LaneFilter(detection(1.0)) for _ in range(3)]
    for _ in range(30):
        speed, yaw = rng.choice([0.0, 10.0, 150.0]), rng.choice([0.0, 0.3, -5.0])
        motion = VehicleState(0, *((None, None) if rng.random() < 0.3 else (speed, yaw)))
        predict(filters, float(rng.choice([1e-6, 0.03, 2.0, 10.0])), motion)
        if rng.random() < 0.7:
            correct(
                filters, [detection(float(rng.choice([0.0, 1e-3, 1.0, 30.0]))) for _ in filters]
            )
        for each in polynomials(filters):
            assert np.isfinite(each.covariance).all()
            assert (np.diag(each.covariance) >= 0).all()
