"""What is published of a frame is drawn into its picture, each thing in its own way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_server.cameras.lane_video import LaneVideo, draw_lane_frame
from edge_server.errors import SourceError
from edge_server.lanes.types import Departure, Ego, GroundLane, Lane, LaneFrame, Polynomial

WIDTH, HEIGHT = 640, 360
GREY = np.full((HEIGHT, WIDTH, 3), 90, np.uint8)
# Below the texts and the view from above, above the labels of the lines.
OWN_LANE = (slice(200, 230), slice(280, 340))


def line(x_px: float, index: int, aside_m: float, **more: object) -> Lane:
    y = np.linspace(359, 170, 40)
    points = np.stack([np.full_like(y, x_px), y], axis=1).astype(np.float32)
    polynomial = Polynomial(np.array([aside_m, 0, 0, 0.0]), np.eye(4) * 1e-6, 5.0, 45.0)
    ground = GroundLane(np.array([[5, aside_m], [45, aside_m]], np.float32), polynomial)
    return replace(Lane(points, 0.9, id=3, index=index, ground=ground), **more)


def frame(*lanes: Lane, **more: object) -> LaneFrame:
    made = LaneFrame("front", 7, 0, 0, 0, WIDTH, HEIGHT, "m", lanes=lanes, ego=Ego(0.1))
    return replace(made, **more)


def painted(lane: Lane) -> tuple[set[tuple[int, ...]], float]:
    """The colours in the middle of a line, without its edge; and the painted share of its rows."""
    x = round(float(lane.points[0, 0]))
    column = draw_lane_frame(GREY, frame(lane, ego=None))[172:228, x]
    marked = (column != 90).any(axis=1) & (column != 0).any(axis=1)
    return {tuple(map(int, pixel)) for pixel in column[marked]}, float(marked.mean())


def test_a_line_has_the_colour_of_its_paint() -> None:
    assert (255, 255, 255) in painted(line(200, -1, 1.8, type="solid", color="white"))[0]
    assert (0, 210, 255) in painted(line(200, -1, 1.8, type="solid", color="yellow"))[0]
    assert (235, 190, 60) in painted(line(200, -1, 1.8))[0]


def test_dashes_are_dashes_and_what_is_predicted_is_dots() -> None:
    solid = painted(line(200, -1, 1.8, type="solid"))[1]
    dashed = painted(line(200, -1, 1.8, type="dashed"))[1]
    assert solid == 1.0
    assert 0.3 < dashed < 0.9
    assert painted(line(200, -1, 1.8, type="solid", predicted=True))[1] < 1.0


@pytest.mark.parametrize(
    ("departure", "strongest"),
    [(None, 1), (Departure(), 1), (Departure("warning", "left"), 2)],
    ids=["off", "none", "warning"],
)
def test_the_own_lane_is_filled_and_red_with_a_warning(
    departure: Departure | None, strongest: int
) -> None:
    bounds = line(200, -1, 1.8), line(420, 1, -1.8)
    picture = draw_lane_frame(GREY, frame(*bounds, ego=Ego(0.1, departure=departure)))
    inside = picture[OWN_LANE].reshape(-1, 3).mean(axis=0)
    assert inside.argmax() == strongest
    assert (GREY == 90).all(), "the frame itself is another's"
    (only,) = np.unique(draw_lane_frame(GREY, frame(bounds[0]))[OWN_LANE])
    assert only == 90, "one boundary makes no lane"


def test_lanes_in_metres_are_seen_from_above() -> None:
    on_road, in_pixels = line(200, -1, 1.8), line(200, -1, 1.8, ground=None)
    corner = (slice(0, 150), slice(WIDTH - 95, WIDTH))
    assert (draw_lane_frame(GREY, frame(in_pixels))[corner] == 90).all()
    assert (draw_lane_frame(GREY, frame(on_road))[corner] != 90).mean() > 0.9


def test_a_lane_that_is_not_finite_and_a_text_that_is_not_ascii_are_drawn_as_far_as_can_be() -> (
    None
):
    bad = line(200, -1, 1.8, points=np.full((5, 2), np.nan, np.float32))
    drawn = draw_lane_frame(GREY, frame(bad, failure="caf\u00e9: no lanes"))
    assert (drawn[OWN_LANE] == 90).all()
    assert (drawn[:60, :300] != 90).any()


@pytest.mark.parametrize("shift_px", [-2000.0, 2000.0])
def test_lines_beyond_the_picture_leave_it_as_it_is(shift_px: float) -> None:
    far = [line(x, i, m) for x, i, m in ((200, -1, 1.8), (420, 1, -1.8))]
    lanes = [replace(each, points=each.points + np.float32(shift_px)) for each in far]
    assert (draw_lane_frame(GREY, frame(*lanes))[OWN_LANE] == 90).all()


def test_a_video_that_cannot_be_written_is_named_before_the_first_frame() -> None:
    with pytest.raises(SourceError, match=r"drive\.webm: videos are written as \.mp4 or \.avi"):
        LaneVideo(Path("drive.webm"))
    with pytest.raises(SourceError, match="cannot be written"):
        LaneVideo(Path("/proc/nowhere/drive.mp4"))
