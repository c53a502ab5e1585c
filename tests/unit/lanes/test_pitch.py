"""The pitch of a moment follows the springs; that of a minute is a drift, and braking is none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from unit.lanes.roads import CAMERA, FlatRoad, lanes_of, noisy

from edge_server.lanes.road_geometry import (
    PitchDrift,
    PitchFilter,
    PitchMeasurement,
    Spread,
    road_of,
)

FPS = 2.0
S = 1_000_000_000


def drive(pitch_deg: np.ndarray, seed: int = 0, curvature: float = 0.0) -> PitchDrift:
    """Drive with that pitch in each frame, through pictures of the road."""
    rng = np.random.default_rng(seed)
    drift = PitchDrift()
    seen = {
        round(each, 1): lanes_of(
            FlatRoad(curvature=curvature), CAMERA.pitched(np.radians(each)), (0.5, -0.5)
        )
        for each in np.unique(np.round(pitch_deg, 1))
    }
    for number, each in enumerate(np.round(pitch_deg, 1)):
        road = road_of(noisy(seen[round(each, 1)], rng, 1.5), CAMERA)
        if road.pitch is not None:
            drift.add(road.pitch.rad, road.ego.curvature_1pm, round(number / FPS * S))
    return drift


@pytest.mark.parametrize("degrees", [-1.5, -0.8, 0.8, 1.5])
def test_a_pitch_that_stays_off_for_a_minute_is_a_drift(degrees: float) -> None:
    drift = drive(np.full(int(65 * FPS), degrees))
    assert drift.pitch is not None
    assert np.degrees(drift.pitch.median) == pytest.approx(degrees, rel=0.15)


@pytest.mark.parametrize("degrees", [-0.3, 0.0, 0.3])
def test_a_small_error_is_none(degrees: float) -> None:
    assert drive(np.full(int(65 * FPS), degrees)).pitch is None


@given(st.integers(0, 10_000), st.floats(1.0, 2.0))
def test_braking_is_no_drift(seed: int, degrees: float) -> None:
    """A drive in town brakes for a third of its time."""
    rng = np.random.default_rng(seed)
    pitch = np.repeat(rng.random(30) < 0.33, int(4 * FPS)) * degrees
    drift = PitchDrift()
    minute = int(60 * FPS)
    assume(all(np.mean(pitch[i : i + minute] > 0) < 0.45 for i in range(len(pitch) - minute)))
    for number, each in enumerate(pitch):
        drift.add(np.radians(rng.normal(each, 0.15)), 0.0, round(number / FPS * S))
        assert drift.pitch is None


def test_less_than_a_minute_is_no_drift_and_bends_do_not_count() -> None:
    assert drive(np.full(int(55 * FPS), 1.0)).pitch is None
    assert drive(np.full(int(65 * FPS), 1.0), curvature=1 / 300).pitch is None


def test_a_drift_ends_where_the_pitch_is_right_again() -> None:
    drift = PitchDrift()
    for number in range(240):
        drift.add(np.radians(0.8), 0.0, number * S // 2)
    assert drift.pitch is not None
    assert drift.pitch.median == pytest.approx(np.radians(0.8))
    for number in range(240, 320):
        drift.add(0.0, 0.0, number * S // 2)
    assert drift.pitch is None


def test_a_drift_is_as_far_off_as_it_says() -> None:
    """Slopes and bends that frames of some seconds have in common, and the noise of each."""
    within = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        drift = PitchDrift()
        waves = rng.normal(0.0, 0.1, 30).repeat(4)
        for number, wave in enumerate(waves):
            pitch_rad = np.radians(0.8 + wave + rng.normal(0.0, 0.1))
            drift.add(float(pitch_rad), 0.0, number * S // 2)
        assert drift.pitch is not None
        within.append(abs(drift.pitch.median - np.radians(0.8)) <= 2 * drift.pitch.std)
        assert np.degrees(drift.pitch.std) < 0.1
    assert np.mean(within) > 0.93


def test_the_filter_follows_braking_and_returns_to_rest() -> None:
    pitch = PitchFilter(np.radians(0.2))
    resting = pitch.std_rad
    for number in range(50):
        pitch.predict(number * S // 25)
        pitch.correct(PitchMeasurement(np.radians(1.5) - pitch.rad, np.radians(0.2)))
    assert np.degrees(pitch.rad) == pytest.approx(1.5, abs=0.1)
    assert pitch.std_rad < 0.3 * resting
    for number in range(10):
        pitch.predict((2 + number) * S)
    assert pitch.rad == pytest.approx(0.0, abs=np.radians(0.05))
    assert pitch.std_rad == pytest.approx(resting, rel=0.05)


def test_lines_that_part_are_no_pitch() -> None:
    pitch = PitchFilter(np.radians(0.2))
    pitch.predict(0)
    pitch.correct(PitchMeasurement(np.radians(8.0), np.radians(0.1)))
    assert pitch.rad == 0.0


def test_the_pitch_is_the_same_in_every_digit_however_long_the_machine_has_run() -> None:
    """Seconds of CLOCK_MONOTONIC as a float are rounded the more, the larger they are."""

    def followed(uptime_ns: int) -> list[tuple[float, float, Spread | None]]:
        pitch, drift = PitchFilter(np.radians(0.2)), PitchDrift()
        found = []
        for number in range(300):
            mono_ns = uptime_ns + number * S // 2 - number % 3
            pitch.predict(mono_ns)
            pitch.correct(PitchMeasurement(np.radians(1.5 + number % 3) - pitch.rad, 0.01))
            drift.add(pitch.rad, 0.0, mono_ns)
            found.append((pitch.rad, pitch.std_rad, drift.pitch))
        return found

    uptimes_s = (60, 3 * 86_400 + 0.123456789, 400 * 86_400 + 0.987654321)
    first, *others = [followed(round(uptime_s * S)) for uptime_s in uptimes_s]
    assert first[-1][2] is not None
    assert all(other == first for other in others)
