"""Models that add a number, so that a response shows which of them gave it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from onnx import TensorProto, helper

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def network(number: float, shape: Sequence[object] = (1,)) -> bytes:
    """An ONNX file: y = x + number, both FP32 of that shape."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "k"], ["y"])],
        "adding",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [helper.make_tensor("k", TensorProto.FLOAT, [1], [number])],
    )
    opsets = [helper.make_opsetid("", 13)]
    data: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return data


def build(folder: Path, data: bytes, config: str = 'backend: "onnxruntime"') -> Path:
    """Write a model of one version; return its folder."""
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(config)
    (folder / "1" / "model.onnx").write_bytes(data)
    return folder


def swap(repository: Path, name: str, data: bytes, config: str = 'backend: "onnxruntime"') -> None:
    """Put a whole model in the place of another, as a delivery does."""
    folder = build(repository / f".incoming-{name}", data, config)
    if (repository / name).exists():
        (repository / name).rename(repository / f".old-{name}")
    folder.rename(repository / name)
    shutil.rmtree(repository / f".old-{name}", ignore_errors=True)
