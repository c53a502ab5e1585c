"""Messages become tensors without a copy, and what does not add up is written in Triton's words."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.model_configs import config_of
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor
from unit.api.models import model_of

from edge_server.api.contents import to_raw
from edge_server.api.convert import output_forms, to_infer_request, to_response_message
from edge_server.api.grpc.wire import read_request
from edge_server.api.http.rest.infer_request import to_raw_contents
from edge_server.api.shared_memory import RegionSlice, SharedMemory
from edge_server.errors import InvalidRequest, Unsupported
from edge_server.requests import InferRequest, InferResponse
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from pathlib import Path


def message(
    *inputs: tuple[str, str, list[int]], raw: tuple[bytes, ...] = ()
) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="m", id="7")
    for name, datatype, shape in inputs:
        request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.extend(raw)
    return request


def read(message: pb.ModelInferRequest, shared_memory: SharedMemory | None = None) -> InferRequest:
    """The request as the servicer reads it from the wire."""
    head, raw = read_request(message.SerializeToString())
    return to_infer_request(head, raw, model_of(message), shared_memory=shared_memory)[0]


def test_raw_contents_are_a_view_on_the_received_bytes() -> None:
    raw = np.arange(6, dtype=np.float32).tobytes()
    request = message(("a", "FP32", [2, 3]), raw=(raw,))
    array = read(request).inputs["a"].array
    assert array.shape == (2, 3)
    assert array.base is not None
    assert not array.flags.owndata
    assert not array.flags.writeable


@pytest.mark.parametrize("datatype", [d for d in DataType if d is not DataType.BYTES])
def test_every_type_goes_in_and_comes_out_the_same(datatype: DataType) -> None:
    array = np.array([[0, 1], [1, 0]], dtype=datatype.numpy)
    request = message(("a", datatype.value, [2, 2]), raw=(array.tobytes(),))
    tensor = read(request).inputs["a"]
    np.testing.assert_array_equal(tensor.array, array)
    response, raw = to_response_message(InferResponse("m", "1", "7", {"a": tensor}))
    assert response.outputs[0].datatype == datatype.value
    assert raw[0] == array.tobytes()


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_bytes_elements_agree_with_the_published_client(elements: list[bytes]) -> None:
    array = np.array(elements, dtype=np.object_)
    raw = serialize_byte_tensor(array).item() if elements else b""
    request = message(("a", "BYTES", [len(elements)]), raw=(raw,))
    tensor = read(request).inputs["a"]
    assert tensor.array.tolist() == elements
    _, (out,) = to_response_message(InferResponse("m", "1", "", {"a": tensor}))
    assert deserialize_bytes_tensor(bytes(out)).tolist() == elements


@pytest.mark.parametrize(
    ("field", "datatype", "values"),
    [
        ("fp32_contents", "FP32", [1.5, 2]),
        ("int_contents", "INT8", [-1, 1]),
        ("uint_contents", "UINT8", [0, 255]),
        ("bool_contents", "BOOL", [True, False]),
        ("bytes_contents", "BYTES", [b"a", b""]),
    ],
)
def test_typed_contents_are_read_too(field: str, datatype: str, values: list[object]) -> None:
    request = message(("a", datatype, [2]))
    getattr(request.inputs[0].contents, field).extend(values)
    assert read(request).inputs["a"].array.tolist() == values


def typed_and_raw() -> pb.ModelInferRequest:
    request = message(("a", "FP32", [1]), raw=(b"1234",))
    request.inputs[0].contents.fp32_contents.append(1)
    return request


def wrong_field() -> pb.ModelInferRequest:
    request = message(("a", "FP32", [1]))
    request.inputs[0].contents.int_contents.append(1)
    return request


def typed(name: str, datatype: str, **contents: list[object]) -> pb.ModelInferRequest:
    request = message((name, datatype, [1]))
    for field, values in contents.items():
        getattr(request.inputs[0].contents, field).extend(values)
    return request


def too_large_value() -> pb.ModelInferRequest:
    request = message(("a", "INT8", [1]))
    request.inputs[0].contents.int_contents.append(1000)
    return request


def test_a_number_that_does_not_fit_is_refused_with_numpy_1_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = np.array
    # numpy 1 wraps whole numbers round, as this does.
    monkeypatch.setattr(np, "array", lambda values, dtype: original(values).astype(dtype))
    assert to_raw_contents("x", DataType.UINT8, 2, [0, 255]) == b"\0\xff"
    for value, datatype in ((300, DataType.UINT8), (-1, DataType.UINT64), (2**40, DataType.INT32)):
        with pytest.raises(InvalidRequest, match=f"does not fit {datatype.value}"):
            to_raw_contents("x", datatype, 1, [value])
    with pytest.raises(InvalidRequest, match="does not fit INT8"):
        read(too_large_value())


def with_parameter(key: str, **value: object) -> pb.ModelInferRequest:
    request = message()
    request.parameters[key].CopyFrom(pb.InferParameter(**value))
    return request


def duplicate_output() -> pb.ModelInferRequest:
    request = message()
    request.outputs.add(name="y")
    request.outputs.add(name="y")
    return request


@pytest.mark.parametrize(
    ("request_message", "says"),
    [
        (
            message(("a", "FP32", [2]), raw=(b"1234",)),
            "[request id: 7] input byte size mismatch for input 'a' for model 'm'. "
            "Expected 8, got 4",
        ),
        (
            message(("a", "FP32", [1]), ("b", "FP32", [1]), raw=(b"1234",)),
            "unable to find data for input tensor 'b' for model 'm' in request.",
        ),
        (
            message(("a", "FP32", [1]), ("a", "FP32", [1]), raw=(b"1234", b"1234")),
            "[request id: 7] input 'a' already exists in request",
        ),
        (duplicate_output(), "[request id: 7] output 'y' already exists in request"),
        (
            message(("a", "FP32", [-1, 2]), raw=(b"",)),
            "All input dimensions should be specified for input 'a' for model 'm', got [-1,2]",
        ),
        (message(("a", "FP33", [1]), raw=(b"1234",)), "invalid datatype 'FP33' for input 'a'"),
        (
            typed_and_raw(),
            "contents field must not be specified when using raw_input_contents for 'a' for "
            "model 'm'",
        ),
        (
            wrong_field(),
            "unexpected explicit tensor data for input tensor 'a' for model 'm' of type 'INT32', "
            "expected datatype 'FP32'",
        ),
        (too_large_value(), "does not fit INT8"),
        (
            typed("a", "FP32", fp32_contents=[1], int_contents=[1]),
            "unexpected explicit tensor data for input tensor 'a' for model 'm', binary data was "
            "already supplied.",
        ),
        (
            typed("a", "FP16", fp32_contents=[1]),
            "unexpected explicit tensor data for input tensor 'a' for model 'm' of type 'FP32', "
            "expected datatype 'FP16'",
        ),
        (
            typed("a", "BYTES", bytes_contents=[b"x", b"y"]),
            "unexpected number of string elements 2 for inference input 'a' for model 'm', "
            "expecting 1",
        ),
        (
            message(("a", "BYTES", [1]), raw=(b"\x01\x00",)),
            "incomplete string length indicator for inference input 'a' for model 'm', expecting "
            "4 bytes but only 2 bytes available.",
        ),
        (
            message(("a", "BYTES", [1]), raw=(b"\x09\x00\x00\x00ab",)),
            "incomplete string data for inference input 'a' for model 'm', expecting string of "
            "length 9 but only 2 bytes available.",
        ),
        (
            message(("a", "BYTES", [2]), raw=(b"\x01\x00\x00\x00a",)),
            "expected 2 string elements for inference input 'a' for model 'm', got 1",
        ),
        (
            message(("a", "BYTES", [1]), raw=(b"\x01\x00\x00\x00a" * 3,)),
            "unexpected number of string elements 2 for inference input 'a' for model 'm', "
            "expecting 1",
        ),
        *(
            (message(("a", "FP32", shape), raw=(b"1234",)), "has a shape that no memory holds")
            for shape in ([2**62, 2**62], [0, 2**62, 2**62], [1] * 65)
        ),
        (
            with_parameter("triton_secret", int64_param=1),
            "parameter keys starting with 'triton_' are reserved for Triton usage. Only the "
            "following keys starting with 'triton_' are allowed: "
            "triton_enable_empty_final_response ",
        ),
    ],
)
def test_contradictions_are_refused_in_the_contracts_words(
    request_message: pb.ModelInferRequest, says: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(request_message)
    assert says in str(caught.value)


def test_extra_raw_contents_are_ignored_as_triton_does() -> None:
    request = message(("a", "FP32", [1]), raw=(b"1234", b"extra"))
    assert read(request).inputs["a"].shape == (1,)


def test_shared_memory_is_refused_where_it_is_off() -> None:
    request = message(("a", "FP32", [1]), raw=(b"1234",))
    request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(Unsupported, match="Client shared memory is disabled"):
        read(request)


CONFIG = config_of(
    'name: "m" input { name: "a" data_type: TYPE_FP32 dims: [ -1, 3 ] }'
    'input { name: "s" data_type: TYPE_STRING dims: -1 optional: true }'
)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ([("a", "FP32", [2**40, 4])], "unexpected shape for input 'a' for model 'm'"),
        ([("a", "FP32", [1] * 4000)], "has a shape that no memory holds"),
        ([("a", "FP32", [3])], r"Expected \[-1,3\], got \[3\]"),
        ([("a", "INT64", [1, 3])], "data-type is 'INT64', but model 'm' expects 'FP32'"),
        ([("b", "FP32", [1, 3])], "unexpected inference input 'b' for model 'm'"),
        ([(f"a{n}", "FP32", [1]) for n in range(900)], "but got 900 inputs for model 'm'"),
        ([("a", "FP32", [1, 3])] * 2, "input 'a' already exists in request"),
    ],
)
def test_what_the_model_does_not_take_is_not_converted(
    inputs: list[tuple[str, str, list[int]]], says: str
) -> None:
    class Untouchable:
        def __len__(self) -> int:
            raise AssertionError("somebody reads the tensor")

    head, _ = read_request(message(*inputs).SerializeToString())
    raw = [Untouchable()] * len(inputs)
    with pytest.raises(InvalidRequest, match=says):
        to_infer_request(head, raw, CONFIG)


def test_strings_are_a_million_at_most_in_all_tensors_together() -> None:
    many = 2**20
    values = memoryview(bytes(4 * many))
    head = message(("a", "BYTES", [1]), ("b", "BYTES", [many]))
    with pytest.raises(InvalidRequest, match=f"with input 'b' for .* {many + 1} strings, at most"):
        to_infer_request(head, [values[:4], values], model_of(head))


@pytest.mark.parametrize("datatype", list(DataType))
def test_contents_without_a_value_are_a_tensor_without_an_element(datatype: DataType) -> None:
    request = message(("a", datatype.value, [0]))
    request.inputs[0].contents.SetInParent()
    assert read(request).inputs["a"].array.dtype == datatype.numpy
    request.inputs[0].shape[0] = 1
    with pytest.raises(InvalidRequest, match=r"byte size mismatch|expected 1 string elements"):
        read(request)


@given(st.integers(0, 40_000))
def test_typed_contents_of_any_length_are_read_in_order(count: int) -> None:
    request = message(("a", "INT32", [count]))
    request.inputs[0].contents.int_contents.extend(range(count))
    np.testing.assert_array_equal(read(request).inputs["a"].array, np.arange(count))


def test_a_tensor_in_shared_memory_of_another_size_is_not_copied(tmp_path: Path) -> None:
    with (tmp_path / "key").open("wb") as file:
        file.truncate(2**40)  # of which nothing is there
    regions = SharedMemory(tmp_path)
    regions.register("r", "key", 0, 2**40)
    request = message(("a", "UINT8", [2]))
    parameters = request.inputs[0].parameters
    parameters["shared_memory_region"].string_param = "r"
    parameters["shared_memory_byte_size"].int64_param = 2**39
    with pytest.raises(InvalidRequest, match=f"Expected 2, got {2**39}"):
        read(request, regions)
    for datatype in ("UINT8", "BYTES"):
        request.inputs[0].datatype = datatype
        request.inputs[0].shape[0] = 1 if datatype == "BYTES" else 2**39
        with pytest.raises(InvalidRequest, match=r"grpc\.max_message_bytes"):
            read(request, regions)


def test_raw_contents_skip_the_inputs_that_are_in_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\x01\x02\x03\x04")
    regions = SharedMemory(tmp_path)
    regions.register("r", "key", 0, 4)
    request = message(("a", "UINT8", [2]), ("b", "UINT8", [1]), raw=(b"\x09",))
    request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    request.inputs[0].parameters["shared_memory_offset"].int64_param = 1
    request.inputs[0].parameters["shared_memory_byte_size"].int64_param = 2
    inputs = read(request, regions).inputs
    assert inputs["a"].array.tolist() == [2, 3]
    assert inputs["b"].array.tolist() == [9]
    request.inputs[0].parameters["shared_memory_byte_size"].int64_param = 3
    with pytest.raises(InvalidRequest, match="Expected 2, got 3"):
        read(request, regions)
    request.inputs[0].contents.uint_contents.extend([1, 2])
    with pytest.raises(InvalidRequest, match="unexpected 'content' provided when using shared"):
        read(request, regions)


@pytest.mark.parametrize(
    ("parameter", "says"),
    [
        (
            pb.InferParameter(string_param="2"),
            "invalid value type for 'classification' parameter, expected int64_param",
        ),
        (
            pb.InferParameter(int64_param=0),
            "invalid value for 'classification' parameter, expected >= 0",
        ),
    ],
)
def test_a_wish_for_classes_that_makes_no_sense_is_refused(
    parameter: pb.InferParameter, says: str
) -> None:
    request = message()
    request.outputs.add(name="b").parameters["classification"].CopyFrom(parameter)
    with pytest.raises(InvalidRequest, match=says):
        output_forms({"b": request.outputs[0]}, CONFIG)


def test_an_output_is_classified_or_in_shared_memory_not_both(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(8))
    regions = SharedMemory(tmp_path)
    regions.register("r", "key", 0, 8)
    request = message()
    parameters = request.outputs.add(name="b").parameters
    parameters["shared_memory_region"].string_param = "r"
    parameters["shared_memory_byte_size"].int64_param = 8
    assert isinstance(output_forms({"b": request.outputs[0]}, CONFIG, regions)["b"], RegionSlice)
    parameters["classification"].int64_param = 1
    with pytest.raises(InvalidRequest, match="output can't set both"):
        output_forms({"b": request.outputs[0]}, CONFIG, regions)


def test_a_models_response_parameters_are_sent() -> None:
    response = InferResponse("m", "1", "", {}, parameters={"n": 1, "sure": True})
    written, _ = to_response_message(response)
    assert written.parameters["n"].int64_param == 1
    assert written.parameters["sure"].bool_param


def test_the_callers_timeout_becomes_a_deadline() -> None:
    config = model_of(message())
    request, _ = to_infer_request(message(), [], config, timeout_s=5.0)
    assert request.deadline is not None
    assert 4.0 < request.deadline - time.monotonic() <= 5.0
    assert to_infer_request(message(), [], config)[0].deadline is None


def test_strings_count_with_the_objects_that_they_become() -> None:
    counted: list[int] = []

    class Call:
        cancelled = False

        def count(self, size_bytes: int) -> None:
            counted.append(size_bytes)

        def when_cancelled(self, callback: object) -> None: ...

    for many in (100, 5000):
        head = message(("a", "BYTES", [many]))
        to_infer_request(head, [memoryview(bytes(4 * many))], model_of(head), call=Call())
    assert counted == [64 * 5000]


def test_many_strings_are_written_as_few_are() -> None:
    elements = [b"%d" % n for n in range(40_000)]
    expected = b"".join(len(each).to_bytes(4, "little") + each for each in elements)
    assert to_raw(np.array(elements, object)) == expected
