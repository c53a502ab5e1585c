"""ONNX models that Triton serves as they are: shapes of values, scalars, and a patient batcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper, numpy_helper
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from support.daemon_process import Process

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
DELAY_S = 3600


def write(
    model: Path, operator: str, shape: Sequence[int | str], made: tuple[int, Sequence[int | str]]
) -> None:
    """`y` of that type and shape is `operator` of `x`."""
    graph = helper.make_graph(
        [helper.make_node(operator, ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", FLOAT, shape)],
        [helper.make_tensor_value_info("y", *made)],
    )
    network = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (model / "1").mkdir(parents=True)
    onnx.save_model(network, model / "1" / "model.onnx")


def test_what_a_client_asks_in_vain_fills_no_log(
    tmp_path: Path,
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
) -> None:
    """ONNX Runtime would write a line to stderr for each run that fails."""
    table = numpy_helper.from_array(np.zeros((4, 2), np.float32), "table")
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", INT64, [1])],
        [helper.make_tensor_value_info("y", FLOAT, [1, 2])],
        [table],
    )
    network = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "models" / "rows" / "1").mkdir(parents=True)
    onnx.save_model(network, tmp_path / "models" / "rows" / "1" / "model.onnx")
    process = start(f"--model-repository={tmp_path / 'models'}")
    server = client(process)
    given = triton.InferInput("x", [1], "INT64")
    given.set_data_from_numpy(np.array([4], np.int64))
    for _ in range(20):
        with pytest.raises(InferenceServerException, match="indices element out of data bounds"):
            server.infer("rows", [given])
    assert "out of data bounds" not in process.log.read_text()


def test_models_serve_whatever_their_shapes_depend_on_and_at_once(
    tmp_path: Path,
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
) -> None:
    models = tmp_path / "models"
    # An export that states the shape of its own example.
    write(models / "places", "NonZero", [3], (INT64, [1, 3]))
    write(models / "completed", "Neg", [], (FLOAT, []))
    write(models / "scalar", "Neg", [], (FLOAT, []))
    (models / "scalar" / "config.pbtxt").write_text(
        'backend: "onnxruntime" input { name: "x" data_type: TYPE_FP32 dims: 1 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 1 }'
    )
    write(models / "waits", "Neg", ["n", 3], (FLOAT, ["n", 3]))
    (models / "waits" / "config.pbtxt").write_text(
        f"max_batch_size: 4 dynamic_batching {{ max_queue_delay_microseconds: {DELAY_S}000000 }}"
    )
    process = start(f"--model-repository={models}")
    server = client(process)

    def ask(model: str, *numbers: float) -> list[float]:
        given = triton.InferInput("x", [len(numbers)], "FP32")
        given.set_data_from_numpy(np.array(numbers, np.float32))
        found: list[float] = server.infer(model, [given]).as_numpy("y").tolist()
        return found

    assert ask("places", 0, 2, 3) == [[1, 2]]
    process.wait_for_log("output 'y' has shape [1,0], configured as [1,3]")
    for model in ("completed", "scalar"):
        config = server.get_model_config(model).config
        assert [list(io.dims) for io in (*config.input, *config.output)] == [[1], [1]]
        assert ask(model, 5) == [-5]
