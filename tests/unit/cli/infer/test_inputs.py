"""A request gets its inputs from files, or from a picture through the real steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.cli.infer import picture_input, read_arrays, steps_before
from edge_server.errors import InvalidRequest, SourceError
from edge_server.model_config.config import ModelConfig

MODELS = Path(__file__).parents[4] / "models"
SEVERAL = """
name: "m" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
input { name: "n" data_type: TYPE_INT64 dims: [ -1 ] }
input { name: "text" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "half" data_type: TYPE_BF16 dims: [ 3 ] }
input { name: "maybe" data_type: TYPE_FP32 dims: [ 1 ] optional: true }
"""


def config(text: str) -> ModelConfig:
    return ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))


def shipped(name: str) -> ModelConfig:
    return config((MODELS / name / "config.pbtxt").read_text())


def test_a_picture_goes_through_the_steps_before_the_model_once_each() -> None:
    calls = []

    def infer(model: str, inputs: Any) -> dict[str, Any]:
        calls.append((model, sorted(inputs)))
        if model == "lane_preprocess":
            return {"input": np.ones(3), "image_size": np.ones(2)}
        return {"predict_lanes": np.zeros(4)}

    picture = np.zeros((1, 4, 4, 3), np.uint8)
    found = steps_before(infer, shipped("lane_detection"), "lane_decode", {"image": picture})
    assert sorted(found) == ["image_size", "predict_lanes"]
    assert calls == [("lane_preprocess", ["image"]), ("laneDetect_model", ["input"])]


@pytest.mark.parametrize(
    ("model", "name"),
    [("lane_detection", "image"), ("lane_preprocess", "image"), ("laneDetect_model", None)],
)
def test_a_picture_is_what_a_model_of_bytes_in_three_dimensions_takes(
    model: str, name: str | None
) -> None:
    spec = picture_input(shipped(model))
    assert (spec and spec.name) == name


def test_an_array_of_a_file_gets_the_batch_dimension_that_it_lacks(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(2, np.float32))
    np.save(tmp_path / "b.npy", np.zeros((3, 2), np.float32))
    for name, shape in (("x", (1, 2)), ("b", (3, 2))):
        arrays = read_arrays([("x", tmp_path / f"{name}.npy")], config(SEVERAL))
        assert arrays["x"].shape == shape


def test_what_is_no_array_and_no_input_is_refused_with_the_remedy(tmp_path: Path) -> None:
    pickled, several = tmp_path / "p.npy", tmp_path / "s.npz"
    np.save(pickled, np.array([{}]), allow_pickle=True)
    np.savez(several, a=np.zeros(1))
    empty, broken = tmp_path / "e.npy", tmp_path / "b.npz"
    empty.touch()
    broken.write_bytes(several.read_bytes()[:40])
    for path, text in (
        (empty, "No data left"),
        (broken, "not a zip file"),
        (tmp_path / "missing.npy", "No such file"),
        (pickled, "allow_pickle=False"),
        (several, "has several arrays"),
    ):
        with pytest.raises(SourceError, match=text):
            read_arrays([("x", path)], config(SEVERAL))
    with pytest.raises(InvalidRequest, match=r"--input y: its inputs are x FP32 \[2\]"):
        read_arrays([("y", pickled)], config(SEVERAL))


JPEG = b"\xff\xd8\xff\xe0"


@pytest.mark.parametrize(
    ("kind", "dims", "expected"),
    [
        ("UINT8", "-1", np.frombuffer(JPEG, np.uint8)[np.newaxis]),
        ("STRING", "1", np.array([[JPEG]], np.object_)),
    ],
)
def test_the_bytes_of_any_other_file_are_an_input(
    tmp_path: Path, kind: str, dims: str, expected: np.ndarray
) -> None:
    (tmp_path / "a.jpg").write_bytes(JPEG)
    tensor = f'{{ name: "x" data_type: TYPE_{kind} dims: {dims} }}'
    found = read_arrays(
        [("x", tmp_path / "a.jpg")], config(f'name: "m" max_batch_size: 2 input {tensor}')
    )
    assert found["x"].shape == expected.shape
    assert found["x"].tolist() == expected.tolist()


def test_bytes_for_numbers_are_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(JPEG)
    with pytest.raises(InvalidRequest, match=r"this input is FP32 \[2\]; give an array"):
        read_arrays([("x", tmp_path / "a.jpg")], config(SEVERAL))
