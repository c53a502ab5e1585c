"""The walk over a request's fields finds what protobuf finds, or leaves it to protobuf."""

from __future__ import annotations

import contextlib
from unittest import mock

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb
from unit.api.models import model_of

from edge_server.api.convert import to_infer_request
from edge_server.api.grpc import wire
from edge_server.api.grpc.wire import (
    read_load_request,
    read_request,
    write_response,
    write_stream_response,
)
from edge_server.errors import EdgeServerError, InvalidRequest, Unavailable

NAMES = st.text("abc", max_size=3)


@st.composite
def requests(draw: st.DrawFn) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(
        model_name=draw(NAMES), model_version=draw(NAMES), id=draw(NAMES)
    )
    for name in draw(st.lists(NAMES, max_size=3)):
        shape = draw(st.lists(st.integers(-1, 2**40), max_size=3))
        request.inputs.add(name=name, datatype="UINT8", shape=shape)
        request.parameters[name].int64_param = draw(st.integers(-(2**63), 2**63 - 1))
    for name in draw(st.lists(NAMES, max_size=2)):
        request.outputs.add(name=name).parameters["p"].double_param = 1.5
    request.raw_input_contents.extend(draw(st.lists(st.binary(max_size=300), max_size=3)))
    return request


@pytest.fixture(autouse=True)
def walk_always() -> object:
    with mock.patch.object(wire, "_WALK_FROM_BYTES", 0):
        yield


def put_together(message: pb.ModelInferRequest, raw: list[memoryview]) -> pb.ModelInferRequest:
    whole = pb.ModelInferRequest()
    whole.CopyFrom(message)
    whole.raw_input_contents.extend(map(bytes, raw))
    return whole


@given(requests())
def test_any_valid_request_is_what_protobuf_reads(request: pb.ModelInferRequest) -> None:
    message, raw = read_request(request.SerializeToString())
    assert not message.raw_input_contents
    assert put_together(message, raw) == request


@given(requests(), requests())
def test_fields_in_any_order_and_twice_are_what_protobuf_reads(
    one: pb.ModelInferRequest, two: pb.ModelInferRequest
) -> None:
    data = one.SerializeToString() + two.SerializeToString()
    assert put_together(*read_request(data)) == pb.ModelInferRequest.FromString(data)


@given(requests(), st.data())
def test_a_damaged_request_is_protobufs_reading_or_our_error(
    request: pb.ModelInferRequest, data: st.DataObject
) -> None:
    damaged = bytearray(request.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        if not damaged:
            break
        place = data.draw(st.integers(0, len(damaged) - 1))
        action = data.draw(st.sampled_from(["set", "cut", "double"]))
        if action == "set":
            damaged[place] = data.draw(st.integers(0, 255))
        elif action == "cut":
            del damaged[place:]
        else:
            damaged[place:place] = damaged[place : place + 7]
    try:
        expected = pb.ModelInferRequest.FromString(bytes(damaged))
    except DecodeError:
        with pytest.raises(InvalidRequest, match="no ModelInferRequest"):
            read_request(bytes(damaged))
        return
    message, raw = read_request(bytes(damaged))
    assert put_together(message, raw).SerializeToString(deterministic=True) == (
        expected.SerializeToString(deterministic=True)
    )
    with contextlib.suppress(EdgeServerError):
        to_infer_request(message, raw, model_of(message))


def test_a_group_of_a_foreign_extension_is_left_to_protobuf() -> None:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"abc"])
    group = bytes([(15 << 3) | 3, (15 << 3) | 4])
    message, raw = read_request(group + request.SerializeToString())
    assert message.model_name == "m"
    assert raw == [b"abc"]


def test_raw_contents_of_a_large_request_are_views_on_its_bytes() -> None:
    data = pb.ModelInferRequest(raw_input_contents=[b"x" * 100]).SerializeToString()
    _, (raw,) = read_request(data)
    assert raw.obj is data


@pytest.mark.parametrize("field", [b"\x78\x00", b"\x3a\x00", b"\x2a\x00"])
def test_megabytes_of_empty_fields_are_refused_before_they_cost_memory(field: bytes) -> None:
    with pytest.raises(InvalidRequest, match="more than 1000 fields"):
        read_request(field * 1_000_000)


