"""What the paths make of bodies, without a server; and their description."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import threading
import traceback
import tracemalloc
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from support.model_configs import config_of
from support.waiting import TIMEOUT_S

from edge_server.api.admission import ByteBudget
from edge_server.api.calls import CallThreads
from edge_server.api.http.call import QUESTION_BYTES, HttpCall, RequestRefused
from edge_server.api.http.rest import infer as generate
from edge_server.api.http.rest.api import JSON, Answer, RestCall
from edge_server.api.http.rest.infer import _wanted_encoding, compressed, decompressed, to_answer
from edge_server.api.http.rest.infer_request import Wanted, json_request, raw_request, to_json
from edge_server.api.http.rest.json_fields import load_value, read_json, read_load_parameters
from edge_server.api.http.rest.routes import _on_thread
from edge_server.api.http.rest.table import PATHS, document
from edge_server.errors import EdgeServerError, InternalError, InvalidRequest, Unavailable
from edge_server.requests import InferResponse
from edge_server.tensors import DataType, Tensor

MIB = 1024 * 1024


def _request(**more: Any) -> tuple[Any, list[bytes | memoryview], Any]:
    given = {"name": "x", "shape": [2], "datatype": "UINT8", "data": [1, 2], **more}
    body = memoryview(json.dumps({"inputs": [given]}).encode())
    return json_request("m", "", body, len(body))


def test_json_becomes_raw_contents_and_binary_data_stays_where_it_is() -> None:
    message, raw, wanted = _request()
    assert (message.inputs[0].datatype, raw, wanted.is_binary("y")) == ("UINT8", [b"\1\2"], False)
    given = {"name": "x", "shape": [3], "datatype": "UINT8", "parameters": {"binary_data_size": 3}}
    text = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    body = memoryview(bytearray(text + b"abc"))
    _, raw, wanted = json_request("m", "", body, len(text))
    assert wanted.is_binary("y")
    view = np.frombuffer(raw[0], np.uint8)
    assert np.shares_memory(view, np.frombuffer(body, np.uint8))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"data": [1, 300]}, "does not fit UINT8"),
        ({"data": [1, 2.5]}, "non-unsigned-integer as unsigned-integer"),
        ({"data": [1, True]}, "non-unsigned-integer as unsigned-integer"),
        ({"data": [1]}, "Shape does not match true shape of 'data' field"),
        ({"datatype": "BOOL"}, "non-boolean as boolean"),
        ({"datatype": "BYTES"}, "non-string as string"),
        ({"shape": [2**63, 0]}, "causes total element count to exceed maximum size of 92233720"),
        ({"shape": [2**4, 2**60 + 2]}, "causes total element count to exceed maximum size of 9"),
        ({"shape": [2**2, 2**60 + 2], "datatype": "FP32"}, "byte size overflow for input"),
        ({"shape": [2**62] * 100_000}, "a shape of 100000 dimensions, at most 32 are read"),
        ({"name": "\ud800"}, "The surrogate pair in string is invalid"),
        ({"name": 3}, "Unable to parse 'name'"),
        ({"parameters": []}, "Unable to parse 'parameters'"),
    ],
)
def test_a_value_of_another_type_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(EdgeServerError, match=says):
        _request(**more)


def test_sequence_and_region_numbers_keep_their_64_bits() -> None:
    body = json.dumps({"inputs": [], "parameters": {"sequence_id": 2**64 - 1}}).encode()
    message, _, _ = json_request("m", "", memoryview(body), len(body))
    assert message.parameters["sequence_id"].int64_param == -1
    body = json.dumps({"inputs": [], "parameters": {"sequence_id": 2**64}}).encode()
    with pytest.raises(EdgeServerError, match="sequence_id"):
        json_request("m", "", memoryview(body), len(body))


def test_large_json_is_refused_before_it_is_parsed() -> None:
    body = memoryview(bytes(5 * MIB))
    with pytest.raises(InvalidRequest, match="send large tensors as binary data"):
        json_request("m", "", body, len(body))


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":' + b"[" * 99 + b"]" * 99 + b"}",
        b'{"a":["[[", "\\\\", "\\"[[", ' + b"[]," * 500 + b"1]}",
        b'{"a":"\\"[[","b":' + b"[" * 99 + b"]" * 99 + b"}",
    ],
)
def test_json_of_a_hundred_levels_is_read_and_brackets_in_texts_are_none(body: bytes) -> None:
    assert "a" in read_json(body)


@pytest.mark.parametrize("before", [b'{"a":', b'{"a":"\\\\","b":', b'{"a":[[],[[]]],"b":'])
def test_deeper_json_is_refused(before: bytes) -> None:
    with pytest.raises(InvalidRequest, match="nesting depth"):
        read_json(before + b"[" * 100 + b"]" * 100 + b"}")


def load_parameters(body: bytes) -> dict[str, str]:
    found = read_load_parameters(memoryview(body), 64 * MIB)
    return {key: load_value(key, value, str) for key, value in found.items()}


def test_what_a_load_does_not_know_makes_no_objects() -> None:
    tracemalloc.start()
    try:
        body = b'{"parameters":{"config":"{}"},"more":[' + b"[]," * 300_000 + b"1]}"
        assert load_parameters(body) == {"config": "{}"}
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


def test_a_load_that_is_no_utf8_is_the_client_s_fault() -> None:
    with pytest.raises(InternalError, match="failed to parse the request JSON buffer"):
        load_parameters(b'{"parameters": {"config": "\xff"}}')


@pytest.mark.parametrize(
    ("accepts", "wanted"),
    [
        ("", "identity"),
        ("gzip", "gzip"),
        ("deflate;q=0.5, gzip;q=0.7", "gzip"),
        ("br, *", "identity"),
        ("gzip;q=x, deflate", "deflate"),
        ("deflate, gzip", "deflate"),
    ],
)
def test_the_accepted_encoding_of_the_highest_weight_is_chosen(accepts: str, wanted: str) -> None:
    assert _wanted_encoding(accepts) == wanted


def test_tensors_are_compressed_only_for_clients_that_accept_nothing_else() -> None:
    binary = Answer(200, (("content-type", "application/octet-stream"),), (b"x" * 100,))
    assert compressed(binary, "gzip, deflate, br") is binary
    assert len(compressed(binary, "gzip").parts[0]) < 100
    assert len(compressed(Answer(200, JSON, (b"x" * 100,)), "gzip, br").parts[0]) < 100


def _read(call: HttpCall, *parts: bytes) -> bytes:
    """Return what `call` reads of a client that sends these parts of a body."""
    left = list(parts)

    async def receive() -> dict[str, Any]:
        message = {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}
        call.is_complete = not left
        return message

    return bytes(asyncio.run(call.read(receive))["body"])


def test_a_body_is_counted_before_it_comes_and_kept_once() -> None:
    budget = ByteBudget(2 * MIB, "http.max_pending_bytes")
    one = HttpCall(MIB, 2 * MIB, budget)
    assert _read(one, b"a" * MIB) == b"a" * MIB
    assert budget.used_bytes == MIB
    with pytest.raises(RequestRefused, match=r"http\.max_pending_bytes") as refused:
        _read(HttpCall(2 * MIB, 2 * MIB, budget))  # nothing of it has come
    assert refused.value.status == 503
    one.release()
    assert budget.used_bytes == 0
    with pytest.raises(RequestRefused) as refused:
        _read(HttpCall(2 * MIB + 1, 2 * MIB, budget))
    assert refused.value.status == 413
    with pytest.raises(RequestRefused) as refused:
        _read(HttpCall(None, 2 * MIB, budget), *[bytes(64 * 1024)] * 33)
    assert refused.value.status == 413
    assert budget.used_bytes == 0


@pytest.mark.parametrize(("room_bytes", "status"), [(4 * MIB, 413), (MIB, 503)])
def test_of_a_body_that_is_refused_nothing_is_counted_or_kept(room_bytes: int, status: int) -> None:
    """The error's frames would keep its buffer until the client has read the refusal."""
    budget = ByteBudget(room_bytes, "http.max_pending_bytes")
    call = HttpCall(None, 2 * MIB, budget)
    with pytest.raises(RequestRefused) as refused:
        _read(call, *[bytes(64 * 1024)] * 33)
    frames = [frame for frame, _ in traceback.walk_tb(refused.value.__traceback__)]
    values = [value for frame in frames for value in frame.f_locals.values()]
    kept = [value for value in values if isinstance(value, bytes | bytearray | memoryview)]
    assert (refused.value.status, budget.used_bytes) == (status, 0)
    assert max(map(len, [call.body, *kept])) <= 64 * 1024


