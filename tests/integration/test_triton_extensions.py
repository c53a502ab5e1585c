"""What few of Triton's users need, with the stock client: one daemon with every such flag."""

from __future__ import annotations

import json
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from support.daemon_process import Process
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIMEOUT_S = 30.0
FLAGS = (
    "--metrics-config=summary_latencies=true",
    "--metrics-config=histogram_latencies=true",
    "--metrics-config=summary_quantiles=0.5:0.05,0.999:0.001",
    "--model-control-mode=explicit",
    "--load-model=*",
    "--model-config-name=orin",
    "--grpc-header-forward-pattern=MY_.*",
)

PARAMETERS = """
backend: "python"
metric_tags { key: "site" value: "north" }
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "parameters" data_type: TYPE_STRING dims: 1 }
"""
PARAMETERS_PY = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("parameters", np.array([request.parameters().encode()], object))]
            )
            for request in requests
        ]
"""

REPEAT = """
backend: "python"
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_INT32 dims: 1 }
model_transaction_policy { decoupled: true }
model_metrics { metric_control {
  metric_identifier { family: "nv_inference_first_response_histogram_ms" }
  histogram_options { buckets: [ 0.001, 60000 ] }
} }
"""
REPEAT_PY = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0]
            for number in range(count):
                tensor = pb_utils.Tensor("y", np.array([number], np.int32))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


SLOW_PY = """
import time

class TritonPythonModel:
    def initialize(self, args):
        time.sleep(SECONDS)

    def execute(self, requests):
        return []
"""

COUNT_DOWN = """
backend: "python"
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_INT32 dims: 1 }
model_transaction_policy { decoupled: true }
sequence_batching { iterative_sequence: true %s }
"""
COUNT_DOWN_PY = """
import numpy as np
import triton_python_backend_utils as pb_utils

START = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START

class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            key = request.correlation_id()
            if request.flags() & START:
                self.left[key] = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0]
            self.left[key] -= 1
            sender = request.get_response_sender()
            tensor = pb_utils.Tensor("y", np.array([self.left[key]], np.int32))
            response = pb_utils.InferenceResponse([tensor])
            if self.left[key] <= 0:
                sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
            else:
                sender.send(response)
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
"""

ADD_LATER = """
backend: "python"
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_INT32 dims: 1 }
%s
"""
ADD_LATER_PY = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.runs = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            runs = self.runs[request.request_id()] = self.runs.get(request.request_id(), 0) + 1
            if x[0] == -1:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
            elif runs <= x[0]:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                responses.append(None)
            else:
                tensor = pb_utils.Tensor("y", np.array([runs], np.int32))
                responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
"""

