"""The whole protocol as the published tritonclient speaks it, over a real socket.

The server is in this process, so that models can be made to wait, to answer twice, or to break.
"""

from __future__ import annotations

import asyncio
import os
import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.utils.shared_memory as shm
from grpc_health.v1 import health_pb2
from support.model_configs import config_of
from support.waiting import wait_until
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from edge_server.api.admission import Admission
from edge_server.api.grpc.triton import HealthServicer, TritonServicer, register
from edge_server.api.shared_memory import SharedMemory
from edge_server.api.triton_calls import TritonCalls
from edge_server.backends.contract import (
    ExecuteRequest,
    LoadContext,
    TensorModel,
)
from edge_server.backends.vision import identity
from edge_server.errors import InternalError
from edge_server.gpu.device import Devices
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelEntry, ModelRegistry, ModelState
from edge_server.inference.scheduling import Scheduling
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from edge_server.backends.contract import Model
    from edge_server.model_config.config import ModelConfig, Placement

TIMEOUT_S = 30.0
# scripts and people may ask for more: EDGE_MALFORMED_REQUESTS=100000
MALFORMED = int(os.environ.get("EDGE_MALFORMED_REQUESTS", "3000"))
LISTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE,
}


def config(name: str, types: Sequence[str], extra: str = "") -> ModelConfig:
    """Inputs `a0`, `a1`, … and outputs `b0`, `b1`, … of any one-dimensional size."""
    text = f'name: "{name}" backend: "identity" instance_group {{ name: "i" count: 1 }}'
    for kind, letter in (("input", "a"), ("output", "b")):
        for place, datatype in enumerate(types):
            text += f'{kind} {{ name: "{letter}{place}" data_type: TYPE_{datatype} dims: -1 }}'
    return config_of(text + extra)


class Repeats:
    """A decoupled model: as many answers as the first element says, then the end."""

    def make_instance(self, name: str, placement: Placement) -> Repeats:
        return self

    def execute(self, requests: Sequence[ExecuteRequest]) -> None:
        for request in requests:
            count = int(request.inputs["a0"].array[0])
            if count < 0:
                request.respond(InternalError("less than nothing"), True)
                continue
            for index in range(count):
                request.respond({"b0": Tensor(np.array([index], np.int32))}, False)
            request.respond(None, True)

    def not_ready_reason(self) -> str:
        return ""

    def metrics(self) -> tuple[()]:
        return ()

    def close(self) -> None: ...


class Waits(TensorModel):
    """Answers when it is told to, and says that it has begun."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        super().__init__(self._wait)

    def _wait(self, inputs: dict, outputs: frozenset[str]) -> dict:
        self.begun.release()
        assert self.go_on.wait(TIMEOUT_S)
        return {"b0": inputs["a0"]}


class Server:
    """The protocol over a registry of small models, on a free port."""

    def __init__(self, shared_memory: SharedMemory | None) -> None:
        self.registry = ModelRegistry()
        self.waits = Waits()
        for model_config in (
            config("plain", ["FP32"]),
            config("batched", ["FP32"], "max_batch_size: 8"),
            config("texts", ["STRING"]),
            config("brain", ["BF16"]),
            config("half", ["FP16"]),
        ):
            context = LoadContext(Path("m"), model_config, Devices())
            self.add(model_config, identity.load(context))
        self.add(config("waits", ["INT32"]), self.waits)
        self.add(
            config("repeats", ["INT32"], "model_transaction_policy { decoupled: true }"), Repeats()
        )
        data_plane = DataPlane(self.registry)
        data_plane.open()
        self.admission = Admission(28, streams=2)
        self._server = grpc.server(ThreadPoolExecutor(40))
        calls = TritonCalls(data_plane, "triton", "1", shared_memory=shared_memory)
        servicer = TritonServicer(calls, self.admission)
        register(self._server, servicer, HealthServicer(data_plane, self.admission))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def add(self, model_config: ModelConfig, model: Model) -> None:
        labelled = replace(model_config, labels={"b0": ("cat", "dog")})
        loaded = Scheduling().model(labelled, 1, model)
        entry = ModelEntry(model_config.name, 1, ModelState.READY, loaded=loaded)
        self.registry.replace(model_config.name, [entry])

    def stop(self) -> None:
        self.waits.go_on.set()
        self._server.stop(0).wait()
        self.registry.clear()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(SharedMemory())
    yield made
    made.stop()


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    made = triton.InferenceServerClient(server.address)
    yield made
    made.close()


def tensor(array: np.ndarray, datatype: str = "FP32") -> triton.InferInput:
    made = triton.InferInput("a0", list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


THREE = np.array([0.25, 0.75, 0.5], np.float32)


def refused(ask: Callable[[], object]) -> tuple[str, str]:
    """The status and the text that a call ends with."""
    with pytest.raises(InferenceServerException) as caught:
        ask()
    return str(caught.value.status()).removeprefix("StatusCode."), caught.value.message()


class Heard:
    """What a stream's callback hears, in order."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()

    def __call__(self, result: Any, error: object) -> None:
        self._queue.put(error if error is not None else result.get_response())

    def next(self) -> Any:
        return self._queue.get(timeout=TIMEOUT_S)