def test_a_body_counts_with_what_it_decompresses_to() -> None:
    api: Any = SimpleNamespace(longest_bytes=2 * MIB)
    budget = ByteBudget(3 * MIB, "http.max_pending_bytes")

    def given(data: bytes) -> RestCall:
        body = memoryview(gzip.compress(data, 1))
        call = HttpCall(len(body), 2 * MIB, budget)
        return RestCall("POST", {}, {"content-encoding": "gzip"}, body, call)

    data = b"lanes" * (MIB // 4)
    one, other = given(data), given(bytes(2 * MIB))
    assert decompressed(api, one) == data
    with pytest.raises(Unavailable, match=r"http\.max_pending_bytes"):
        decompressed(api, other)
    one.connection.release()
    other.connection.release()
    # Its client is gone already.
    assert len(decompressed(api, other)) == 2 * MIB
    assert budget.used_bytes == 0


def test_what_a_slow_reader_misses_ends_its_responses_and_none_are_kept_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generate, "_SLOW_READER_S", 0)
    loop = asyncio.new_event_loop()
    responses = generate.GeneratedResponses(loop, HttpCall(0, 1, ByteBudget()))

    def taken() -> list[tuple[int, str]]:
        found = []
        while responses._waiting:
            status, text = responses._waiting.popleft()
            found.append((status, json.loads(text).get("id")))
        return found

    for number in range(30):
        responses.respond(InferResponse("m", "1", str(number), {}), final=False)
    assert taken() == [*((200, str(number)) for number in range(16)), (503, None)]
    assert loop.run_until_complete(responses.next()) is None
    responses = generate.GeneratedResponses(loop, HttpCall(0, 1, ByteBudget()))
    responses.end()
    responses.respond(InferResponse("m", "1", "", {}), final=False)
    assert taken() == []
    loop.close()


