"""Outputs are readable: lanes as lanes, short arrays in full, long ones by what they span."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.cli.infer import as_object, lanes_of, lines
from edge_server.cli.main import run_command
from edge_server.model_config.config import ModelConfig

ENSEMBLE = Path(__file__).parents[4] / "models/lane_detection/config.pbtxt"


def lane_config() -> ModelConfig:
    return ModelConfig.of(text_format.Parse(ENSEMBLE.read_text(), pb.ModelConfig()))


def test_lanes_are_printed_as_lanes() -> None:
    points = np.full((1, 1, 72, 2), -1, np.float32)
    points[0, 0, :3] = [[10, 700], [12, 690], [14, 680]]
    outputs = {"lane_points": points, "lane_scores": np.array([[0.5]], np.float32)}
    lanes = lanes_of(lane_config(), outputs)
    assert list(lines(lane_config(), outputs, 12.34, lanes)) == [
        "lane_detection: 12.3 ms",
        "1 lanes",
        "  1: score 0.50, 3 points from (10, 700) to (14, 680) px",
    ]


def test_other_outputs_are_printed_with_type_and_shape() -> None:
    config = ModelConfig.of(pb.ModelConfig(name="m"))
    outputs = {
        "y": np.array([[1.5, 2]], np.float32),
        "long": np.arange(100, dtype=np.int32),
        "names": np.array([b"0.9:3:cat", b"\x00\xff"], np.object_),
    }
    assert lanes_of(config, outputs) is None
    text = list(lines(config, outputs, 1, None))
    assert text[1:4] == ["y: FP32 [1, 2]", "  [1.5, 2. ]", "long: INT32 [100]"]
    assert text[4] == "  from 0 to 99, mean 49.5; it begins with"
    assert text[-3:] == ["names: BYTES [2]", "  0.9:3:cat", "  '\\x00�'"]
    found = json.loads(json.dumps(as_object(config, outputs, 1)))["outputs"]
    assert found[0] == {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.0]}
    assert len(found[1]["data"]) == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m"], "one of the arguments --image --input is required"),
        (["m", "--input", "x"], "--input: x: give it as NAME=FILE"),
        (["m", "--image", "a", "--save", "a.txt"], "give a name that ends in .png, .jpg or .npz"),
        (["m", "--image", "a", "--classes", "0"], "give a whole number, 1 or above"),
    ],
)
def test_a_wrong_command_is_a_usage_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(["infer", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