def test_infer_sync_async_and_asyncio_give_the_same(
    server: Server, client: triton.InferenceServerClient
) -> None:
    np.testing.assert_array_equal(client.infer("plain", [tensor(THREE)]).as_numpy("b0"), THREE)
    heard: queue.Queue[Any] = queue.Queue()
    client.async_infer("plain", [tensor(THREE)], lambda result, error: heard.put(result))
    answer = heard.get(timeout=TIMEOUT_S)
    np.testing.assert_array_equal(answer.as_numpy("b0"), THREE)

    async def ask() -> np.ndarray:
        async with triton_aio.InferenceServerClient(server.address) as other:
            return (await other.infer("plain", [tensor(THREE)])).as_numpy("b0")

    np.testing.assert_array_equal(asyncio.run(ask()), THREE)


def test_texts_halves_brain_floats_and_nothing_travel_both_ways(
    client: triton.InferenceServerClient,
) -> None:
    words = np.array([b"lane", b"", "straße".encode()], np.object_)
    assert client.infer("texts", [tensor(words, "BYTES")]).as_numpy("b0").tolist() == list(words)
    half = THREE.astype(np.float16)
    np.testing.assert_array_equal(client.infer("half", [tensor(half, "FP16")]).as_numpy("b0"), half)
    brain = THREE.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(
        client.infer("brain", [tensor(brain, "BF16")]).as_numpy("b0"), brain
    )
    empty = np.zeros(0, np.float32)
    assert client.infer("plain", [tensor(empty)]).as_numpy("b0").shape == (0,)
    batch = np.zeros((3, 0), np.float32)
    assert client.infer("batched", [tensor(batch)]).as_numpy("b0").shape == (3, 0)


def test_a_clients_timeout_and_a_taken_back_call_are_told_and_hurt_nobody(
    server: Server, client: triton.InferenceServerClient
) -> None:
    one = tensor(np.array([1], np.int32), "INT32")
    assert refused(lambda: client.infer("waits", [one], client_timeout=0.2))[0] == (
        "DEADLINE_EXCEEDED"
    )
    heard: queue.Queue[Any] = queue.Queue()
    call = client.async_infer("waits", [one], lambda result, error: heard.put(error))
    call.cancel()
    assert "CANCELLED" in str(heard.get(timeout=TIMEOUT_S).status())
    server.waits.go_on.set()
    assert client.infer("waits", [one]).as_numpy("b0").tolist() == [1]


