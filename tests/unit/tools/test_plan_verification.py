"""A plan is held against its ONNX file with the same inputs, within what its precision allows.

Where there is no GPU another ONNX file stands where the plan would.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edge_server.tensors import Tensor
from edge_server.tools.plan import (
    PLAN,
    REFERENCE,
    Verified,
    compare_models,
    compare_tensors,
    find_target,
    load_models,
    samples_for,
    write_beside,
)

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
platform: "onnxruntime_onnx" max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""


def write_scale(path: Path, factor: float) -> None:
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "f"], ["y"])],
        "scale",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor("f", TensorProto.FLOAT, [1], [factor])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "models" / "m"
    write_scale(directory / "1" / "model.onnx", 10)
    (directory / "config.pbtxt").write_text(CONFIG)
    return directory


def compared(
    model: Path, tmp_path: Path, factor: float, tolerance: float | None = None
) -> Verified:
    """The model, and in the plan's place one that multiplies by `factor`."""
    target = find_target("m", [model.parent])
    other = tmp_path / "other" / "model.onnx"
    write_scale(other, factor)
    write_beside(tmp_path / "beside", target, REFERENCE, target.onnx)
    write_beside(tmp_path / "beside", target, PLAN, other, platform="onnxruntime_onnx")
    with ExitStack() as stack:
        data_plane = load_models(tmp_path / "beside", stack)
        config = data_plane.find(REFERENCE, "").config
        samples = samples_for(config, target, {"x": (2, 3)}, 2)
        return compare_models(data_plane, samples, 2e-2, tolerance)


def test_what_is_near_enough_agrees(model: Path, tmp_path: Path) -> None:
    found = compared(model, tmp_path, 10.1)
    assert found.agrees
    assert [line.split(": off")[0] for line in found.lines] == [
        "random 1: y agrees",
        "random 2: y agrees",
    ]


def test_what_is_off_differs(model: Path, tmp_path: Path) -> None:
    found = compared(model, tmp_path, 10.5)
    assert not found.agrees
    assert "y differs: off by up to 0.4" in found.lines[0]


def test_a_person_may_say_how_far_off(model: Path, tmp_path: Path) -> None:
    assert compared(model, tmp_path, 10.5, tolerance=1.0).agrees


def test_what_is_no_number_or_of_another_shape_differs() -> None:
    want = Tensor(np.ones((1, 2), np.float32))
    made = Tensor(np.array([[1, np.nan]], np.float32))
    assert compare_tensors(want, made, 1.0, 1e9) == (True, "is nan at [0,1]")
    made = Tensor(np.ones((2, 2), np.float32))
    assert compare_tensors(want, made, 1.0, 1e9) == (True, "has shape [2,2], not [1,2]")


def test_recorded_inputs_come_first_with_their_tolerance(model: Path, tmp_path: Path) -> None:
    (model / "golden").mkdir()
    values = {"input.x": np.ones((1, 3), "<f4"), "output.y": np.full((1, 3), 10, "<f4")}
    np.savez(model / "golden" / "road.npz", **values, **{"tolerance.y": np.array(0.01)})
    found = compared(model, tmp_path, 10.1)
    assert not found.agrees
    assert len(found.lines) == 1
    assert found.lines[0].startswith("road.npz: y differs: off by up to 0.1")
