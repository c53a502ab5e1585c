"""Proposals become lanes in the frame's pixels, whatever the frame's size."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.contract import LoadContext
from edge_server.backends.vision import lane_decode
from edge_server.backends.vision.lane_decode import frame_points
from edge_server.errors import ModelConfigError
from edge_server.gpu.device import Devices
from edge_server.lanes.decode import COLUMN_COUNT, ROW_COUNT, DecodedLanes
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.files import ModelFiles
from edge_server.tensors import Tensor

FILES = ModelFiles("d", Path("d"), {1: Path("d/1")})
SHIPPED = (Path(__file__).parents[4] / "models" / "lane_decode" / "config.pbtxt").read_text()


def completed(text: str) -> ModelConfig:
    config = ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))
    return lane_decode.complete(FILES, 1, config)


def test_a_lane_is_given_in_the_pixels_of_its_frame() -> None:
    x = np.full((1, ROW_COUNT), np.nan, np.float32)
    x[0, :2] = (0.25, 0.5)
    points = frame_points(DecodedLanes(x, np.ones(1, np.float32)), height=710, width=1000)
    np.testing.assert_allclose(points[0, :2], [[250, 710], [500, 700]])
    assert points[0, -1, 1] == 0


def test_where_a_lane_has_no_point_x_is_minus_two() -> None:
    x = np.full((1, ROW_COUNT), np.nan, np.float32)
    x[0, 1] = 0.5
    points = frame_points(DecodedLanes(x, np.ones(1, np.float32)), height=710, width=1000)
    assert points[0, :, 0].tolist() == [-2, 500, *[-2] * (ROW_COUNT - 2)]


def test_no_proposal_above_the_threshold_is_an_empty_answer_not_an_error() -> None:
    model = lane_decode.load(LoadContext(Path("d/1"), completed(SHIPPED), Devices()))
    proposals = np.zeros((1, 2784, COLUMN_COUNT), np.float32)
    proposals[..., 0] = 9  # surely no lane
    answer = model._run(
        {
            "predict_lanes": Tensor(proposals),
            "image_size": Tensor(np.array([[720, 1280]], np.int32)),
        },
        frozenset({"lane_points", "lane_scores"}),
    )
    assert answer["lane_points"].shape == (1, 0, ROW_COUNT, 2)
    assert answer["lane_scores"].shape == (1, 0)


def test_the_confidence_is_mapped_and_the_threshold_is_the_network_s() -> None:
    unmapped = re.sub(r'parameters { key: "confidence_.*', "", SHIPPED)
    text = unmapped + (
        'parameters { key: "confidence_temperature" value { string_value: "2.0" } }'
        'parameters { key: "confidence_bias" value { string_value: "-1.0" } }'
    )
    proposals = np.zeros((1, 2784, COLUMN_COUNT), np.float32)
    proposals[..., 0] = 9  # surely no lane
    for row, (logit, x_px) in enumerate(((2.0, 100.0), (0.0, 300.0), (-2.0, 500.0))):
        proposals[0, row] = 0
        proposals[0, row, 1], proposals[0, row, 4], proposals[0, row, 5:] = logit, 72, x_px
    inputs = {
        "predict_lanes": Tensor(proposals),
        "image_size": Tensor(np.array([[720, 1280]], np.int32)),
    }
    scores = []
    for each in (unmapped, text):
        context = LoadContext(Path("d/1"), completed(each), Devices())
        outputs = lane_decode.load(context)._run(inputs, frozenset({"lane_scores"}))
        scores.append(outputs["lane_scores"].array[0])
    # The third is below the threshold in both; sigmoid(2) becomes sigmoid(2 / 2 - 1).
    np.testing.assert_allclose(scores[0], [1 / (1 + np.exp(-2)), 0.5], rtol=1e-5)
    np.testing.assert_allclose(scores[1], [0.5, 1 / (1 + np.exp(1))], rtol=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("dims: [ 2784, 77 ]", "dims: [ 2784, 78 ]", "has two inputs"),
        ("dims: [ 2784, 77 ]", "dims: [ 77 ]", "has two inputs"),
        ("dims: [ 2 ]", "dims: [ 1, 2 ]", "has two inputs"),
        ("dims: [ -1, 72, 2 ]", "dims: [ -1, 71, 2 ]", "has two outputs"),
        ('"0.25"', '"high"', 'expected a number; got "high"'),
        ('"0.25"', '"1"', "score_threshold: expected a number < 1.0"),
        ('"0.25"', '"nan"', "score_threshold: expected a number"),
        ('"5"', '"0"', "max_lanes: expected a whole number >= 1"),
        ('"logits"', '"softmax"', "Invalid enum value 'softmax'"),
        (
            'key: "max_lanes"',
            'key: "most_lanes"',
            "unknown field `most_lanes`.*knows: score_threshold",
        ),
    ],
)
def test_other_tensors_or_parameters_are_refused(old: str, new: str, says: str) -> None:
    assert old in SHIPPED
    with pytest.raises(ModelConfigError, match=f"^d/config.pbtxt: .*{says}"):
        completed(SHIPPED.replace(old, new))