def test_large_tensors_go_raw_and_typed_ones_may_be_a_few_megabytes() -> None:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(2**23)])
    contents = request.inputs.add(name="a", datatype="UINT8").contents
    contents.bytes_contents.append(bytes(4 * 2**20 - 100))
    message, (raw,) = read_request(request.SerializeToString())
    assert len(raw) == 2**23
    assert message.inputs[0].contents == contents
    contents.bytes_contents.append(bytes(100))
    with pytest.raises(InvalidRequest, match="send large tensors in raw_input_contents"):
        read_request(request.SerializeToString())


def test_a_load_brings_large_files_and_not_ever_so_many() -> None:
    request = pb.RepositoryModelLoadRequest(model_name="m")
    request.parameters["config"].string_param = "{}"
    request.parameters["file:1/model.onnx"].bytes_param = bytes(2**24)
    assert read_load_request(request.SerializeToString()) == request
    for number in range(1000):
        request.parameters[f"file:{number}"].bytes_param = b""
    with pytest.raises(InvalidRequest, match=r"more than 1000 fields.* into the repository"):
        read_load_request(request.SerializeToString())


@pytest.mark.parametrize(
    "inside",
    [b"\x0a\x01a" * 10_000, b"\x12\xb0\xea\x01" + b"\x22\x01x" * 10_000, b"\x7b\x7c" * 10_000],
    ids=["keys", "values", "groups"],
)
def test_a_parameter_of_a_load_has_a_key_and_a_value_and_no_more(inside: bytes) -> None:
    data = b"\x1a" + wire._varint(len(inside)) + inside
    pb.RepositoryModelLoadRequest.FromString(data)
    with pytest.raises(InvalidRequest, match=r"with a parameter of more than 4|that this server"):
        read_load_request(data)


def test_bytes_that_are_no_load_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="the request is no RepositoryModelLoadRequest"):
        read_load_request(b"\xff")


def test_small_requests_may_not_bring_a_thousand_tensors_either() -> None:
    with (
        mock.patch.object(wire, "_WALK_FROM_BYTES", 2**40),
        pytest.raises(InvalidRequest, match="more than 1000 fields"),
    ):
        read_request(b"\x3a\x00" * 1001)


@pytest.mark.parametrize("fields", [b"\x3a\x80\x80\x80\x01" + bytes(2**23), b"\x2a\x00" * 10_000])
def test_a_large_request_that_cannot_be_walked_is_not_given_to_protobuf(fields: bytes) -> None:
    group = bytes([(15 << 3) | 3, (15 << 3) | 4])
    with pytest.raises(InvalidRequest, match="that this server can read"):
        read_request(group + fields)


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_a_response_reads_as_if_protobuf_had_written_it(contents: list[bytes]) -> None:
    message = pb.ModelInferResponse(model_name="m", id="7")
    arrays = [np.frombuffer(content, np.uint8) for content in contents]
    written = write_response(message, [array.data for array in arrays])
    expected = pb.ModelInferResponse(model_name="m", id="7", raw_output_contents=contents)
    assert pb.ModelInferResponse.FromString(written) == expected


def test_a_stream_response_reads_as_if_protobuf_had_written_it() -> None:
    response = pb.ModelInferResponse(model_name="m", raw_output_contents=[b"x" * 300])
    written = write_stream_response(response.SerializeToString())
    expected = pb.ModelStreamInferResponse(infer_response=response)
    assert pb.ModelStreamInferResponse.FromString(written) == expected


class Counted:
    """A call that counts what is made of its request."""

    cancelled = False

    def __init__(self) -> None:
        self.bytes = 0

    def count(self, size_bytes: int) -> None:
        self.bytes += size_bytes

    def when_cancelled(self, callback: object) -> None: ...


@pytest.mark.parametrize(
    ("field", "values", "times"),
    [("fp32_contents", [0.0] * 2**16, 2), ("bytes_contents", [b""] * 2**16, 16)],
)
def test_what_protobuf_makes_of_a_large_request_counts_before_it_is_parsed(
    field: str, values: list[object], times: int
) -> None:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(2**20)])
    getattr(request.inputs.add(name="a").contents, field).extend(values)
    request.inputs.add(name="b", shape=[1] * 100)
    data, call = request.SerializeToString(), Counted()
    read_request(data, call)
    parsed_bytes = len(data) - 2**20
    assert times * parsed_bytes <= call.bytes + 1000 <= times * parsed_bytes + 20_000

    class Full(Counted):
        def count(self, size_bytes: int) -> None:
            raise Unavailable("full")

    with pytest.raises(Unavailable, match="full"):
        read_request(data, Full())
