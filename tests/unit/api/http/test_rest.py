"""What the paths make of bodies, without a server; and their description."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_server.api.admission import ByteBudget
from edge_server.api.call_threads import CallThreads
from edge_server.api.http.call import HttpCall
from edge_server.api.http.rest import generate
from edge_server.api.http.rest.api import JSON, Answer, RestCall
from edge_server.api.http.rest.infer import _wanted_encoding, compressed, decompressed
from edge_server.api.http.rest.infer_request import json_request
from edge_server.api.http.rest.json_fields import read_json, read_load_parameters
from edge_server.api.http.rest.openapi import document
from edge_server.api.http.rest.routes import _on_thread
from edge_server.api.http.rest.table import PATHS
from edge_server.errors import EdgeServerError, InternalError, InvalidRequest, Unavailable
from edge_server.requests import InferResponse

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
        ({"shape": [2**63, 2]}, "no memory holds"),
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


def test_what_a_load_does_not_know_makes_no_objects() -> None:
    tracemalloc.start()
    try:
        body = b'{"parameters":{"config":"{}"},"more":[' + b"[]," * 300_000 + b"1]}"
        assert read_load_parameters(body, 64 * MIB) == {"config": "{}"}
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


def test_a_load_that_is_no_utf8_is_the_client_s_fault() -> None:
    with pytest.raises(InternalError, match="failed to parse the request JSON buffer"):
        read_load_parameters(b'{"parameters": {"config": "\xff"}}', 64 * MIB)


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


def test_a_body_is_counted_before_it_comes_and_kept_once() -> None:
    budget = ByteBudget(2 * MIB, "http.max_pending_bytes")
    one = HttpCall(MIB, 2 * MIB, budget)
    assert (budget.used_bytes, len(one.missing)) == (MIB, MIB)
    other = HttpCall(2 * MIB, 2 * MIB, budget)
    assert other.refusal is not None
    assert (other.refusal.status, other.left) == (503, 0)
    assert "http.max_pending_bytes" in other.refusal.text
    one.release()
    assert budget.used_bytes == 0
    too_long = HttpCall(2 * MIB + 1, 2 * MIB, budget)
    assert too_long.refusal is not None
    assert too_long.refusal.status == 413
    chunked = HttpCall(None, 2 * MIB, budget)
    for _ in range(33):
        chunked.add(bytes(64 * 1024))
    assert chunked.refusal is not None
    chunked.release()
    assert budget.used_bytes == 0


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
    responses = generate.GeneratedResponses(loop)

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
    responses = generate.GeneratedResponses(loop)
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
    responses = generate.GeneratedResponses(loop)
    loop.close()
    responses.respond(None, final=True)
    stopped.set()
    api.threads.submit(over.set)
    assert over.wait(10)
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