def test_classes_come_best_first_with_their_labels(client: triton.InferenceServerClient) -> None:
    wanted = triton.InferRequestedOutput("b0", class_count=2)
    told = client.infer("plain", [tensor(THREE)], outputs=[wanted]).as_numpy("b0")
    assert told.tolist() == [b"0.750000:1:dog", b"0.500000:2"]
    batch = np.array([[1, 2], [4, 3]], np.float32)
    told = client.infer(
        "batched",
        [tensor(batch)],
        outputs=[triton.InferRequestedOutput("b0", class_count=9)],
    ).as_numpy("b0")
    assert told.tolist() == [
        [b"2.000000:1:dog", b"1.000000:0:cat"],
        [b"4.000000:0:cat", b"3.000000:1:dog"],
    ]
    words = tensor(np.array([b"x"], np.object_), "BYTES")
    assert refused(lambda: client.infer("texts", [words], outputs=[wanted])) == (
        "INVALID_ARGUMENT",
        "class result not available for output due to unsupported type 'BYTES'",
    )


def test_tensors_in_shared_memory(client: triton.InferenceServerClient) -> None:
    key = f"edge_server_test_{os.getpid()}"
    handle = shm.create_shared_memory_region("both", key, 4096)
    try:
        shm.set_shared_memory_region(handle, [THREE], offset=64)
        client.register_system_shared_memory("both", key, 1024, offset=64)
        regions = client.get_system_shared_memory_status().regions
        assert (regions["both"].key, regions["both"].offset, regions["both"].byte_size) == (
            key,
            64,
            1024,
        )
        given = triton.InferInput("a0", [3], "FP32")
        given.set_shared_memory("both", 12)
        wanted = triton.InferRequestedOutput("b0")
        wanted.set_shared_memory("both", 100, offset=512)
        answer = client.infer("plain", [given], outputs=[wanted])
        assert answer.get_response().raw_output_contents == [b""]
        parameters = answer.get_output("b0").parameters
        assert parameters["shared_memory_region"].string_param == "both"
        assert parameters["shared_memory_byte_size"].int64_param == 12
        assert parameters["shared_memory_offset"].int64_param == 512
        np.testing.assert_array_equal(
            shm.get_contents_as_numpy(handle, np.float32, [3], offset=64 + 512), THREE
        )
        wanted.set_shared_memory("both", 8)
        status, text = refused(lambda: client.infer("plain", [given], outputs=[wanted]))
        assert (status, text) == (
            "INTERNAL",
            "shared memory size specified with the request for output 'b0' (8 bytes) should be at "
            "least 12 bytes to hold the results",
        )
        client.unregister_system_shared_memory("both")
        status, text = refused(lambda: client.infer("plain", [given]))
        assert (status, text) == ("NOT_FOUND", "Unable to find shared memory region: 'both'")
    finally:
        shm.destroy_shared_memory_region(handle)


@pytest.mark.skipif(os.geteuid() != 0, reason="to be another user for a moment needs root")
@pytest.mark.parametrize("mode", [0o600, 0o444, 0o666])
def test_an_object_of_another_user_is_a_region_where_its_mode_lets_the_server_write(
    client: triton.InferenceServerClient, mode: int
) -> None:
    path = Path("/dev/shm") / f"edge_server_test_{os.getpid()}"  # noqa: S108
    path.write_bytes(bytes(64))
    path.chmod(mode)
    os.seteuid(65534)  # the server, which is in this process
    try:
        if mode == 0o666:
            client.register_system_shared_memory("theirs", path.name, 64)
            assert client.get_system_shared_memory_status().regions.keys() == {"theirs"}
        else:
            assert refused(
                lambda: client.register_system_shared_memory("theirs", path.name, 64)
            ) == (
                "INTERNAL",
                f"Unable to open shared memory region: '{path.name}'",
            )
    finally:
        os.seteuid(0)
        path.unlink()
        client.unregister_system_shared_memory()


