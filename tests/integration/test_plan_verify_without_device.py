"""A plan is held against its ONNX file with the same inputs, within what its precision allows.

Where there is no GPU another ONNX file stands where the plan would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx
import pytest
from onnx import TensorProto, helper

from edge_server.cli.plan.target import find_target
from edge_server.cli.plan.verification import (
    verify,
)
from edge_server.errors import Unavailable

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


def test_without_a_device_verify_says_what_is_missing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    (model / "1" / "model.plan").write_bytes(b"plan")
    with pytest.raises(Unavailable, match="verify runs the plan, which takes its device: no CUDA"):
        verify(find_target("m", [model.parent]), None, 1)
