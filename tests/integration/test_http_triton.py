"""KServe v2 over HTTP, as Triton's own clients and curl use it, against a table of its answers."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import os
import socket
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
import tritonclient.utils.shared_memory as shm
from support.waiting import TIMEOUT_S

from edge_server.api.grpc.client import DaemonClient
from edge_server.daemon.daemon import Daemon
from edge_server.errors import Unauthenticated
from edge_server.settings import Grpc, read_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

READY = "/v2/health/ready"
_ADD = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
            if (a == 13).any():
                raise ValueError("thirteen")
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("SUM", a + a),
                pb_utils.Tensor("TEXT", np.array([b"x"], object)),
            ]))
        return responses
"""
_ADD_CONFIG = """
backend: "python" max_batch_size: 0
input [{ name: "A" data_type: TYPE_FP32 dims: [ -1 ] }]
output [{ name: "SUM" data_type: TYPE_FP32 dims: [ -1 ] },
        { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }]
"""
_COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
            for each in range(count):
                if sender.is_cancelled():
                    break  # its caller has gone: nobody else would end it
                sender.send(pb_utils.InferenceResponse(
                    [pb_utils.Tensor("I", np.array([each], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_COUNT_CONFIG = """
backend: "python" max_batch_size: 0 model_transaction_policy { decoupled: true }
input [{ name: "N" data_type: TYPE_INT32 dims: [ 1 ] }]
output [{ name: "I" data_type: TYPE_INT32 dims: [ 1 ] }]
"""


class Server(NamedTuple):
    daemon: Daemon
    url: str


def start(folder: Path, **settings: Any) -> Daemon:
    for name, code, config in (("add", _ADD, _ADD_CONFIG), ("count", _COUNT, _COUNT_CONFIG)):
        (folder / name / "1").mkdir(parents=True, exist_ok=True)
        (folder / name / "1/model.py").write_text(code)
        (folder / name / "config.pbtxt").write_text(config)
    chosen = {
        "repository": {"paths": [str(folder)], "mode": "explicit", "load": ["*"]},
        "grpc": {"port": 0},
        "metrics": {"port": 0},
        "serving": {"client_shared_memory": True},
        **settings,
    }
    chosen["http"] = {"port": 0, **settings.get("http", {})}
    daemon = Daemon(read_settings(None, chosen))
    daemon.start(threading.Event())
    return daemon


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    daemon = start(tmp_path_factory.mktemp("models"))
    yield Server(daemon, f"127.0.0.1:{daemon.http_port}")
    daemon.stop()


class Answered(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def call(
    url: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> Answered:
    """Send one request; a body that is no bytes is sent as JSON."""
    connection = http.client.HTTPConnection(url, timeout=TIMEOUT_S)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answered(response.status, found, response.read())
    finally:
        connection.close()


def tensor(data: Any = (1.0, 2.0), shape: Any = (2,), kind: str = "FP32", **more: Any) -> Any:
    return {"inputs": [{"name": "A", "shape": shape, "datatype": kind, "data": data, **more}]}


UNKNOWN = "Request for unknown model: 'nope' is not found"
# Method, path, body, then status and a part of the body that Triton answers with.
ANSWERS: list[tuple[str, str, Any, int, str]] = [
    ("GET", "/v2/health/live", None, 200, ""),
    ("GET", "/v2/health/ready", None, 200, ""),
    ("GET", "/v2/health/nothing", None, 404, '{"error":"Not Found"}'),
    ("POST", "/v2/health/live", None, 405, '{"error":"Method Not Allowed"}'),
    ("GET", "/v3", None, 404, '{"error":"Not Found"}'),
    ("GET", "/v2/", None, 404, '{"error":"Not Found"}'),
    ("GET", "/v2", None, 200, '"name":"triton"'),
    ("GET", "/v2/models/add", None, 200, '"platform":"python"'),
    ("GET", "/v2/models/add/versions/1", None, 200, '"versions":["1"]'),
    ("GET", "/v2/models/add/versions/2", None, 404, "Request for unknown model: 'add' version 2"),
    ("GET", "/v2/models/add/versions/x", None, 404, '{"error":"Not Found"}'),
    ("GET", "/v2/models/nope", None, 404, UNKNOWN),
    ("GET", "/v2/models/a%20b%2Fc", None, 404, '{"error":"Not Found"}'),
    ("GET", "/v2/models/add/ready", None, 200, ""),
    ("GET", "/v2/models/add/versions/1/ready", None, 200, ""),
    ("GET", "/v2/models/nope/ready", None, 400, '{"error":"Model version not ready"}'),
    ("GET", "/v2/models/add/config", None, 200, '"backend":"python"'),
    ("GET", "/v2/models/nope/config", None, 404, UNKNOWN),
    ("GET", "/v2/models/stats", None, 200, '{"model_stats":['),
    ("GET", "/v2/models/add/stats", None, 200, '"inference_count":'),
    ("GET", "/v2/models/nope/stats", None, 400, "requested model 'nope' is not available"),
    ("GET", "/v2/models/add/infer", None, 405, '{"error":"Method Not Allowed"}'),
    ("POST", "/v2/models/nope/infer", tensor(), 404, UNKNOWN),
    ("POST", "/v2/models/count/infer", tensor(), 501, "HTTP end point doesn't support models wi"),
    ("POST", "/v2/models/add/infer", tensor(), 200, '"data":[2.0,4.0]'),
    ("POST", "/v2/models/add/infer", tensor([[1], [2.5]]), 200, '"data":[2.0,5.0]'),
    ("POST", "/v2/models/add/infer", tensor([1, float("nan")]), 200, '"data":[2.0,NaN]'),
    ("POST", "/v2/models/add/infer", tensor([1]), 500, "Unable to parse 'data': Shape does not m"),
    ("POST", "/v2/models/add/infer", tensor([1, "b"]), 500, "Unable to parse 'data': attempt to "),
    (
        *("POST", "/v2/models/add/infer", tensor([1.0], [2, -5]), 500),
        "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer",
    ),
    (
        *("POST", "/v2/models/add/infer", tensor([1.0], [2**4, 2**60 + 2]), 400),
        "causes total element count to exceed maximum size of 9223372036854775807",
    ),
    (
        *("POST", "/v2/models/add/infer", tensor([1.0], [2**2, 2**60 + 2]), 400),
        "byte size overflow for input 'A'",
    ),
    (
        *("POST", "/v2/models/add/infer", {**tensor(), "outputs": 2 * [{"name": "SUM"}]}, 400),
        "Duplicate output name 'SUM' is not allowed in a request",
    ),
    ("POST", "/v2/models/add/infer", tensor(kind="FP16"), 400, "receiving FP16 data via JSON is"),
    ("POST", "/v2/models/add/infer", tensor(kind="FP99"), 400, "invalid datatype for input A"),
    ("POST", "/v2/models/add/infer", tensor([1, 2], kind="INT32"), 400, "inference input 'A' da"),
    ("POST", "/v2/models/add/infer", b"{", 500, "failed to parse the request JSON buffer: "),
    ("POST", "/v2/models/add/infer", {}, 500, "Unable to parse 'inputs': "),
    ("POST", "/v2/models/add/infer", {"inputs": []}, 400, "expected 1 inputs but got 0 inputs"),
    (
        *("POST", "/v2/models/add/infer", {"inputs": [{"name": "A", "shape": [1]}]}, 400),
        "Input must set only one of the following fields: 'data', 'binary_data_size' in "
        "'parameters', 'shared_memory_region' in 'parameters'. But no field is set",
    ),
    (
        *("POST", "/v2/models/add/infer", tensor(parameters={"binary_data_size": 8}), 400),
        "But set 'data' 'binary_data_size'",
    ),
    (
        *("POST", "/v2/models/add/infer", {**tensor(), "parameters": {"triton_x": 1}}, 400),
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be",
    ),
    (
        *("POST", "/v2/models/add/infer", {**tensor(), "parameters": {"x": [1]}}, 400),
        "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'.",
    ),
    (
        *("POST", "/v2/models/add/infer", {**tensor(), "outputs": [{"name": "NO"}]}, 400),
        "unexpected inference output 'NO' for model 'add'",
    ),
    (
        *("POST", "/v2/models/add/infer"),
        b'{"inputs":[{"name":"A","shape":[1],"datatype":"FP32","data":' + b"[" * 120 + b"]" * 120,
        *(400, "JSON nesting depth exceeds maximum allowed limit (100)"),
    ),
    ("POST", "/v2/models/add/infer", tensor([13.0, 1.0]), 500, "thirteen"),
    ("POST", "/v2/models/add/generate", {"A": [1, 2]}, 200, '"SUM":[2.0,4.0],"TEXT":"x"'),
    ("POST", "/v2/models/add/generate", {"A": 3}, 200, '"SUM":6.0'),
    ("POST", "/v2/models/add/generate", {"A": "x"}, 500, "attempt to access JSON non-number as"),
    ("POST", "/v2/models/add/generate", {"B": 1}, 400, "expected 1 inputs but got 0 inputs"),
    ("POST", "/v2/models/count/generate", {"N": 1}, 200, '"I":0'),
    ("POST", "/v2/models/count/generate", {"N": 2}, 500, "exactly 1 response, use generate stre"),
    ("POST", "/v2/models/count/generate_stream", {"N": 0}, 200, ""),
    ("POST", "/v2/repository/index", None, 200, '{"name":"add","version":"1","state":"READY","r'),
    ("POST", "/v2/repository/index", {"ready": True}, 200, '"name":"count"'),
    ("POST", "/v2/repository/r/index", None, 501, "'repository_name' specification is not suppo"),
    ("GET", "/v2/repository/index", None, 405, '{"error":"Method Not Allowed"}'),
    ("POST", "/v2/repository/models/nope/load", None, 500, "failed to load 'nope', failed to poll"),
    (
        *("POST", "/v2/repository/models/add/load", {"parameters": {"x": "y"}}, 500),
        "unexpected error on creating Triton parameter",
    ),
    (
        *("POST", "/v2/repository/models/add/load", {"parameters": {"config": 1}}, 500),
        "attempt to access JSON non-string as string",
    ),
    ("POST", "/v2/repository/models/add/load", None, 200, ""),
    (
        *(
            "POST",
            "/v2/repository/models/add/unload",
            {"parameters": {"unload_dependents": 1}},
            500,
        ),
        "Unable to parse 'unload_dependents': attempt to access JSON non-boolean as boolean",
    ),
    ("GET", "/v2/systemsharedmemory/status", None, 200, "[]"),
    (
        *("GET", "/v2/systemsharedmemory/region/no/status", None, 404),
        "Unable to find system shared memory region: 'no'",
    ),
    (
        *("POST", "/v2/systemsharedmemory/region/r/register", {"byte_size": 1}, 400),
        "Shared memory register request has no 'key' field",
    ),
    (
        *("POST", "/v2/systemsharedmemory/register", {"key": "k", "byte_size": 1}, 400),
        "'region name' is necessary to register system shared memory region",
    ),
    (
        *("POST", "/v2/systemsharedmemory/region/r/register", {"key": "no", "byte_size": 1}, 500),
        "Unable to open shared memory region: 'no'",
    ),
    ("POST", "/v2/systemsharedmemory/unregister", None, 200, ""),
    ("GET", "/v2/cudasharedmemory/status", None, 200, "[]"),
    (
        *("POST", "/v2/cudasharedmemory/region/r/register", {}, 400),
        "failed to register CUDA shared memory region: 'r', GPUs not supported",
    ),
    ("GET", "/v2/trace/setting", None, 200, '"trace_level":["OFF"]'),
    ("POST", "/v2/trace/setting", {"trace_rate": "x"}, 400, "Unable to parse 'trace_rate', got: x"),
    ("POST", "/v2/trace/setting", {"trace_rate": "9"}, 200, '"trace_rate":"9"'),
    ("POST", "/v2/trace/setting", {"trace_rate": None}, 200, '"trace_rate":"1000"'),
    (
        *("POST", "/v2/trace/setting", {"trace_file": "x"}, 501),
        "trace file location can not be updated through network protocol",
    ),
    ("GET", "/v2/models/nope/trace/setting", None, 400, "Request for unknown model : nope"),
    ("GET", "/v2/models/add/trace/setting", None, 200, '"trace_mode":"triton"'),
    ("GET", "/v2/logging", None, 200, '"log_info":true'),
    ("POST", "/v2/logging", {"log_verbose_level": 1}, 200, '"log_verbose_level":1'),
    ("POST", "/v2/logging", {"log_verbose_level": 0}, 200, '"log_verbose_level":0'),
    ("POST", "/v2/logging", {"log_info": 3}, 400, "expect boolean for 'log_info'"),
    ("POST", "/v2/logging", {"log_format": "x"}, 400, "invalid argument for log_format, got: x"),
]


@pytest.mark.parametrize("row", ANSWERS)
def test_every_answer_is_tritons(server: Server, row: tuple[str, str, Any, int, str]) -> None:
    method, path, body, status, says = row
    answered = call(server.url, method, path, body)
    assert (answered.status, says) == (status, says), answered
    assert says in answered.body.decode(), answered
    if status != 200 and answered.body:
        assert list(answered.json) == ["error"]
        assert answered.headers["content-type"] == "application/json"


def test_tritons_client_runs_a_model_with_each_form_of_data_and_compression(
    server: Server,
) -> None:
    values = np.array([1.5, 2.5], np.float32)
    with triton.InferenceServerClient(server.url) as client:
        for binary in (True, False):
            given = triton.InferInput("A", [2], "FP32")
            given.set_data_from_numpy(values, binary_data=binary)
            wanted = [triton.InferRequestedOutput("SUM", binary_data=binary)]
            for how in (None, "gzip", "deflate"):
                result = client.infer(
                    "add",
                    [given],
                    outputs=wanted,
                    request_id="7",
                    request_compression_algorithm=how,
                    response_compression_algorithm=how,
                    parameters={"own": 1},
                )
                assert result.as_numpy("SUM").tolist() == [3.0, 5.0]
                response = result.get_response()
                assert (response["id"], response["model_version"]) == ("7", "1")
        # Without listed outputs the client asks for all of them as binary data.
        assert client.infer("add", [given]).as_numpy("TEXT").tolist() == [b"x"]
        best = [triton.InferRequestedOutput("SUM", class_count=1)]
        assert client.infer("add", [given], outputs=best).as_numpy("SUM").tolist() == [
            b"5.000000:1"
        ]
        given.set_data_from_numpy(np.array([13.0, 0.0], np.float32))
        with pytest.raises(triton.InferenceServerException, match="thirteen"):
            client.infer("add", [given])


def test_tritons_client_controls_and_describes_the_server(server: Server) -> None:
    with triton.InferenceServerClient(server.url) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.get_server_metadata()["name"] == "triton"
        client.unload_model("add")
        assert not client.is_model_ready("add")
        config = {**client.get_model_config("count"), "name": "add"}
        config["model_transaction_policy"] = {"decoupled": False}
        client.load_model("add", config=json.dumps(config))
        assert client.get_model_config("add")["input"][0]["name"] == "N"
        client.unload_model("add")
        client.load_model("add")
        assert client.is_model_ready("add", "1")
        assert client.get_model_config("add")["max_batch_size"] == 0
        index = {each["name"]: each["state"] for each in client.get_model_repository_index()}
        assert index == {"add": "READY", "count": "READY"}
        assert client.get_inference_statistics("add")["model_stats"][0]["version"] == "1"
        assert client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})[
            "trace_level"
        ] == ["TIMESTAMPS"]
        client.update_trace_settings(settings={"trace_level": ["OFF"]})
        assert client.update_log_settings({"log_warning": False})["log_warning"] is False
        client.update_log_settings({"log_warning": True})


def test_tritons_client_uses_shared_memory(server: Server) -> None:
    values = np.array([4.0, 5.0], np.float32)
    key = f"/edge_http_{os.getpid()}"
    region = shm.create_shared_memory_region("http", key, 24)
    try:
        shm.set_shared_memory_region(region, [values])
        with triton.InferenceServerClient(server.url) as client:
            client.register_system_shared_memory("http", key, 24)
            status = client.get_system_shared_memory_status()
            assert status == [{"name": "http", "key": key, "offset": 0, "byte_size": 24}]
            others = [f"also {n}" for n in range(5)]
            for name in reversed(others):
                client.register_system_shared_memory(name, key, 8)
            names = [each["name"] for each in client.get_system_shared_memory_status()]
            assert names == [*others, "http"]
            for name in others:
                client.unregister_system_shared_memory(name)
            given = triton.InferInput("A", [2], "FP32")
            given.set_shared_memory("http", 8)
            wanted = triton.InferRequestedOutput("SUM")
            wanted.set_shared_memory("http", 8, offset=16)
            output = client.infer("add", [given], outputs=[wanted]).get_output("SUM")
            # Triton's C++ client takes any parameters for those of binary data.
            assert "parameters" not in output
            summed = shm.get_contents_as_numpy(region, np.float32, [2], 16)
            assert summed.tolist() == [8.0, 10.0]
            given.set_shared_memory("http", 4)
            with pytest.raises(triton.InferenceServerException, match="byte size mismatch"):
                client.infer("add", [given], outputs=[wanted])
            client.unregister_system_shared_memory("http")
            # Not in use any more: a failed request is over, too.
            assert client.get_system_shared_memory_status() == []
            assert client.get_cuda_shared_memory_status() == []
    finally:
        shm.destroy_shared_memory_region(region)


def test_tritons_asyncio_client_runs_many_requests_at_once(server: Server) -> None:
    async def run() -> list[float]:
        async with triton_aio.InferenceServerClient(server.url) as client:

            async def double(value: float) -> float:
                given = triton.InferInput("A", [1], "FP32")
                given.set_data_from_numpy(np.array([value], np.float32))
                result = await client.infer("add", [given])
                return float(result.as_numpy("SUM")[0])

            return await asyncio.gather(*(double(float(each)) for each in range(20, 40)))

    assert asyncio.run(run()) == [2.0 * each for each in range(20, 40)]


def test_a_body_without_json_is_the_one_input(server: Server) -> None:
    body = np.array([1, 2, 3], np.float32).tobytes()
    headers = {"Inference-Header-Content-Length": "0"}
    answered = call(server.url, "POST", "/v2/models/add/infer", body, headers)
    length = int(answered.headers["inference-header-content-length"])
    assert answered.headers["content-type"] == "application/octet-stream"
    assert np.frombuffer(answered.body[length : length + 12], np.float32).tolist() == [2, 4, 6]
    outputs = json.loads(answered.body[:length])["outputs"]
    assert outputs[0]["parameters"] == {"binary_data_size": 12}


@pytest.mark.parametrize(
    ("headers", "cut", "status", "says"),
    [
        ({"Inference-Header-Content-Length": "999"}, 0, 400, "header size should be in range (0, "),
        ({"Inference-Header-Content-Length": "x"}, 0, 400, "Unable to parse Inference-Header-Con"),
        ({}, 3, 400, "unexpected size for input 'A', expecting 3 additional bytes for model 'add'"),
        ({}, -3, 400, "unexpected additional input data for model 'add'"),
        ({"Content-Encoding": "br"}, 0, 501, "Unsupported compression type"),
        ({"Content-Encoding": "gzip"}, 0, 400, "the body is not compressed with gzip"),
    ],
)
def test_lengths_and_encodings_are_checked(
    server: Server, headers: dict[str, str], cut: int, status: int, says: str
) -> None:
    text = json.dumps(
        {
            "inputs": [
                {
                    "name": "A",
                    "shape": [2],
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": 8},
                }
            ]
        }
    ).encode()
    body = text + bytes(8 - cut)
    sent = {"Inference-Header-Content-Length": str(len(text)), **headers}
    answered = call(server.url, "POST", "/v2/models/add/infer", body, sent)
    assert (answered.status, says in answered.json["error"]) == (status, True), answered


def test_what_decompresses_to_too_much_is_refused(server: Server) -> None:
    body = gzip.compress(bytes(65 << 20), 1)
    headers = {"Content-Encoding": "gzip", "Inference-Header-Content-Length": "0"}
    answered = call(server.url, "POST", "/v2/models/add/infer", body, headers)
    assert answered.status == 400
    assert "more than 67108864 bytes when it is decompressed" in answered.json["error"]


def test_generate_stream_sends_an_event_for_each_response(server: Server) -> None:
    answered = call(server.url, "POST", "/v2/models/count/generate_stream", {"N": 3, "id": "q"})
    assert answered.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answered.body.decode().split("\n\n")
    assert events.pop() == ""
    assert [json.loads(each.removeprefix("data: "))["I"] for each in events] == [0, 1, 2]


def test_a_request_is_counted_by_the_metrics_and_by_the_model(server: Server) -> None:
    assert call(server.url, "POST", "/v2/models/count/generate", {"N": 1}).status == 200
    text = call(server.url, "GET", "/metrics").body.decode()
    assert 'protocol="http"' in text


TOKENS = """
# for the tests
read          reads-0123456789abcdef
read,infer    infers-0123456789abcdef
read,control  controls-0123456789abcdef   # may load
"""
_CALLS = {
    "read": [
        ("GET", "/v2"),
        ("GET", "/v2/models/add"),
        ("GET", "/metrics"),
        ("GET", "/v2/logging"),
    ],
    "infer": [("POST", "/v2/models/add/infer"), ("POST", "/v2/models/add/generate")],
    "control": [
        ("POST", "/v2/repository/models/add/load"),
        ("POST", "/v2/logging"),
        ("POST", "/v2/systemsharedmemory/unregister"),
    ],
}


def test_tokens_open_what_their_scopes_say_over_http_and_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tritonclient.grpc as triton_grpc

    file = tmp_path / "tokens"
    file.write_text(TOKENS)
    file.chmod(0o600)
    daemon = start(tmp_path / "models", access={"tokens_file": str(file)})
    url = f"127.0.0.1:{daemon.http_port}"

    def status(token: str, method: str, path: str) -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return call(url, method, path, {} if method == "POST" else None, headers).status

    try:
        assert call(url, "GET", READY).status == 200
        for scope, calls in _CALLS.items():
            for method, path in calls:
                assert status("", method, path) == 401
                assert status("infers-0123456789abcdeX", method, path) == 401
                for holder, scopes in (
                    ("reads", {"read"}),
                    ("infers", {"read", "infer"}),
                    ("controls", {"read", "control"}),
                ):
                    allowed = status(f"{holder}-0123456789abcdef", method, path) not in (401, 403)
                    assert allowed == (scope in scopes), (holder, method, path)
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{daemon.grpc_port}") as client:
            assert client.is_server_ready()
            with pytest.raises(triton.InferenceServerException) as caught:
                client.get_server_metadata()
            assert "UNAUTHENTICATED" in str(caught.value.status())
            headers = {"authorization": "Bearer reads-0123456789abcdef"}
            assert client.get_server_metadata(headers=headers).name == "triton"
            with pytest.raises(triton.InferenceServerException) as caught:
                client.load_model("add", headers=headers)
            assert "PERMISSION_DENIED" in str(caught.value.status())
            with pytest.raises(triton.InferenceServerException) as caught:
                client.update_log_settings({"log_info": True}, headers=headers)
            assert "PERMISSION_DENIED" in str(caught.value.status())
        with (
            DaemonClient(Grpc(port=daemon.grpc_port)) as verb,
            pytest.raises(Unauthenticated, match="put it into EDGE_SERVER_TOKEN"),
        ):
            verb.server()
        monkeypatch.setenv("EDGE_SERVER_TOKEN", "reads-0123456789abcdef")
        with DaemonClient(Grpc(port=daemon.grpc_port)) as verb:
            assert verb.server().name == "triton"
        # A new token counts at once, a file with a mistake changes nothing.
        file.write_text("read fresh-0123456789abcdef\n")
        assert status("fresh-0123456789abcdef", "GET", "/v2") == 200
        assert status("reads-0123456789abcdef", "GET", "/v2") == 401
        file.write_text("nonsense\n")
        assert status("fresh-0123456789abcdef", "GET", "/v2") == 200
    finally:
        daemon.stop()


def test_control_calls_and_restricted_apis_are_refused(tmp_path: Path) -> None:
    restricted = [{"protocols": ["metadata"], "header": "k", "value": "v"}]
    daemon = start(
        tmp_path / "models", grpc={"port": 0, "control": "off"}, http={"restricted": restricted}
    )
    url = f"127.0.0.1:{daemon.http_port}"
    try:
        answered = call(url, "POST", "/v2/repository/models/add/load")
        assert (answered.status, "those are off" in answered.json["error"]) == (403, True)
        assert call(url, "POST", "/v2/logging", {"log_info": True}).status == 403
        assert call(url, "GET", "/v2/logging").status == 200
        assert call(url, "POST", "/v2/repository/index").status == 200
        answered = call(url, "GET", "/v2")
        assert answered.json == {"error": "This API is restricted, expecting header 'k'"}
        assert answered.status == 403
        assert call(url, "GET", "/v2", None, {"K": "v"}).status == 200
    finally:
        daemon.stop()


def test_a_version_of_many_digits_is_no_version(server: Server) -> None:
    answer = call(server.url, "GET", f"/v2/models/add/versions/{'9' * 5000}")
    assert answer.status == 400
    assert "version should be an integral value > 0" in answer.json["error"]
    assert call(server.url, "GET", "/v2/models/add/versions/01/ready").status == 200


def test_a_stream_of_many_responses_goes_out_while_the_model_runs(server: Server) -> None:
    answered = call(server.url, "POST", "/v2/models/count/generate_stream", {"N": 300})
    assert answered.body.count(b"data: ") == 300


def test_compressed_requests_of_tritons_grpc_client_are_read_where_the_settings_say_so(
    tmp_path: Path,
) -> None:
    import tritonclient.grpc as triton_grpc

    values = np.full(100_000, 2, np.float32)
    given = triton_grpc.InferInput("A", [len(values)], "FP32")
    given.set_data_from_numpy(values)
    for most_bytes in (2**20, 0):
        daemon = start(tmp_path / "models", grpc={"port": 0, "max_decompressed_bytes": most_bytes})
        try:
            with triton_grpc.InferenceServerClient(f"127.0.0.1:{daemon.grpc_port}") as client:
                for how in ("gzip", "deflate"):
                    if most_bytes:
                        answer = client.infer("add", [given], compression_algorithm=how)
                        np.testing.assert_array_equal(answer.as_numpy("SUM"), values * 2)
                        continue
                    with pytest.raises(triton.InferenceServerException) as caught:
                        client.infer("add", [given], compression_algorithm=how)
                    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
                    assert "or set grpc.max_decompressed_bytes" in caught.value.message()
        finally:
            daemon.stop()


def test_a_revoked_token_ends_the_streams_that_it_opened(tmp_path: Path) -> None:
    import grpc
    from tritonclient.grpc import service_pb2 as pb

    file = tmp_path / "tokens"
    file.write_text(TOKENS)
    file.chmod(0o600)
    daemon = start(tmp_path / "models", access={"tokens_file": str(file)})
    caller = {"authorization": "Bearer infers-0123456789abcdef"}
    over = threading.Event()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{daemon.grpc_port}") as channel:
            request = pb.ModelInferRequest(model_name="add")
            request.inputs.add(name="A", datatype="FP32", shape=[1])
            request.raw_input_contents.append(bytes(4))

            def requests() -> Iterator[bytes]:
                yield request.SerializeToString()
                over.wait(TIMEOUT_S)

            stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(
                requests(), timeout=TIMEOUT_S, metadata=tuple(caller.items())
            )
            assert next(stream)
            file.write_text("read fresh-0123456789abcdef\n")
            with pytest.raises(grpc.RpcError):
                next(stream)
            assert stream.code() is grpc.StatusCode.CANCELLED
        file.write_text(TOKENS)
        connection = http.client.HTTPConnection("127.0.0.1", daemon.http_port, timeout=TIMEOUT_S)
        body = json.dumps({"N": 2**30})
        connection.request("POST", "/v2/models/count/generate_stream", body, caller)
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        file.write_text("read fresh-0123456789abcdef\n")
        lines = [line for line in answer if line.startswith(b"data: ")]
        assert json.loads(lines[-1].removeprefix(b"data: ")) == {"error": "the token is not valid"}
        # Its model is free for the next caller, though the connection is there.
        file.write_text(TOKENS)
        url = f"127.0.0.1:{daemon.http_port}"
        assert call(url, "POST", "/v2/models/count/generate", {"N": 1}, caller).status == 200
        connection.close()
    finally:
        over.set()
        daemon.stop()


def test_a_body_is_refused_before_it_is_read_by_mode_and_by_what_it_may_be(
    server: Server, tmp_path: Path
) -> None:
    long = b'{"ready":' + b"[" * 100_000
    for headers in ({}, {"Transfer-Encoding": "chunked"}):
        connection = http.client.HTTPConnection(
            server.url.partition(":")[0], server.daemon.http_port, timeout=TIMEOUT_S
        )
        connection.request(
            "POST",
            "/v2/repository/index",
            iter([long]) if headers else long,
            headers,
            encode_chunked=bool(headers),
        )
        answer = connection.getresponse()
        assert answer.status == 413
        assert b"65536 at most" in answer.read()
        connection.close()
    repository = {"paths": [str(tmp_path / "models")], "mode": "none"}
    daemon = start(tmp_path / "models", repository=repository)
    try:
        answered = call(f"127.0.0.1:{daemon.http_port}", "POST", "/v2/repository/models/add/load")
        assert answered.status == 503
        assert "explicit model load / unload is not allowed" in answered.json["error"]
        sent = b"POST /v2/repository/models/add/load HTTP/1.1\r\nHost: localhost\r\n"
        with socket.create_connection(("127.0.0.1", daemon.http_port), TIMEOUT_S) as half:
            half.sendall(sent + b"Content-Length: 60000000\r\n\r\n{")
            assert half.recv(20).startswith(b"HTTP/1.1 503")
    finally:
        daemon.stop()
