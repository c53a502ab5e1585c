"""The lanes of one frame, in px of the camera's picture, or an error with what came instead."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from unit.pipeline.given_lanes import LANES, GivenLanes, data_plane, frame

from edge_server.cameras.frame import UsefulSize
from edge_server.errors import DeadlineExceeded
from edge_server.pipeline.fair_shares import FairShares
from edge_server.pipeline.lane_model import LaneModel, NoLanes
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from edge_server.backends.contract import Tensors


def asked(model: GivenLanes, dims: str = "[-1, -1, 3]") -> LaneModel:
    return LaneModel(data_plane(model, dims=dims), "lane_detection", UsefulSize(), FairShares())


def test_lanes_of_an_image_that_the_decoder_made_smaller_are_in_px_of_the_cameras_picture() -> None:
    found = asked(GivenLanes()).detect(replace(frame(0), picture_size=(64, 18)))
    np.testing.assert_array_equal(found.lanes[0].points, np.tile([400, 200], (10, 1)))
    assert (found.model_name, found.model_version) == ("lane_detection", "4")


def test_a_camera_keeps_the_size_of_its_model_where_another_one_was_only_tried() -> None:
    useful = UsefulSize()
    model = LaneModel(data_plane(GivenLanes()), "lane_detection", useful, FairShares())
    model.detect(frame(0))
    useful.size = (8, 8)
    model.detect(frame(1))
    assert useful.size is None


def test_rows_without_a_point_are_no_part_of_a_lane() -> None:
    (lane,) = asked(GivenLanes()).detect(frame(0)).lanes
    assert lane.points.shape == (10, 2)
    assert lane.score == pytest.approx(0.9)


def test_another_response_is_no_lanes() -> None:
    class Other(GivenLanes):
        def run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
            return {**super().run(inputs, outputs), "lane_points": Tensor(LANES[:0])}

    with pytest.raises(NoLanes, match=r"returned 'lane_points' \(0, 2, 72, 2\)"):
        asked(Other()).detect(frame(0))


def test_a_frame_whose_time_is_over_gets_no_lanes() -> None:
    with pytest.raises(DeadlineExceeded):
        asked(GivenLanes()).detect(frame(0), time.monotonic() - 1.0)


@pytest.mark.parametrize(("dims", "live"), [("[-1, -1, 3]", "bgr"), ("[-1, -1, 2]", "yuy2")])
def test_a_grey_image_has_the_format_that_the_model_takes_of_a_live_camera(
    dims: str, live: str
) -> None:
    model = asked(GivenLanes(), dims)
    assert model.grey_image(live=False).pixel_format.value == "bgr"
    assert model.grey_image(live=True).pixel_format.value == live
