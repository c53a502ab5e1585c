"""Sequences over the real protocol: a stock client, ONNX models, state that nobody sees."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto
from onnx import helper as onnx_helper
from tritonclient.grpc import service_pb2, service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.daemon_process import Process

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
TIMEOUT_S = 30.0

ACCUMULATE = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
instance_group { kind: KIND_CPU count: 2 }
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  %s
  state {
    input_name: "sum_in" output_name: "sum_out" data_type: TYPE_FP32 dims: 1
    initial_state { name: "begin" data_type: TYPE_FP32 dims: 1 %s }
  }
}
"""

TELL = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "told" data_type: TYPE_FP32 dims: 3 }
output { name: "who" data_type: TYPE_STRING dims: 1 }
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  control_input { name: "start"
    control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ -1, 1 ] } }
  control_input { name: "ready"
    control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } }
  control_input { name: "end"
    control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 1 ] } }
  control_input { name: "id"
    control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
}
"""


def write_model(
    directory: Path,
    config: str,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, int],
    outputs: dict[str, int],
) -> None:
    """An ONNX model of FP32 tensors, (batch, size) each; "id" and "who" are strings."""

    def tensors(sizes: dict[str, int]) -> list[onnx.ValueInfoProto]:
        return [
            onnx_helper.make_tensor_value_info(
                name,
                TensorProto.STRING if name in ("id", "who") else TensorProto.FLOAT,
                ["batch", size],
            )
            for name, size in sizes.items()
        ]

    graph = onnx_helper.make_graph(nodes, directory.name, tensors(inputs), tensors(outputs))
    model = onnx_helper.make_model(graph, opset_imports=[onnx_helper.make_opsetid("", 13)])
    model.ir_version = 8
    (directory / "1").mkdir(parents=True)
    onnx.save(model, directory / "1" / "model.onnx")
    (directory / "config.pbtxt").write_text(config)


def write_accumulate(directory: Path, strategy: str, begin: str) -> None:
    """y = sum_out = sum_in + x."""
    nodes = [
        onnx_helper.make_node("Add", ["sum_in", "x"], ["y"]),
        onnx_helper.make_node("Identity", ["y"], ["sum_out"]),
    ]
    ins, outs = {"x": 1, "sum_in": 1}, {"y": 1, "sum_out": 1}
    write_model(directory, ACCUMULATE % (strategy, begin), nodes, ins, outs)


@pytest.fixture
def server(
    tmp_path: Path,
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
) -> triton.InferenceServerClient:
    """It serves `direct` and `oldest` (sums from 0 and from 100), and `tell`."""
    repository = tmp_path / "models"
    write_accumulate(repository / "direct", "direct { }", "zero_data: true")
    write_accumulate(
        repository / "oldest", "oldest { max_candidate_sequences: 4 }", 'data_file: "hundred"'
    )
    (repository / "oldest" / "initial_state").mkdir()
    (repository / "oldest" / "initial_state" / "hundred").write_bytes(
        np.array([100], "<f4").tobytes()
    )
    nodes = [
        onnx_helper.make_node("Concat", ["start", "ready", "end"], ["told"], axis=1),
        onnx_helper.make_node("Identity", ["id"], ["who"]),
        onnx_helper.make_node("Identity", ["x"], ["unused"]),
    ]
    write_model(
        repository / "tell",
        TELL,
        nodes,
        {"x": 1, "start": 1, "ready": 1, "end": 1, "id": 1},
        {"told": 3, "who": 1},
    )
    return client(start("--model-repository", str(repository)))


def x(*values: float) -> list[triton.InferInput]:
    tensor = triton.InferInput("x", [len(values), 1], "FP32")
    tensor.set_data_from_numpy(np.array(values, np.float32)[:, np.newaxis])
    return [tensor]


@pytest.mark.parametrize(("model", "begin"), [("direct", 0), ("oldest", 100)])
def test_each_sequence_has_a_state_of_its_own(
    server: triton.InferenceServerClient, model: str, begin: int
) -> None:
    def add(corrid: int | str, value: float, start: bool = False, end: bool = False) -> float:
        answer = server.infer(
            model, x(value), sequence_id=corrid, sequence_start=start, sequence_end=end
        )
        assert [output.name for output in answer.get_response().outputs] == ["y"]
        return float(answer.as_numpy("y").item())

    assert add(1, 1, start=True) == begin + 1
    assert add("left", 10, start=True) == begin + 10
    assert add(1, 2) == begin + 3
    assert add("left", 20, end=True) == begin + 30
    assert add(1, 3, end=True) == begin + 6
    assert add(1, 5, start=True, end=True) == begin + 5


def test_controls_and_states_are_the_servers_own(server: triton.InferenceServerClient) -> None:
    for model, outputs in (("direct", ["y"]), ("tell", ["told", "who"])):
        metadata = server.get_model_metadata(model)
        assert [tensor.name for tensor in metadata.inputs] == ["x"]
        assert [tensor.name for tensor in metadata.outputs] == outputs


def test_the_model_is_told_where_a_request_stands(server: triton.InferenceServerClient) -> None:
    def told(**place: object) -> tuple[list[float], bytes]:
        answer = server.infer("tell", x(0), **place)
        return answer.as_numpy("told").ravel().tolist(), answer.as_numpy("who").item()

    assert told(sequence_id="left", sequence_start=True) == ([1, 1, 0], b"left")
    assert told(sequence_id="left") == ([-1, 1, 0], b"left")
    assert told(sequence_id="left", sequence_end=True) == ([-1, 1, 1], b"left")


def test_streams_lose_no_request_of_a_sequence_however_many_wait(
    start: Callable[..., Process],
) -> None:
    process = start(
        f"--model-repository={EXAMPLES}",
        "--model-control-mode=explicit",
        "--load-model=simple_sequence",
    )

    def requests(corrid: int) -> Iterator[service_pb2.ModelInferRequest]:
        for step in range(100):
            request = service_pb2.ModelInferRequest(model_name="simple_sequence")
            request.inputs.add(name="INPUT", datatype="INT32", shape=[1, 1])
            request.raw_input_contents.append(np.int32(1).tobytes())
            request.parameters["sequence_id"].int64_param = corrid
            request.parameters["sequence_start"].bool_param = step == 0
            request.parameters["sequence_end"].bool_param = step == 99
            yield request

    def errors(corrid: int) -> set[str]:
        with grpc.insecure_channel(f"127.0.0.1:{process.port}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            told = list(stub.ModelStreamInfer(requests(corrid), timeout=TIMEOUT_S))
        assert len(told) == 100
        return {answer.error_message for answer in told}

    with ThreadPoolExecutor(8) as pool:
        assert set().union(*pool.map(errors, range(1, 9))) == {""}


def test_a_stream_keeps_the_order_of_each_sequence(server: triton.InferenceServerClient) -> None:
    answers: queue.Queue[tuple[triton.InferResult | None, Exception | None]] = queue.Queue()
    server.start_stream(callback=lambda result, error: answers.put((result, error)))
    for step in range(20):
        for corrid in (1, 2, 3):
            server.async_stream_infer(
                "direct",
                x(corrid),
                request_id=str(corrid),
                sequence_id=corrid,
                sequence_start=step == 0,
                sequence_end=step == 19,
            )
    sums: dict[str, list[float]] = {}
    for _ in range(60):
        result, error = answers.get(timeout=TIMEOUT_S)
        assert error is None
        assert result is not None
        sums.setdefault(result.get_response().id, []).append(result.as_numpy("y").item())
    server.stop_stream()
    assert sums == {str(i): [i * step for step in range(1, 21)] for i in (1, 2, 3)}