BY_THREAD_PY = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.again = threading.Event()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            if self.again.is_set():
                continue
            self.again.set()
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            value = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0]
            threading.Thread(target=self.respond, args=(sender, value)).start()

    def respond(self, sender, value):
        for number in range(value, -1, -1):
            tensor = pb_utils.Tensor("y", np.array([number], np.int32))
            sender.send(pb_utils.InferenceResponse([tensor]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

RAGGED = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
output { name: "same" data_type: TYPE_FP32 dims: -1 }
output { name: "end" data_type: TYPE_FP32 dims: 1 }
batch_output { target_name: "same" source_input: "x" }
batch_input {
  kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "index" data_type: TYPE_FP32 source_input: "x"
}
dynamic_batching { preferred_batch_size: 2 max_queue_delay_microseconds: 30000000 }
"""


def write_ragged(repository: Path) -> None:
    """An ONNX model that gives back its input, and where in the batch each request ends."""
    nodes = [
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Unsqueeze", ["index", "one"], ["end"]),
    ]
    shapes = {"x": ["n"], "index": ["requests"], "same": ["n"], "end": ["requests", 1]}
    infos = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    }
    inputs, outputs = [infos["x"], infos["index"]], [infos["same"], infos["end"]]
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    graph = helper.make_graph(nodes, "ragged", inputs, outputs, [one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 8
    (repository / "ragged" / "1").mkdir(parents=True)
    (repository / "ragged" / "config.pbtxt").write_text(RAGGED)
    onnx.save(model, repository / "ragged" / "1" / "model.onnx")


def write(repository: Path, name: str, config: str, source: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    (repository / name / "1" / "model.py").write_text(source)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("extensions") / "models"


@pytest.fixture(scope="module")
def process(repository: Path) -> Iterator[Process]:
    write(repository, "parameters", PARAMETERS, PARAMETERS_PY)
    (repository / "parameters" / "configs").mkdir()
    custom = PARAMETERS + 'parameters { key: "board" value { string_value: "orin" } }'
    (repository / "parameters" / "configs" / "orin.pbtxt").write_text(custom)
    write(repository, "repeat", REPEAT, REPEAT_PY)
    write_ragged(repository)
    write(repository, "count_down", COUNT_DOWN % "", COUNT_DOWN_PY)
    oldest = "oldest { max_candidate_sequences: 4 }"
    write(repository, "count_down_oldest", COUNT_DOWN % oldest, COUNT_DOWN_PY)
    write(repository, "by_thread", COUNT_DOWN % "", BY_THREAD_PY)
    iterative = "sequence_batching { iterative_sequence: true }"
    write(repository, "add_later", ADD_LATER % iterative, ADD_LATER_PY)
    write(repository, "not_iterative", ADD_LATER % "", ADD_LATER_PY)
    made = Process(repository.parent, f"--model-repository={repository}", *FLAGS)
    try:
        made.wait_for("READY=1")
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def connection(process: Process) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{process.port}") as client:
        yield client


def tensor(name: str, array: np.ndarray) -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), triton_type(array))
    made.set_data_from_numpy(array)
    return made


def triton_type(array: np.ndarray) -> str:
    return {"int32": "INT32", "float32": "FP32"}[array.dtype.name]


def x(*values: int) -> list[triton.InferInput]:
    return [tensor("x", np.array(values, np.int32))]


def streamed(
    connection: triton.InferenceServerClient,
    model: str,
    inputs: list[triton.InferInput],
    **more: Any,
) -> list[Any]:
    """The responses of one request, up to the final one."""
    responses: queue.Queue[Any] = queue.Queue()
    connection.start_stream(lambda result, error: responses.put(error or result))
    try:
        connection.async_stream_infer(model, inputs, enable_empty_final_response=True, **more)
        found = [responses.get(timeout=TIMEOUT_S)]
        while not found[-1].get_response().parameters["triton_final_response"].bool_param:
            found.append(responses.get(timeout=TIMEOUT_S))
    finally:
        connection.stop_stream()
    return found


def scrape(process: Process) -> dict[str, float]:
    """Name and labels, as the page has them → value."""
    return {
        name: float(value)
        for line in process.metrics().splitlines()
        if not line.startswith("#")
        for name, _, value in [line.rpartition(" ")]
    }


def test_headers_that_match_the_pattern_are_parameters_of_the_request(
    connection: triton.InferenceServerClient,
) -> None:
    result = connection.infer(
        "parameters",
        x(0),
        headers={"my_header_1": "one", "my_header_2": "two", "other": "no"},
        parameters={"own": 3},
    )
    parameters = json.loads(result.as_numpy("parameters")[0])
    assert parameters == {"my_header_1": "one", "my_header_2": "two", "own": 3}


def test_headers_of_a_stream_are_parameters_of_each_of_its_requests(
    connection: triton.InferenceServerClient,
) -> None:
    responses: queue.Queue[Any] = queue.Queue()
    connection.start_stream(
        lambda result, error: responses.put(error or result), headers={"my_header": "one"}
    )
    try:
        for _ in range(2):
            connection.async_stream_infer("parameters", x(0))
            result = responses.get(timeout=TIMEOUT_S)
            assert json.loads(result.as_numpy("parameters")[0]) == {"my_header": "one"}
    finally:
        connection.stop_stream()


def test_summaries_count_each_request_and_have_the_quantiles_asked_for(
    process: Process, connection: triton.InferenceServerClient
) -> None:
    of_model = '{_site="north",model="parameters",version="1"}'
    before = scrape(process).get(f"nv_inference_request_summary_us_count{of_model}", 0.0)
    for _ in range(3):
        connection.infer("parameters", x(0))
    found = scrape(process)
    for name in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
        family = f"nv_inference_{name}_summary_us"
        assert found[f"{family}_count{of_model}"] == before + 3
        for quantile in ("0.5", "0.999"):
            key = f'{family}{{_site="north",model="parameters",quantile="{quantile}",version="1"}}'
            assert found[key] >= 0
    of_phase = '{model="parameters",phase="compute_infer",version="1"}'
    assert found[f"edge_inference_phase_duration_seconds_count{of_phase}"] == before + 3
    assert found['edge_model_memory_bytes{kind="processes",model="parameters",version="1"}'] > 2**20
    assert found["nv_pinned_memory_pool_used_bytes"] == 0
    total = f"nv_inference_request_duration_us{of_model}"
    assert found[f"nv_inference_request_summary_us_sum{of_model}"] == pytest.approx(found[total])


def test_the_first_response_of_each_decoupled_request_is_in_the_histogram(
    process: Process, connection: triton.InferenceServerClient
) -> None:
    assert len(streamed(connection, "repeat", x(3))) == 4
    found = scrape(process)
    family = "nv_inference_first_response_histogram_ms"
    at_most = [
        found[f'{family}_bucket{{le="{le}",model="repeat",version="1"}}']
        for le in ("0.001", "60000", "+Inf")
    ]
    assert at_most == [0, 1, 1]
    assert found[f'{family}_count{{model="repeat",version="1"}}'] == 1
    assert not [name for name in found if name.startswith(family) and "parameters" in name]


def test_requests_of_different_shapes_run_as_one_batch(
    process: Process, connection: triton.InferenceServerClient
) -> None:
    arrays = [np.float32([[1, 2, 3]]), np.float32([[4, 5, 6, 7, 8]])]
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda array: connection.infer("ragged", [tensor("x", array)]), arrays)
    assert one.as_numpy("same").tolist() == arrays[0].tolist()
    assert two.as_numpy("same").tolist() == arrays[1].tolist()
    ends = sorted((one.as_numpy("end").item(), two.as_numpy("end").item()))
    assert ends in ([3, 8], [5, 8])
    assert scrape(process)['nv_inference_exec_count{model="ragged",version="1"}'] == 1


def numbers(responses: list[Any]) -> list[int]:
    return [int(y[0]) for each in responses if (y := each.as_numpy("y")) is not None]


@pytest.mark.parametrize("model", ["count_down", "count_down_oldest"])
@pytest.mark.parametrize("place", [{}, {"sequence_id": 7, "sequence_start": True}])
def test_a_rescheduled_request_runs_until_its_model_ends_it(
    connection: triton.InferenceServerClient, model: str, place: dict[str, Any]
) -> None:
    for _ in range(2):
        assert numbers(streamed(connection, model, x(3), **place)) == [2, 1, 0]


def test_requests_that_run_again_take_turns(
    process: Process, connection: triton.InferenceServerClient
) -> None:
    responses: queue.Queue[Any] = queue.Queue()
    connection.start_stream(lambda result, error: responses.put(error or result))
    try:
        for request_id in ("a", "b", "c"):
            connection.async_stream_infer(
                "count_down_oldest", x(40), request_id=request_id, enable_empty_final_response=True
            )
        got = [responses.get(timeout=TIMEOUT_S).get_response() for _ in range(120)]
    finally:
        connection.stop_stream()
    ids = [each.id for each in got]
    assert all(ids.count(each) == 40 for each in ("a", "b", "c"))
    # The last one to come gets responses before the first one has all.
    assert ids.index("c") < max(place for place, each in enumerate(ids) if each == "a")


def test_a_thread_responds_while_its_request_waits_for_another_run(
    connection: triton.InferenceServerClient,
) -> None:
    assert numbers(streamed(connection, "by_thread", x(5))) == [5, 4, 3, 2, 1, 0]


def test_a_model_that_is_not_decoupled_responds_in_a_later_run(
    process: Process, connection: triton.InferenceServerClient
) -> None:
    counts = {
        'nv_inference_request_success{model="add_later",version="1"}': 1,
        'nv_inference_exec_count{model="add_later",version="1"}': 3,
    }
    before = scrape(process)
    result = connection.infer("add_later", x(2), request_id="later")
    assert result.as_numpy("y").tolist() == [3]
    after = scrape(process)
    assert {name: after[name] - before.get(name, 0) for name in counts} == counts


@pytest.mark.parametrize(
    ("model", "value", "text"),
    [
        (
            "add_later",
            -1,
            "Expected a None object in the execute function return list for reschduled request, "
            "found type '<class ",
        ),
        ("not_iterative", 1, "which needs sequence_batching { iterative_sequence: true }"),
    ],
)
def test_a_request_that_cannot_run_again_fails(
    connection: triton.InferenceServerClient, model: str, value: int, text: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        connection.infer(model, x(value), request_id="none")
    assert text in str(caught.value)


def test_a_request_that_is_cancelled_between_two_runs_ends(
    process: Process, connection: triton.InferenceServerClient
) -> None:
    with pytest.raises(InferenceServerException, match=r"(?i)deadline"):
        connection.infer("add_later", x(1 << 30), request_id="long", client_timeout=0.5)
    result = connection.infer("add_later", x(1), request_id="after")
    assert result.as_numpy("y").tolist() == [2]


def test_a_custom_configuration_is_the_one_that_clients_see(
    connection: triton.InferenceServerClient,
) -> None:
    config = connection.get_model_config("parameters", as_json=True)["config"]
    assert config["parameters"] == {"board": {"string_value": "orin"}}
    assert "parameters" not in connection.get_model_config("repeat", as_json=True)["config"]


def test_a_load_succeeds_although_its_model_is_unloaded_meanwhile(
    repository: Path, connection: triton.InferenceServerClient
) -> None:
    write(repository, "slow", PARAMETERS, SLOW_PY.replace("SECONDS", "5"))

    def state() -> str:
        index = connection.get_model_repository_index().models
        return next(str(entry.state) for entry in index if entry.name == "slow")

    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(connection.load_model, "slow")
        wait_until(lambda: state() == "LOADING", TIMEOUT_S)
        connection.unload_model("slow")
        load.result(TIMEOUT_S)
    assert state() == "UNAVAILABLE"
    assert not connection.is_model_ready("slow")
    (repository / "slow" / "1" / "model.py").write_text(SLOW_PY.replace("SECONDS", "0"))
    connection.load_model("slow")
    assert connection.is_model_ready("slow")