def test_an_answer_after_the_stop_of_the_server_is_dropped_without_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop, stopped, over = asyncio.new_event_loop(), threading.Event(), threading.Event()
    api: Any = SimpleNamespace(threads=CallThreads(1, "test"))

    async def leave() -> None:
        waiting = loop.create_task(_on_thread(api, stopped.wait))
        await asyncio.sleep(0)
        waiting.cancel()

    loop.run_until_complete(leave())
    responses = generate.GeneratedResponses(loop, HttpCall(0, 1, ByteBudget()))
    loop.close()
    responses.respond(None, final=True)
    stopped.set()
    api.threads.submit(over.set)
    assert over.wait(TIMEOUT_S)
    api.threads.shutdown()
    assert not caplog.records


@pytest.fixture
def validator() -> Any:
    """Its import binds a socket, to see whether there is IPv6."""
    return pytest.importorskip("openapi_spec_validator")


def test_the_description_has_every_path_and_is_valid(validator: Any) -> None:
    described = json.loads(document("triton", "1"))
    assert {
        (path, method.upper()) for path, each in described["paths"].items() for method in each
    } == {(each.path, each.method) for each in PATHS}
    validator.validate(described)


def test_a_load_of_a_million_parameters_is_refused_before_they_are_read() -> None:
    body = b'{"parameters":{' + b'"":"",' * 1_000_000 + b'"":""}}'
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="more than 65536 quotation marks"):
            load_parameters(body)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


def test_the_file_of_a_load_is_read_from_base64_without_a_text_of_it() -> None:
    body = b'{"parameters":{"file:1/a":"' + base64.b64encode(bytes(MIB)) + b'","file:2/b":"-"}}'
    found = read_load_parameters(memoryview(body), 64 * MIB)
    tracemalloc.start()
    try:
        assert load_value("file:1/a", found["file:1/a"], bytes) == bytes(MIB)
        assert tracemalloc.get_traced_memory()[1] < 2.2 * MIB
    finally:
        tracemalloc.stop()
    with pytest.raises(InvalidRequest, match="'file:2/b' is not base64"):
        load_value("file:2/b", found["file:2/b"], bytes)
    with pytest.raises(InternalError, match="Unable to parse 'config'"):
        load_value("config", msgspec.Raw(b"1"), str)


@pytest.mark.parametrize("item", [b"[],", b"{},", b'"ab",', b'{"":1},', b"0.5,"])
def test_what_becomes_of_json_counts_before_it_is_parsed(item: bytes) -> None:
    text = b'{"a":[' + item * 30_000 + b"1]}"
    call = HttpCall(None, 64 * MIB, ByteBudget(64 * MIB))
    tracemalloc.start()
    try:
        kept = read_json(text, call)
        assert kept
        made_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert made_bytes <= call._budget.used_bytes < 20 * made_bytes
    full = ByteBudget(MIB, "http.max_pending_bytes")
    full.take(1)
    with pytest.raises(Unavailable, match=r"http\.max_pending_bytes.*send tensors as binary data"):
        read_json(text, HttpCall(None, 64 * MIB, full))
    assert full.used_bytes == 1


