"""ONNX files and configurations for tests, and what a model of them answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx
from google.protobuf import text_format
from onnx import helper
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends import onnxruntime
from edge_server.backends.contract import ExecuteRequest, LoadContext
from edge_server.gpu.device import Devices
from edge_server.inference.registry import Snapshot
from edge_server.model_config.config import ON_CPU, USUAL_COMPLETION, Completion, ModelConfig
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from edge_server.model_config.files import ModelFiles

X = ' input { name: "x" data_type: TYPE_FP32 dims: 4 }'
Y = ' output { name: "y" data_type: TYPE_FP32 dims: 4 }'


def config(text: str, completion: Completion = USUAL_COMPLETION) -> ModelConfig:
    head = 'name: "m" backend: "onnxruntime" default_model_filename: "model.onnx" '
    return ModelConfig.of(text_format.Parse(head + text, pb.ModelConfig()), completion)


def write_graph(
    files: ModelFiles,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    initializers: tuple[onnx.TensorProto, ...] = (),
) -> None:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 8
    files.versions[1].mkdir()
    onnx.save(model, files.versions[1] / "model.onnx")


def answer(
    model_config: ModelConfig,
    directory: Path,
    array: np.ndarray | None,
    outputs: frozenset[str] = frozenset({"y"}),
    **more: np.ndarray,
) -> object:
    """What the model answers to `x` and the inputs in `more`."""
    model = onnxruntime.load(LoadContext(directory, model_config, Devices()))
    return answered(model, array, outputs, **more)


def answered(
    model: onnxruntime.OnnxModel,
    array: np.ndarray | None,
    outputs: frozenset[str] = frozenset({"y"}),
    **more: np.ndarray,
) -> object:
    """What a loaded model answers likewise."""
    instance = model.make_instance("m_0", ON_CPU)
    answers: list[object] = []
    inputs = {name: Tensor(value) for name, value in more.items()}
    if array is not None:
        inputs["x"] = Tensor(array)
    instance.execute(
        [
            ExecuteRequest(
                inputs,
                outputs,
                lambda a, _final, _parameters=None: answers.append(a),
                InferRequest("m", inputs),
                Snapshot({}),
            )
        ]
    )
    return answers[0]