def test_there_is_no_cuda_shared_memory(client: triton.InferenceServerClient) -> None:
    assert refused(lambda: client.register_cuda_shared_memory("r", b"eA==", 0, 8)) == (
        "UNIMPLEMENTED",
        "failed to register CUDA shared memory region: 'r', GPUs not supported",
    )
    assert not client.get_cuda_shared_memory_status().regions
    client.unregister_cuda_shared_memory()


def test_shared_memory_is_off_unless_it_was_allowed() -> None:
    server = Server(None)
    client = triton.InferenceServerClient(server.address)
    text = (
        "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to "
        "enable."
    )
    given = triton.InferInput("a0", [3], "FP32")
    given.set_shared_memory("r", 12)
    wanted = triton.InferRequestedOutput("b0")
    wanted.set_shared_memory("r", 12)
    try:
        for ask in (
            lambda: client.register_system_shared_memory("r", "k", 8),
            client.unregister_system_shared_memory,
            lambda: client.infer("plain", [given]),
            lambda: client.infer("plain", [tensor(THREE)], outputs=[wanted]),
        ):
            assert refused(ask) == ("UNIMPLEMENTED", text)
        assert not client.get_system_shared_memory_status().regions
        assert not client.get_cuda_shared_memory_status().regions
        assert "system_shared_memory" not in client.get_server_metadata().extensions
    finally:
        client.close()
        server.stop()


def test_a_stream_keeps_the_order_and_tells_errors_in_between(
    client: triton.InferenceServerClient,
) -> None:
    heard = Heard()
    client.start_stream(heard)
    for place in range(40):
        name = "nothing" if place % 4 == 3 else "plain"
        # A model that does not read the parameter gets it all the same.
        client.async_stream_infer(
            name, [tensor(THREE)], request_id=str(place), parameters={"gain": 0.5}
        )
    for place in range(40):
        said = heard.next()
        if place % 4 == 3:
            assert "Request for unknown model: 'nothing' is not found" in str(said)
        else:
            assert said.id == str(place)
            assert said.parameters["triton_final_response"].bool_param
    client.stop_stream()


def test_a_decoupled_model_answers_any_number_of_times_and_says_which_is_the_last(
    client: triton.InferenceServerClient,
) -> None:
    def count(n: int) -> triton.InferInput:
        return tensor(np.array([n], np.int32), "INT32")

    heard = Heard()
    client.start_stream(heard)
    client.async_stream_infer("repeats", [count(3)], request_id="a")
    client.async_stream_infer("repeats", [count(0)], request_id="b")
    client.async_stream_infer(
        "repeats", [count(50)], request_id="c", enable_empty_final_response=True
    )
    client.async_stream_infer("repeats", [count(-1)], request_id="d")
    said = [heard.next() for _ in range(3 + 0 + 51)]
    assert [s.id for s in said] == ["a"] * 3 + ["c"] * 51
    assert not any(s.parameters["triton_final_response"].bool_param for s in said[:-1])
    assert said[-1].parameters["triton_final_response"].bool_param
    assert not said[-1].outputs
    assert "less than nothing" in str(heard.next())
    client.stop_stream()
    counts = client.get_inference_statistics("repeats").model_stats[0].response_stats
    assert counts["0"].success.count == 2
    assert refused(lambda: client.infer("repeats", [count(1)])) == (
        "UNIMPLEMENTED",
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
    )


def test_a_client_that_wants_it_so_hears_the_first_error_as_the_streams_status(
    client: triton.InferenceServerClient,
) -> None:
    heard = Heard()
    client.start_stream(heard, headers={"triton_grpc_error": "true"})
    client.async_stream_infer("nothing", [tensor(THREE)])
    error = heard.next()
    assert str(error.status()) == "StatusCode.NOT_FOUND"
    client.stop_stream(cancel_requests=True)


