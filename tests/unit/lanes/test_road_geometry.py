"""Known roads come back from their pictures, with errors that are as large as stated."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from unit.lanes.roads import CAMERA, FlatRoad, cameras, flat_roads, lane_of, lanes_of

from edge_server.lanes.camera_model import CameraModel, Lens, Mounting
from edge_server.lanes.paint import image_lines
from edge_server.lanes.road_geometry import PitchFilter, ego_of, road_of
from edge_server.lanes.types import Ego, GroundLane, Lane, Polynomial, indices_by_picture
from edge_server.tools.road.scene import RoadScene, look


@given(cameras(), flat_roads())
def test_a_known_road_comes_back_from_its_picture(camera: CameraModel, road: FlatRoad) -> None:
    seen = lanes_of(road, camera)
    located = road_of(seen, camera)
    ego = located.ego
    boundaries = {lane.index: lane.ground for lane in located.lanes}
    left, right = boundaries.get(-1), boundaries.get(1)
    assume(left is not None and right is not None)
    assert left is not None
    assert right is not None
    reach_m = min(left.polynomial.x_max_m, right.polynomial.x_max_m)
    near_m = max(left.polynomial.x_min_m, right.polynomial.x_min_m)
    # Lines that a narrow or high camera sees from far ahead on say little of the front axle.
    assume(near_m < 10.0 and reach_m > 30.0)
    assert ego.lateral_offset_m == pytest.approx(road.offset_m, abs=0.05)
    assert ego.lane_width_m == pytest.approx(road.width_m, abs=0.08)
    assert ego.heading_error_rad == pytest.approx(road.heading_rad, abs=np.radians(0.3))
    if ego.curvature_1pm is not None:
        bend = max(abs(road.curvature), 1 / 500)
        assert ego.curvature_1pm == pytest.approx(road.curvature, abs=0.1 * bend)


@given(cameras(), flat_roads())
def test_every_ground_point_lies_on_its_line(camera: CameraModel, road: FlatRoad) -> None:
    # One at a time: a line that the picture does not show has no lane.
    seen = [(place, lane) for place in (0.5, -0.5) for lane in lanes_of(road, camera, (place,))]
    for place, lane in seen:
        (located,) = road_of([lane], camera).lanes
        if located.ground is None:
            continue
        points = located.ground.points.astype(np.float64)
        assert (np.diff(points[:, 0]) >= 0).all()
        line = road.boundary(place)
        nearest = np.abs(points[:, None] - line[None]).max(axis=2).min(axis=1)
        assert nearest.max() < 0.06
        polynomial = located.ground.polynomial
        assert polynomial.x_min_m == pytest.approx(points[0, 0], abs=1e-3)
        assert polynomial.x_max_m == pytest.approx(points[-1, 0], abs=1e-3)


def test_the_ego_lane_is_between_minus_one_and_one() -> None:
    road = FlatRoad(offset_m=0.3, curvature=1 / 300)
    lanes = lanes_of(road, CAMERA, (-1.5, 0.5, 1.5, -0.5))
    assert [lane.index for lane in road_of(lanes, CAMERA).lanes] == [2, -1, -2, 1]


def test_a_line_beyond_a_lane_that_is_not_seen_is_not_the_ego_lanes() -> None:
    lanes = lanes_of(FlatRoad(), CAMERA, (1.5, -0.5))
    road = road_of(lanes, CAMERA)
    assert [lane.index for lane in road.lanes] == [-2, 1]
    assert road.ego.lateral_offset_m is None
    assert road.ego.lane_width_m is None
    assert road.ego.heading_error_rad == pytest.approx(0.0, abs=np.radians(0.3))


@pytest.mark.parametrize("curvature", [0.0, 1 / 400, -1 / 400])
def test_without_a_calibration_the_place_is_guessed_by_the_picture(curvature: float) -> None:
    lanes = lanes_of(FlatRoad(offset_m=0.3, curvature=curvature), CAMERA, (-1.5, 0.5, 1.5, -0.5))
    size = CAMERA.lens.width, CAMERA.lens.height
    assert indices_by_picture([lane.points for lane in lanes], *size) == [2, -1, -2, 1]


@pytest.mark.parametrize(
    "points",
    [
        [[500, 400], [510, 395], [520, 390]],  # it begins far above the bottom
        [[500, 600], [520, 600], [540, 600]],
        [[np.nan, np.nan]] * 3,
        [[500, np.nan], [510, 500], [520, 390]],
    ],
)
def test_a_line_that_does_not_show_where_it_meets_the_bottom_has_no_place(
    points: list[list[float]],
) -> None:
    whole = np.array([[300, 710], [400, 560], [500, 410]], np.float32)
    lines = [np.array(points, np.float32), whole]
    assert indices_by_picture(lines, 1280, 720) == [0, -1]


def test_a_short_line_has_no_cubic_term_and_one_of_few_points_no_ground() -> None:
    (whole,) = lanes_of(FlatRoad(curvature=1 / 400), CAMERA, (0.5,))
    ground = road_of([whole], CAMERA).lanes[0].ground
    assert ground is not None
    assert ground.polynomial.coefficients[3] != 0
    near = Lane(whole.points[whole.points[:, 1] > 480.0], 0.9)
    ground = road_of([near], CAMERA).lanes[0].ground
    assert ground is not None
    assert ground.polynomial.x_max_m - ground.polynomial.x_min_m < 15.0
    assert abs(ground.polynomial.coefficients[3]) < 1e-7
    assert road_of([Lane(whole.points[:3], 0.9)], CAMERA).lanes[0].ground is None


def test_no_lanes_are_no_road() -> None:
    road = road_of([], CAMERA)
    assert road.lanes == ()
    assert road.ego == Ego()
    assert road.pitch is None


def test_a_lane_that_is_not_finite_has_no_ground_and_spoils_no_other() -> None:
    lanes = lanes_of(FlatRoad(), CAMERA, (0.5, -0.5))
    broken = Lane(np.full_like(lanes[0].points, np.nan), 0.9)
    located = road_of([broken, lanes[1]], CAMERA).lanes
    assert located[0].ground is None
    assert located[1].ground is not None


def known_to(camera: CameraModel, pitch_std_rad: float) -> CameraModel:
    """Return the camera with a pitch of that deviation."""
    return CameraModel(camera.lens, replace(camera.mounting, pitch_std_rad=pitch_std_rad))


def erring(lanes: list[Lane], camera: CameraModel, rng: np.random.Generator) -> list[Lane]:
    """Return the lanes with errors as large and as alike as they are taken to be."""
    error_px = image_lines(lanes, camera).error_px
    moved = error_px @ rng.standard_normal((len(lanes), error_px.shape[2], 1)) * (1.0, 0.0)
    return [
        replace(lane, points=(lane.points + off[: len(lane.points)]).astype(np.float32))
        for lane, off in zip(lanes, moved, strict=True)
    ]


def test_the_stated_deviations_are_those_of_noisy_lines() -> None:
    """Errors in pixels and in pitch, as the covariance takes them to be: of 300 pictures about 95 %
    are within two standard deviations."""
    rng = np.random.default_rng(5)
    road = FlatRoad(0.2, 0.01, 1 / 600)
    pitch_std = np.radians(0.3)
    off: list[tuple[float, float, float]] = []
    for _ in range(300):
        actual = CAMERA.pitched(rng.normal(0.0, pitch_std))
        lanes = erring(lanes_of(road, actual, (0.5,)), actual, rng)
        (lane,) = road_of(lanes, known_to(CAMERA, pitch_std)).lanes
        assert lane.ground is not None
        polynomial = lane.ground.polynomial
        true = np.polynomial.polynomial.polyfit(*_near(road.boundary(0.5)).T, 3)
        error = polynomial.coefficients - true
        std = np.sqrt(np.diag(polynomial.covariance))
        off.append(tuple((np.abs(error) / std)[:3]))
    within = (np.array(off) < 2.0).mean(axis=0)
    assert (within > 0.93).all(), within
    # Nor are they so wide that they say nothing.
    assert (np.median(off, axis=0) > 0.15).all()


def test_the_stated_deviations_of_the_vehicle_in_its_lane_are_those_of_noisy_lines() -> None:
    """Of 300 pictures, 93 to 98 % are within two standard deviations; of the curvature more, as
    roads bend less than its prior allows."""
    rng = np.random.default_rng(6)
    road = FlatRoad(0.2, 0.01, 1 / 600)
    pitch_std = np.radians(0.1)
    names = ("lateral_offset", "heading_error", "curvature", "lane_width")
    units = ("m", "rad", "1pm", "m")
    true = road_of(lanes_of(road, CAMERA), CAMERA).ego
    off = []
    for _ in range(300):
        actual = CAMERA.pitched(rng.normal(0.0, pitch_std))
        lanes = erring(lanes_of(road, actual), actual, rng)
        ego = road_of(lanes, known_to(CAMERA, pitch_std)).ego
        off.append(
            [
                abs(getattr(ego, f"{name}_{unit}") - getattr(true, f"{name}_{unit}"))
                / getattr(ego, f"{name}_std_{unit}")
                for name, unit in zip(names, units, strict=True)
            ]
        )
    within = (np.array(off) < 2.0).mean(axis=0)
    assert (within > 0.93).all(), within
    assert (within[[0, 1, 3]] < 0.98).all(), within


def test_a_frame_corrects_the_pitch_by_which_its_own_lanes_are_placed() -> None:
    """Then pixels and road are converted by one pitch, and the deviation is of what is left."""
    rng = np.random.default_rng(8)
    road = FlatRoad(0.2, 0.01, 1 / 600)
    off = []
    for degrees in rng.normal(0.0, 0.7, 200):
        pitch = PitchFilter(np.radians(0.2))
        pitch.predict(0)
        seen = lanes_of(road, CAMERA.pitched(np.radians(degrees)), (0.5, -0.5))
        located = road_of(erring(seen, CAMERA, rng), CAMERA, pitch=pitch)
        for place, lane in zip((0.5, -0.5), located.lanes, strict=True):
            assert lane.ground is not None
            polynomial = lane.ground.polynomial
            x_m = np.array([8.0, 16.0, 32.0])
            powers = np.vander(x_m, 4, increasing=True)
            error = powers @ polynomial.coefficients - np.interp(x_m, *road.boundary(place).T)
            std = np.sqrt(np.einsum("ij,jk,ik->i", powers, polynomial.covariance, powers))
            off.append(np.abs(error) / std)
    within = (np.array(off) < 2.0).mean(axis=0)
    assert (within > 0.93).all(), within
    assert (np.median(off, axis=0) > 0.1).all()


@pytest.mark.parametrize("radius_m", [10_000, -10_000])
def test_a_crest_or_a_sag_displaces_lines_by_as_much_as_is_stated(radius_m: float) -> None:
    """Twice the deviation is one of 10 km; the same frame's pitch errs by it too."""
    grounds = []
    for rising_1pm in (0.0, 1 / radius_m):
        pitch = PitchFilter(np.radians(0.2))
        pitch.predict(0)
        lines = [
            lane_of(FlatRoad().boundary(place), CAMERA, rising_1pm=rising_1pm)
            for place in (0.5, -0.5)
        ]
        located = road_of([line for line in lines if line is not None], CAMERA, pitch=pitch)
        grounds.append([lane.ground for lane in located.lanes])
    x_m = np.array([8.0, 16.0, 32.0, 48.0])
    for flat, risen in zip(*grounds, strict=True):
        assert flat is not None
        assert risen is not None
        powers = np.vander(x_m, 4, increasing=True)
        moved = powers @ (risen.polynomial.coefficients - flat.polynomial.coefficients)
        by_crest = powers @ flat.polynomial.by_angles[:, -1]
        stated = math.copysign(2.0, radius_m) * by_crest
        assert moved == pytest.approx(stated, rel=0.25, abs=0.01)


