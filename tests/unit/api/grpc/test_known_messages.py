"""A request that is recognised is what the ordinary way of reading makes of it."""

from __future__ import annotations

import weakref
from contextlib import suppress

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.grpc.convert import to_infer_request, to_response_message
from edge_server.api.grpc.known_messages import KnownRequests, KnownResponses
from edge_server.api.grpc.wire import read_request
from edge_server.errors import EdgeServerError
from edge_server.requests import InferRequest, InferResponse
from edge_server.tensors import Tensor

IDS = st.sampled_from(["", "7", "frame-12", "é", "x" * 127, "x" * 128])


def request(model: str, request_id: str, arrays: list[np.ndarray]) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model, id=request_id)
    for place, array in enumerate(arrays):
        datatype = {1: "UINT8", 4: "FP32"}[array.itemsize]
        message.inputs.add(name=f"x{place}", datatype=datatype, shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    return message


def read(data: bytes) -> tuple[pb.ModelInferRequest, InferRequest]:
    message, raw = read_request(data)
    return message, to_infer_request(message, raw)


def assert_same(one: InferRequest, two: InferRequest) -> None:
    assert (one.model_name, one.model_version, one.outputs, one.id, one.priority) == (
        two.model_name,
        two.model_version,
        two.outputs,
        two.id,
        two.priority,
    )
    assert dict(one.parameters) == dict(two.parameters)
    assert list(one.inputs) == list(two.inputs)
    for name, tensor in one.inputs.items():
        assert tensor.datatype is two.inputs[name].datatype
        np.testing.assert_array_equal(tensor.array, two.inputs[name].array)


@st.composite
def arrays(draw: st.DrawFn) -> list[np.ndarray]:
    sizes = draw(st.lists(st.integers(0, 200), min_size=1, max_size=3))
    dtypes = st.sampled_from([np.uint8, np.float32])
    return [np.arange(size).astype(draw(dtypes)) for size in sizes]


@given(st.sampled_from(["m", "n" * 127, "n" * 128]), IDS, IDS, arrays())
def test_the_second_of_a_kind_is_recognised_whatever_its_id_and_bytes(
    model: str, first_id: str, second_id: str, values: list[np.ndarray]
) -> None:
    known = KnownRequests()
    first = request(model, first_id, values).SerializeToString()
    assert known.recall(first, None, None) is None
    known.remember(first, *read(first))
    second = request(model, second_id, [array + 1 for array in values]).SerializeToString()
    recalled = known.recall(second, None, None)
    if len(model) < 128 and max(len(first_id.encode()), len(second_id.encode())) < 128:
        assert recalled is not None
    if recalled is not None:
        assert_same(recalled, read(second)[1])


@given(st.lists(st.tuples(IDS, arrays()), min_size=1, max_size=4), st.data())
def test_whatever_is_recognised_is_read_the_same_in_the_ordinary_way(
    seen: list[tuple[str, list[np.ndarray]]], data: st.DataObject
) -> None:
    known = KnownRequests()
    messages = []
    for request_id, values in seen:
        message = request("m", request_id, values)
        if data.draw(st.booleans()):
            message.outputs.add(name="y")
        if data.draw(st.booleans()):
            message.parameters["mine"].int64_param = data.draw(st.integers(0, 300))
        messages.append(message.SerializeToString())
        known.remember(messages[-1], *read(messages[-1]))
    changed = bytearray(data.draw(st.sampled_from(messages)))
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(changed) - 1))
        if data.draw(st.booleans()):
            changed[place] = data.draw(st.integers(0, 255))
        else:
            changed[place:place] = changed[: data.draw(st.integers(0, 8))]
    recalled = known.recall(bytes(changed), None, None)
    if recalled is not None:
        assert_same(recalled, read(bytes(changed))[1])


def test_what_does_not_lie_in_the_raw_contents_is_never_recognised() -> None:
    known = KnownRequests()
    typed = pb.ModelInferRequest(model_name="m")
    typed.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(1.0)
    strings = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"\1\0\0\0a"])
    strings.inputs.add(name="x", datatype="BYTES", shape=[1])
    shared = request("m", "", [np.zeros(4, np.uint8)])
    shared.inputs[0].parameters["shared_memory_region"].string_param = "r"
    for message in (typed, strings, shared):
        data = message.SerializeToString()
        with suppress(EdgeServerError):
            known.remember(data, *read(data))
        assert known.recall(data, None, None) is None


def test_ever_new_kinds_do_not_fill_the_memory() -> None:
    known = KnownRequests()
    for size in range(2000):
        data = request("m", "", [np.zeros(size, np.uint8)]).SerializeToString()
        known.remember(data, *read(data))
    assert len(known._known) <= 256


@given(IDS, st.lists(st.integers(0, 300), max_size=3), st.booleans())
def test_an_answer_is_what_protobuf_would_write(
    request_id: str, sizes: list[int], strided: bool
) -> None:
    known = KnownResponses()
    for fill in (1, 2):
        outputs = {}
        for place, size in enumerate(sizes):
            array = np.full((2, size), fill, np.float32)
            outputs[f"y{place}"] = Tensor(array.T if strided else array)
        response = InferResponse("m", "3", request_id, outputs)
        written = known.write(response)
        assert written is not None
        message, raw = to_response_message(response)
        message.raw_output_contents.extend(map(bytes, raw))
        assert pb.ModelInferResponse.FromString(written) == message


def test_answers_that_are_not_plain_are_left_to_the_ordinary_way() -> None:
    known = KnownResponses()
    strings = {"y": Tensor(np.array([b"a"], np.object_))}
    assert known.write(InferResponse("m", "1", "", strings)) is None
    plain = {"y": Tensor(np.zeros(2, np.uint8))}
    assert known.write(InferResponse("m", "1", "", plain)) is not None
    assert known.write(InferResponse("m", "1", "", plain, parameters={"p": 1})) is None


class Call:
    """A `Cancellation`."""

    cancelled = False

    def when_cancelled(self, callback: object) -> None: ...


def test_what_is_remembered_holds_neither_the_call_nor_its_bytes() -> None:
    known, call = KnownRequests(), Call()
    message, raw = read_request(request("m", "", [np.zeros(4, np.uint8)]).SerializeToString())
    asked = to_infer_request(message, raw, None, call)
    gone = [weakref.ref(call), weakref.ref(asked.inputs["x0"].array)]
    data = request("m", "", [np.zeros(4, np.uint8)]).SerializeToString()
    known.remember(data, message, asked)
    assert known.recall(data, None, None) is not None
    del asked, call, raw
    assert [each() for each in gone] == [None, None]
