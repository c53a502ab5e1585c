"""Drive: the truth of a manoeuvre is what the picture shows."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from edge_server.tools.road.renderer import HALF_WIDTH_M, SPEED_MPS, Drive
from edge_server.tools.road.scene import Pose, RoadScene, look

SEEDS = range(6)
TIMES_S = [n / 10 for n in range(600)]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_truth_is_where_the_lines_are_on_the_ground(seed: int) -> None:
    scene = RoadScene.for_camera(seed)
    drive = Drive(scene, manoeuvres=True)
    for time_s in TIMES_S[::7]:
        truth = drive.truth(time_s)
        view = look(
            scene.camera, scene.course, drive.distance_m(time_s), 1280, 720, pose=drive.pose(time_s)
        )
        middle = np.polynomial.Polynomial.fit(view.z_m[:60], -view.centre_m[:60], 4).convert()
        offset_m, slope, bend, *_ = middle.coef.tolist()
        assert -slope == pytest.approx(truth.heading_rad, abs=math.radians(0.01))
        assert 2 * bend == pytest.approx(truth.curvature_1pm, abs=1e-5)
        left_m = [offset_m - line.offset_m for line in scene.lines]
        upper = min(y for y in left_m if y > 0)
        lower = max(y for y in left_m if y < 0)
        if min(upper, -lower) < 0.1:
            continue  # on a line: which lane the vehicle is in is a matter of centimetres
        assert -(upper + lower) / 2 == pytest.approx(truth.offset_m, abs=0.002)
        assert upper - lower == pytest.approx(truth.width_m)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_minute_has_two_departures_and_two_lane_changes(seed: int) -> None:
    drive = Drive(RoadScene.for_camera(seed), manoeuvres=True)
    truths = [drive.truth(time_s) for time_s in TIMES_S]
    departures = [side for side, _ in itertools.groupby(t.departing for t in truths)]
    changes = [side for side, _ in itertools.groupby(t.changing for t in truths)]
    assert sorted(filter("none".__ne__, departures)) == ["left", "right"]
    assert sorted(filter("none".__ne__, changes)) == ["left", "right"]
    assert max(abs(t.offset_m) for t in truths) <= truths[0].width_m / 2
    assert max(drive.pose(t).pitch_rad for t in TIMES_S) == pytest.approx(math.radians(1.2))


def test_a_departing_wheel_is_beyond_the_line() -> None:
    drive = Drive(RoadScene.for_camera(7), manoeuvres=True)
    for truth in map(drive.truth, TIMES_S):
        beyond_m = abs(truth.offset_m) + HALF_WIDTH_M - truth.width_m / 2
        if truth.changing == "none":
            assert (truth.departing != "none") == (beyond_m > 0)


def test_the_vehicle_moves_where_it_points() -> None:
    drive = Drive(RoadScene.for_camera(7), manoeuvres=True)
    for time_s in TIMES_S:
        now, then = drive.truth(time_s), drive.truth(time_s + 0.1)
        moved_m = math.remainder(then.offset_m - now.offset_m, now.width_m)
        mean = (now.heading_rad + then.heading_rad) / 2
        assert math.tan(mean) == pytest.approx(moved_m / (0.1 * SPEED_MPS), abs=2e-3)


def test_without_manoeuvres_the_vehicle_keeps_its_lane() -> None:
    drive = Drive(RoadScene.for_camera(7), manoeuvres=False)
    assert all(drive.pose(time_s) == Pose() for time_s in TIMES_S)
    assert {drive.truth(time_s).departing for time_s in TIMES_S} == {"none"}


def test_braking_moves_the_horizon_up() -> None:
    scene = RoadScene.for_camera(7)
    level, braking = (
        look(scene.camera, scene.course, 0.0, 1280, 720, pose=Pose(pitch_rad=pitch))
        for pitch in (0.0, 0.02)
    )
    np.testing.assert_allclose(level.row_px - braking.row_px, 0.02 * level.scale_px)