def _near(line: np.ndarray) -> np.ndarray:
    return line[(line[:, 0] > 0) & (line[:, 0] < 45)]


@given(cameras(), flat_roads(), st.floats(-1.5, 1.5))
def test_the_pitch_shows_in_how_the_lane_widens(
    camera: CameraModel, road: FlatRoad, degrees: float
) -> None:
    lanes = lanes_of(road, camera.pitched(np.radians(degrees)), (0.5, -0.5))
    located = road_of(lanes, known_to(camera, np.radians(1.0)))
    assume(located.pitch is not None and len(lanes) == 2)
    assert located.pitch is not None
    error = np.degrees(located.pitch.rad) - degrees
    # In bends to first order; the rest shows once the first estimate is taken out.
    assert abs(error) < 0.05 + 0.25 * abs(degrees)
    pitched = camera.pitched(located.pitch.rad)
    again = road_of(lanes, known_to(pitched, np.radians(0.3))).pitch
    assume(again is not None)
    assert again is not None
    assert np.degrees(located.pitch.rad + again.rad) == pytest.approx(degrees, abs=0.1)


def test_a_minutes_drive_stays_within_the_figures() -> None:
    """The renderer's own projection, which knows nothing of the camera model, is the truth."""
    scene = RoadScene.for_camera(3)
    width, height = 1280, 720
    focal = scene.camera.focal * width
    lens = Lens(
        "pinhole", width, height, focal, focal, width / 2, scene.camera.horizon * height, (0.0,) * 5
    )
    camera = CameraModel(lens, Mounting(scene.camera.height_m))
    # Sharper bends than the demo's: down to 250 m.
    course = replace(scene.course, curvature_per_m=1 / 250)
    bends = 0
    for number in range(60 * 10):
        distance_m = number * 2.5
        view = look(scene.camera, course, distance_m, width, height)
        rows = np.linspace(height, 0, 72)
        rows = rows[(rows > view.row_px[-1]) & (rows < view.row_px[0])]
        z_m = np.interp(-rows, -view.row_px, view.z_m)
        lanes = []
        for line in scene.lines:
            points = view.project(line.offset_m, z_m)
            points = points[(points[:, 0] >= 0) & (points[:, 0] < width)]
            if len(points) > 1:
                lanes.append(Lane(points.astype(np.float32), 0.9))
        ego = road_of(lanes, camera).ego
        phase = 2 * np.pi * distance_m / course.curvature_wavelength_m + course.curvature_phase
        # The renderer's curvature is positive to the right, and its sway moves the lane left.
        curvature = -course.curvature_per_m * np.sin(phase)
        sway = course.sway_m * np.sin(2 * np.pi * distance_m / course.sway_wavelength_m)
        assert ego.lateral_offset_m == pytest.approx(-sway, abs=0.05)
        assert ego.heading_error_rad == pytest.approx(course.heading_rad, abs=np.radians(0.3))
        if abs(curvature) >= 1 / 500:
            bends += 1
            assert ego.curvature_1pm == pytest.approx(curvature, rel=0.1)
    assert bends > 100


@pytest.mark.parametrize(
    ("bend", "std", "known"),
    [(0.0, 2e-4, True), (0.0, 3e-3, False), (4e-3, 3e-3, True), (1e-2, 8e-3, False)],
)
def test_curvature_is_unknown_where_its_deviation_says_nothing_of_the_road(
    bend: float, std: float, known: bool
) -> None:
    covariance = np.diag([1e-4, 1e-8, (std / 2) ** 2, 1e-12])
    ground = GroundLane(
        np.zeros((2, 2), np.float32),
        Polynomial(np.array([1.8, 0.0, bend / 2, 0.0]), covariance, 3.0, 40.0),
    )
    lane = Lane(np.zeros((2, 2), np.float32), 0.9, index=-1, ground=ground)
    assert (ego_of([lane]).curvature_1pm is not None) is known
