"""Models with ONNX files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from onnx import TensorProto, helper
from unit.backends.onnxruntime.graphs import write_graph

from edge_server.model_config.files import ModelFiles

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    return ModelFiles("m", tmp_path, {1: tmp_path / "1"})


@pytest.fixture
def default_model(files: ModelFiles) -> ModelFiles:
    """`y` is `x` plus `b`, which is 5 by default."""
    write_graph(
        files,
        [helper.make_node("Add", ["x", "b"], ["y"])],
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"]),
            helper.make_tensor_value_info("b", TensorProto.FLOAT, [1]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
        (helper.make_tensor("b", TensorProto.FLOAT, [1], [5.0]),),
    )
    return files
