"""Lines move onto the paint of rendered roads, and no further than it shows."""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np
import pytest
from unit.lanes.roads import as_format, bent_lines

from edge_server.lanes.paint import ImageLines, image_lines, on_paint
from edge_server.lanes.road_geometry import road_of
from edge_server.pixels import Image, PixelFormat

WIDTH, HEIGHT = 1280, 720


def errors(lines: ImageLines, truth: list[np.ndarray]) -> np.ndarray:
    return np.abs(lines.points[:, 0] - np.concatenate(truth))


def deviations(lines: ImageLines) -> np.ndarray:
    return np.sqrt((lines.error_px**2).sum(axis=2))[lines.present]


@pytest.mark.parametrize("seed", [1, 4, 7, 11])
def test_lines_move_onto_their_paint_and_say_how_certain_they_are(seed: int) -> None:
    image, camera, lanes, truth = bent_lines(seed)
    before = image_lines(lanes, camera)
    lines, marked = on_paint(lanes, Image.of_bgr(image), camera)
    assert np.median(errors(before, truth)) > 2.0
    assert np.median(errors(lines, truth)) < 0.7
    assert np.percentile(errors(lines, truth), 95) < 3.0
    # The lines in the picture stay the network's.
    assert [id(lane.points) for lane in marked] == [id(lane.points) for lane in lanes]
    assert np.median(deviations(lines)) < 0.4 * np.median(deviations(before))
    assert np.mean(errors(lines, truth) < 2 * deviations(lines) + 0.5) > 0.9


@pytest.mark.parametrize("pixel_format", list(PixelFormat))
def test_every_pixel_format_shows_where_the_paint_is(pixel_format: PixelFormat) -> None:
    image, camera, lanes, truth = bent_lines(4)
    lines, _ = on_paint(lanes, as_format(image, pixel_format), camera)
    assert np.median(errors(lines, truth)) < 0.7


def test_a_picture_that_its_decoder_made_smaller_moves_lines_as_far() -> None:
    image, camera, lanes, truth = bent_lines(4)
    half = cv2.resize(image, (WIDTH // 2, HEIGHT // 2), interpolation=cv2.INTER_AREA)
    lines, _ = on_paint(lanes, Image.of_bgr(half), camera)
    assert np.median(errors(lines, truth)) < 1.2


def test_without_paint_lines_stay_and_are_as_uncertain_as_the_network() -> None:
    image, camera, lanes, _ = bent_lines(4, bare=True)
    before = image_lines(lanes, camera)
    lines, _ = on_paint(lanes, Image.of_bgr(image), camera)
    np.testing.assert_array_equal(lines.points, before.points)
    np.testing.assert_allclose(deviations(lines), deviations(before))


def test_a_line_is_less_certain_where_its_paint_is_hidden() -> None:
    image, camera, lanes, _ = bent_lines(4)
    rows = slice(int(camera.lens.cy) + 30, int(camera.lens.cy) + 120)
    hidden = image.copy()
    hidden[rows] = hidden[rows].mean(axis=(0, 1)).astype(np.uint8)
    seen, _ = on_paint(lanes, Image.of_bgr(image), camera)
    less, _ = on_paint(lanes, Image.of_bgr(hidden), camera)
    of_rows = (seen.points[:, 1] > rows.start) & (seen.points[:, 1] < rows.stop)
    assert np.median((deviations(less) / deviations(seen))[of_rows]) > 1.5


def test_the_end_of_a_line_is_no_more_paint_than_it_is() -> None:
    image, camera, lanes, _ = bent_lines(4)
    short = [replace(lane, points=lane.points[: len(lane.points) // 3]) for lane in lanes]
    whole, _ = on_paint(lanes, Image.of_bgr(image), camera)
    cut, _ = on_paint(short, Image.of_bgr(image), camera)
    for number, lane in enumerate(short):
        # What lies beyond would have told more of the end.
        end = number, len(lane.points) - 1
        assert np.linalg.norm(cut.error_px[end]) > np.linalg.norm(whole.error_px[end])


def test_metres_follow_the_paint() -> None:
    image, camera, lanes, _ = bent_lines(4)
    lines, _ = on_paint(lanes, Image.of_bgr(image), camera)
    by_network, by_paint = road_of(lanes, camera), road_of(lanes, camera, lines=lines)
    assert by_network.pitch is not None
    assert by_paint.pitch is not None
    # A horizon that is 6 px too high is a camera that looks down less.
    assert abs(by_paint.pitch.rad) < 0.2 * abs(by_network.pitch.rad)
    assert by_paint.pitch.std_rad < by_network.pitch.std_rad


def test_a_coordinate_that_is_no_number_spoils_no_other_line() -> None:
    image, camera, lanes, _ = bent_lines(4)
    expected, _ = on_paint(lanes[1:], Image.of_bgr(image), camera)
    points = lanes[0].points.copy()
    points[[0, 5]] = np.nan
    broken = [replace(lanes[0], points=points), *lanes[1:]]
    lines, marked = on_paint(broken, Image.of_bgr(image), camera)
    np.testing.assert_allclose(lines.points[len(points) :], expected.points)
    assert len(marked) == len(lanes)
    assert len(road_of(broken, camera, lines=lines).lanes) == len(lanes)