def test_a_stream_that_its_client_leaves_gives_its_place_back(server: Server) -> None:
    for _ in range(3):
        clients = [triton.InferenceServerClient(server.address) for _ in range(2)]
        for client in clients:
            heard = Heard()
            client.start_stream(heard)
            client.async_stream_infer("plain", [tensor(THREE)], request_id="1")
            assert heard.next().id == "1"
        third = triton.InferenceServerClient(server.address)
        heard = Heard()
        third.start_stream(heard)
        error = heard.next()
        assert str(error.status()) == "StatusCode.UNAVAILABLE"
        assert "2 streams are open already" in str(error)
        third.stop_stream(cancel_requests=True)
        for client in (*clients, third):
            client.stop_stream(cancel_requests=True)
            client.close()
        wait_until(lambda: not server.admission._open_streams)


def test_a_closing_server_ends_idle_streams_in_words(
    server: Server, client: triton.InferenceServerClient
) -> None:
    heard = Heard()
    client.start_stream(heard)
    client.async_stream_infer("plain", [tensor(THREE)], request_id="1")
    heard.next()
    server.admission.close()
    assert "GRPC server is shutting down" in str(heard.next())
    client.stop_stream(cancel_requests=True)


def test_statistics_of_all_one_and_one_version(client: triton.InferenceServerClient) -> None:
    for _ in range(3):
        client.infer("batched", [tensor(np.zeros((2, 4), np.float32))])
    (model,) = client.get_inference_statistics("batched", "1").model_stats
    assert (model.name, model.version) == ("batched", "1")
    assert (model.inference_count, model.execution_count) == (6, 3)
    assert model.inference_stats.success.count == model.inference_stats.queue.count == 3
    assert [(b.batch_size, b.compute_infer.count) for b in model.batch_stats] == [(2, 3)]
    assert model.last_inference > 0
    assert len(client.get_inference_statistics().model_stats) == 7
    assert refused(lambda: client.get_inference_statistics("nothing")) == (
        "INVALID_ARGUMENT",
        "requested model 'nothing' is not available",
    )
    assert refused(lambda: client.get_inference_statistics("plain", "2")) == (
        "INVALID_ARGUMENT",
        "requested model version is not available for model 'plain'",
    )


def test_index_control_and_metadata(client: triton.InferenceServerClient) -> None:
    index = client.get_model_repository_index().models
    assert {(m.name, m.version, m.state) for m in index} >= {("plain", "1", "READY")}
    not_allowed = "explicit model load / unload is not allowed if polling is enabled"
    assert refused(lambda: client.load_model("plain")) == ("UNAVAILABLE", not_allowed)
    assert refused(lambda: client.unload_model("plain")) == ("UNAVAILABLE", not_allowed)
    assert list(client.get_server_metadata().extensions) == [
        "classification",
        "sequence",
        "schedule_policy",
        "model_configuration",
        "system_shared_memory",
        "binary_tensor_data",
        "parameters",
        "statistics",
        "logging",
    ]


def test_trace_and_log_settings(client: triton.InferenceServerClient) -> None:
    told = client.update_trace_settings(settings={"trace_rate": "7"}).settings
    assert list(told["trace_rate"].value) == ["7"]
    told = client.update_trace_settings("plain", {"trace_level": ["TIMESTAMPS"]}).settings
    assert (list(told["trace_level"].value), list(told["trace_rate"].value)) == (
        ["TIMESTAMPS"],
        ["7"],
    )
    assert list(client.get_trace_settings().settings["trace_level"].value) == ["OFF"]
    told = client.update_trace_settings("plain", {"trace_level": None}).settings
    assert list(told["trace_level"].value) == ["OFF"]
    assert refused(lambda: client.get_trace_settings("nothing")) == (
        "INVALID_ARGUMENT",
        "Request for unknown model : nothing",
    )
    assert client.get_log_settings().settings["log_info"].bool_param
    assert refused(lambda: client.update_log_settings({"log_file": "x"})) == (
        "UNIMPLEMENTED",
        "log file location can not be updated through network protocol",
    )