def test_a_question_is_short_whether_it_says_its_length_or_not() -> None:
    budget = ByteBudget(64 * MIB)
    with pytest.raises(RequestRefused, match="65536 at most"):
        HttpCall(MIB, 64 * MIB, budget).limit(QUESTION_BYTES)
    chunked = HttpCall(None, 64 * MIB, budget)
    chunked.limit(QUESTION_BYTES)
    assert len(_read(chunked, bytes(QUESTION_BYTES))) == QUESTION_BYTES
    chunked = HttpCall(None, 64 * MIB, budget)
    chunked.limit(QUESTION_BYTES)
    with pytest.raises(RequestRefused, match="65536 at most"):
        _read(chunked, bytes(QUESTION_BYTES), b"1")


def test_only_tensors_and_files_make_a_body_long() -> None:
    long = {path.operation for path in PATHS if path.method == "POST" and not path.is_question}
    assert long == {"ModelInfer", "ModelStreamInfer", "RepositoryModelLoad"}


def test_json_of_an_output_is_made_in_parts_and_counted_with_them() -> None:
    budget = ByteBudget(2 * MIB, "http.max_pending_bytes")
    values = np.arange(100_000, dtype=np.int32)
    values_json = json.dumps(values.tolist(), separators=(",", ":")).encode()
    call = HttpCall(None, MIB, budget)
    parts = to_json("y", values, DataType.INT32, call)
    assert b"[" + b"".join(parts) + b"]" == values_json
    assert all(len(part) >= 2**18 for part in parts[:-1])
    assert 0.9 * len(values_json) < budget.used_bytes <= len(values_json) + 100
    with pytest.raises(Unavailable, match=r"http\.max_pending_bytes.*request 'y' as binary data"):
        to_json("y", np.full(MIB, 255, np.uint8), DataType.UINT8, call)
    call.release()
    assert budget.used_bytes == 0


def test_an_answer_has_its_arrays_in_their_places() -> None:
    outputs = {
        "a\0": Tensor(np.arange(20_000, dtype=np.int64)),
        "b": Tensor(np.array([1.5, np.nan], np.float32)),
        "c": Tensor(np.array([b"x\0", b"\xc3\xbc"], object)),
        "d": Tensor(np.zeros(0, np.uint8)),
    }
    response = InferResponse("m", "1", "\0", outputs)
    call = HttpCall(None, MIB, ByteBudget())
    answer = to_answer(response, {}, Wanted(), call)
    found = json.loads(b"".join(answer.parts))
    assert found["id"] == "\0"
    data = {output["name"]: output["data"] for output in found["outputs"]}
    assert data["a\0"] == list(range(20_000))
    assert data["b"][0] == 1.5
    assert np.isnan(data["b"][1])
    assert (data["c"], data["d"]) == (["x\0", "ü"], [])


def test_a_long_response_of_generate_counts_until_the_next_one_is_taken() -> None:
    loop, budget = asyncio.new_event_loop(), ByteBudget(MIB)
    responses = generate.GeneratedResponses(loop, HttpCall(None, MIB, budget))
    responses.begin(asyncio.sleep(0))
    large = InferResponse("m", "1", "", {"x": Tensor(np.full(150_000, 7, np.uint8))})
    for number in range(4):
        responses.respond(large, final=number == 3)
    statuses = []
    while (taken := loop.run_until_complete(responses.next())) is not None:
        statuses.append(taken[0])
    assert statuses == [200, 200, 200, 503]
    assert budget.used_bytes == 0
    loop.close()


def test_an_answer_counts_as_far_as_it_is_longer_than_its_request() -> None:
    budget = ByteBudget(4 * MIB)
    call = HttpCall(MIB, MIB, budget)
    call.count_answer(MIB)
    assert budget.used_bytes == MIB
    call.count_answer(2 * MIB)
    assert budget.used_bytes == 2 * MIB
    with pytest.raises(Unavailable):
        call.count_answer(5 * MIB)
    call.release()
    assert budget.used_bytes == 0


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (
            'input { name: "a" data_type: TYPE_FP32 dims: 1 } '
            'input { name: "b" data_type: TYPE_FP32 dims: 1 }',
            "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'm' "
            "model configuration",
        ),
        (
            'input { name: "a" data_type: TYPE_FP16 dims: [-1, -1] }',
            "The shape of the raw input 'a' can not be deduced because there are more than one "
            "variable-sized dimension",
        ),
        (
            'input { name: "a" data_type: TYPE_STRING dims: 2 }',
            "For BYTE datatype raw input 'a', the model must have input shape [1]",
        ),
    ],
)
def test_a_raw_body_that_does_not_tell_its_shape_is_refused(tensors: str, says: str) -> None:
    config = config_of(f'name: "m" {tensors}')
    with pytest.raises(InvalidRequest) as caught:
        raw_request("m", "", config, memoryview(bytes(8)))
    assert str(caught.value).endswith(says)
