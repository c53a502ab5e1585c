"""An ONNX model whose runs do not end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx
from onnx import TensorProto, helper

if TYPE_CHECKING:
    from pathlib import Path


def write_endless_onnx(path: Path, *, always: bool = False) -> None:
    """Write a model that loops as often as its input `times` says; with `always`, without end."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["more"], ["more_out"]),
            helper.make_node("Identity", ["value"], ["value_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("more", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value", TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("more_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value_out", TensorProto.FLOAT, [1]),
        ],
    )
    most = helper.make_tensor("most", TensorProto.INT64, [1], [2**62])
    graph = helper.make_graph(
        [
            helper.make_node("Max", ["times", "most"] if always else ["times"], ["wanted"]),
            helper.make_node("Squeeze", ["wanted"], ["count"]),
            helper.make_node("Loop", ["count", "", "start"], ["end"], body=body),
        ],
        "endless",
        [helper.make_tensor_value_info("times", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("end", TensorProto.FLOAT, [1])],
        [helper.make_tensor("start", TensorProto.FLOAT, [1], [0.0]), *([most] if always else [])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