def test_the_standard_health_service(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        for name in ("", "inference.GRPCInferenceService"):
            assert check(health_pb2.HealthCheckRequest(service=name)).status == 1
        with pytest.raises(grpc.RpcError) as caught:
            check(health_pb2.HealthCheckRequest(service="x"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        server.registry.replace("late", [ModelEntry("late", 0, ModelState.LOADING)])
        assert check(health_pb2.HealthCheckRequest()).status == 2


def test_a_watch_of_the_health_ends_with_the_server(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        unknown = watch(health_pb2.HealthCheckRequest(service="x"), timeout=TIMEOUT_S)
        assert next(unknown).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        unknown.cancel()
        call = watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert next(call).status == 1
        server.registry.replace("late", [ModelEntry("late", 0, ModelState.LOADING)])
        assert next(call).status == 2
        server.registry.replace("late", [])
        assert next(call).status == 1
        server.admission.close()
        assert [each.status for each in call] == [2]


def test_every_method_of_every_service_answers_something_that_is_listed(server: Server) -> None:
    services = (
        service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
        health_pb2.DESCRIPTOR.services_by_name["Health"],
    )
    asked = 0
    with grpc.insecure_channel(server.address) as channel:
        for service in services:
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                if method.name == "Watch":  # answers for as long as it is open
                    continue
                code, text = outcome(channel, path, streaming=method.server_streaming)
                assert code in LISTED, path
                assert code is grpc.StatusCode.OK or text, path
                asked += 1
    assert asked >= 21


def outcome(channel: grpc.Channel, path: str, *, streaming: bool) -> tuple[grpc.StatusCode, str]:
    """What an empty message is answered."""
    try:
        if streaming:
            list(channel.stream_stream(path)(iter([b""]), timeout=TIMEOUT_S))
        else:
            channel.unary_unary(path)(b"", timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def test_no_malformed_request_gets_an_answer_that_is_not_listed(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """`EDGE_MALFORMED_REQUESTS` says how many."""
    chance = random.Random(1)  # noqa: S311 - the same each time
    seeds = [seed.SerializeToString() for seed in malformed_seeds()]
    room = threading.Semaphore(16)
    codes: list[object] = []  # of several threads

    def note(call: grpc.Call) -> None:
        codes.append(call.code())
        room.release()

    with grpc.insecure_channel(server.address) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for _ in range(MALFORMED):
            room.acquire()
            infer.future(mutated(chance.choice(seeds), chance)).add_done_callback(note)
        for _ in range(16):
            room.acquire()
    assert len(codes) == MALFORMED
    assert set(codes) <= LISTED, set(codes)
    assert len(set(codes)) >= 3
    assert not [r for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")]


def malformed_seeds() -> list[service_pb2.ModelInferRequest]:
    seeds = []
    for name, datatype, raw in (
        ("plain", "FP32", THREE.tobytes()),
        ("texts", "BYTES", b"\x01\x00\x00\x00a" * 3),
        ("brain", "BF16", bytes(6)),
        ("repeats", "INT32", bytes(12)),
    ):
        seed = service_pb2.ModelInferRequest(model_name=name, id="7", raw_input_contents=[raw])
        seed.inputs.add(name="a0", datatype=datatype, shape=[3])
        seed.inputs[0].parameters["shared_memory_offset"].int64_param = 0
        seed.outputs.add(name="b0").parameters["classification"].int64_param = 2
        seed.parameters["sequence_id"].int64_param = 1
        seed.parameters["priority"].uint64_param = 1
        seeds.append(seed)
        good = service_pb2.ModelInferRequest()
        good.CopyFrom(seed)
        good.inputs[0].ClearField("parameters")
        good.outputs[0].ClearField("parameters")
        seeds.append(good)
    return seeds


def mutated(data: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(damaged) or 1)
        match chance.randrange(4):
            case 0:
                damaged[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del damaged[place : place + chance.randint(1, 8)]
            case 2:
                damaged[place:place] = chance.randbytes(chance.randint(1, 8))
            case _:
                damaged[place:place] = damaged[place : place + 16]
    return bytes(damaged)
