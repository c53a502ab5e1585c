"""The networks in INT8 and FP16 beside the shipped one are made of it, as TensorRT takes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from edge_server.backends.tensorrt.plan_options import (
    MADE_OF,
    BuildOptions,
    Precision,
    network_of,
    precision_file,
    sha256_of,
)

SHIPPED = Path(__file__).parents[3] / "models" / "laneDetect_model" / "1" / "model.onnx"


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_it_is_of_the_network_that_ships(precision: Precision) -> None:
    """After a training: `training/reduce_precision.py`."""
    assert network_of(SHIPPED, BuildOptions(precision), (11, 4))[0].name != SHIPPED.name
    model = onnx.load(str(precision_file(SHIPPED, precision)))
    made_of = [each.value for each in model.metadata_props if each.key == MADE_OF]
    assert made_of == [sha256_of(SHIPPED)]
    shipped = onnx.load(str(SHIPPED)).graph
    assert list(model.graph.input) == list(shipped.input)
    assert [each.name for each in model.graph.output] == [each.name for each in shipped.output]


NETWORKS = [
    *SHIPPED.parent.glob("*.onnx"),
    *(Path(__file__).parents[3] / "examples" / "networks").glob("*/1/*.onnx"),
]


@pytest.mark.parametrize("path", NETWORKS, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_axes_are_stored_as_tensorrt_8_wants_them(path: Path) -> None:
    """What computes them, TensorRT 8.6 refuses on an H200: "does not support dynamic axes"."""
    graph = onnx.load(str(path)).graph
    stored = {tensor.name for tensor in graph.initializer}
    stored |= {node.output[0] for node in graph.node if node.op_type == "Constant"}
    axes = {"Slice": 3, "Squeeze": 1, "Unsqueeze": 1, "ReduceSum": 1, "ReduceMean": 1, "Pad": 3}
    for node in graph.node:
        computed = set(node.input[axes.get(node.op_type, len(node.input)) :][:1]) - stored - {""}
        assert not computed, f"{node.op_type} {node.name}: {computed}"


def test_the_weights_of_convolutions_are_int8_symmetric_with_a_scale_for_each_channel() -> None:
    graph = onnx.load(str(precision_file(SHIPPED, "int8"))).graph
    tensors = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    writers = {output: node for node in graph.node for output in node.output}
    convolutions = [node for node in graph.node if node.op_type in ("Conv", "ConvTranspose")]
    assert convolutions
    for node in convolutions:
        weight = writers[node.input[1]]
        assert weight.op_type == "DequantizeLinear"
        values, scale, zero = (tensors[name] for name in weight.input)
        assert values.dtype == np.int8
        axis = next(each.i for each in weight.attribute if each.name == "axis")
        assert scale.shape == (values.shape[axis],)
        assert not zero.any()
        activation = writers[node.input[0]]
        assert activation.op_type == "DequantizeLinear"
        assert tensors[activation.input[2]].dtype == np.int8
        assert not tensors[activation.input[2]].any()
