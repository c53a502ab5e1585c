"""Protocol messages ↔ tensors. Raw contents become views on the received bytes: no copy."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from edge_server.errors import InvalidRequest, Unsupported
from edge_server.requests import InferRequest, InferResponse
from edge_server.tensors import DataType, Tensor, element_count, shape_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

# Which field of InferTensorContents carries a type; FP16 travels raw only.
_CONTENTS_FIELD = {
    DataType.BOOL: "bool_contents",
    DataType.INT8: "int_contents",
    DataType.INT16: "int_contents",
    DataType.INT32: "int_contents",
    DataType.INT64: "int64_contents",
    DataType.UINT8: "uint_contents",
    DataType.UINT16: "uint_contents",
    DataType.UINT32: "uint_contents",
    DataType.UINT64: "uint64_contents",
    DataType.FP32: "fp32_contents",
    DataType.FP64: "fp64_contents",
    DataType.BYTES: "bytes_contents",
}
# The type that Triton says of a contents field.
_TYPE_OF_FIELD = {
    "bool_contents": "BOOL",
    "int_contents": "INT32",
    "int64_contents": "INT64",
    "uint_contents": "UINT32",
    "uint64_contents": "UINT64",
    "fp32_contents": "FP32",
    "fp64_contents": "FP64",
    "bytes_contents": "BYTES",
}

# Parameters that change what a request means. What is not acted on here is refused, not ignored.
_SEQUENCE_PARAMETERS = frozenset({"sequence_id", "sequence_start", "sequence_end"})
_ALLOWED_TRITON_PARAMETER = "triton_enable_empty_final_response"
_INTEGERS = frozenset({"int64_param", "uint64_param"})
DISABLED_SHARED_MEMORY = "Client shared memory is disabled. This server does not offer it."

# numpy's limit on 1.x; and more elements than any board has memory for.
_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 2**48


def to_infer_request(
    message: Any, raw: Sequence[memoryview], timeout_s: float | None = None
) -> InferRequest:
    """The request that a `ModelInferRequest` carries.

    Args:
        message: without its raw contents, which may be large.
        raw: those; the tensors are views on them.
        timeout_s: how long the caller still waits; None is for ever.

    Raises:
        InvalidRequest: its tensors do not add up (Triton's texts).
        Unsupported: it uses an extension that this server does not offer.
    """
    _check_parameters(message.parameters)
    prefix = f"[request id: {message.id or '<id_unknown>'}] "
    raw_contents = iter(raw)
    inputs: dict[str, Tensor] = {}
    for tensor in message.inputs:
        if tensor.name in inputs:
            raise InvalidRequest(f"{prefix}input '{tensor.name}' already exists in request")
        _refuse_extensions(tensor)
        declared = _declared(tensor, message.model_name, prefix)
        array = _contents(declared, tensor, raw_contents, has_raw=bool(raw))
        inputs[tensor.name] = Tensor(array.reshape(declared.shape))
    outputs: list[str] = []
    for output in message.outputs:
        if output.name in outputs:
            raise InvalidRequest(f"{prefix}output '{output.name}' already exists in request")
        _refuse_extensions(output)
        outputs.append(output.name)
    return InferRequest(
        model_name=message.model_name,
        model_version=message.model_version,
        inputs=inputs,
        outputs=tuple(outputs),
        id=message.id,
        deadline=None if timeout_s is None else time.monotonic() + timeout_s,
    )


def to_response_message(response: InferResponse) -> tuple[Any, list[memoryview]]:
    """The `ModelInferResponse` for `response` without its raw contents, and those."""
    message = pb.ModelInferResponse(
        model_name=response.model_name, model_version=response.model_version, id=response.id
    )
    raw: list[memoryview] = []
    for name, tensor in response.outputs.items():
        message.outputs.add(name=name, datatype=tensor.datatype.value, shape=tensor.shape)
        raw.append(_to_raw(tensor))
    return message, raw


def _check_parameters(parameters: Any) -> None:
    for key, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if key in _SEQUENCE_PARAMETERS:
            raise Unsupported(f"request parameter '{key}': this server has no sequence batching")
        if key == "timeout" and kind != "int64_param":
            raise InvalidRequest(
                "invalid value type for 'timeout' parameter, expected int64_param."
            )
        if key == "priority" and kind not in _INTEGERS:
            raise InvalidRequest(
                "invalid value type for 'priority' parameter, expected int64_param or uint64_param."
            )
        if key.startswith("triton_") and key != _ALLOWED_TRITON_PARAMETER:
            raise InvalidRequest(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the "
                "following keys starting with 'triton_' are allowed: "
                f"{_ALLOWED_TRITON_PARAMETER} "
            )


def _refuse_extensions(tensor: Any) -> None:
    if "shared_memory_region" in tensor.parameters:
        raise Unsupported(DISABLED_SHARED_MEMORY)
    if "classification" in tensor.parameters:
        raise Unsupported(f"output '{tensor.name}': this server does not classify")


@dataclass(frozen=True)
class _Declared:
    """What a request says of one input, before its data is read."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    model: str
    prefix: str

    @property
    def count(self) -> int:
        return element_count(self.shape)

    def size_mismatch(self, got_bytes: int) -> InvalidRequest:
        return InvalidRequest(
            f"{self.prefix}input byte size mismatch for input '{self.name}' for model "
            f"'{self.model}'. Expected {self.count * self.datatype.numpy.itemsize}, "
            f"got {got_bytes}"
        )


def _contents(
    declared: _Declared, tensor: Any, raw_contents: Iterator[memoryview], *, has_raw: bool
) -> NDArray[Any]:
    """The input's values, flat; raw ones are taken in the order of the inputs that need them."""
    if tensor.HasField("contents"):
        if has_raw:
            raise InvalidRequest(
                "contents field must not be specified when using raw_input_contents for "
                f"'{declared.name}' for model '{declared.model}'"
            )
        return _from_contents(declared, tensor.contents)
    raw = next(raw_contents, None)
    if raw is None:
        raise InvalidRequest(
            f"unable to find data for input tensor '{declared.name}' for model "
            f"'{declared.model}' in request."
        )
    return _from_raw(declared, raw)


def _declared(tensor: Any, model: str, prefix: str) -> _Declared:
    try:
        datatype = DataType(tensor.datatype)
    except ValueError:
        raise InvalidRequest(
            f"{prefix}invalid datatype '{tensor.datatype[:32]}' for input '{tensor.name}' for "
            f"model '{model}'; known: {', '.join(d.value for d in DataType)}"
        ) from None
    shape = tuple(tensor.shape)
    if any(dim < 0 for dim in shape):
        raise InvalidRequest(
            f"{prefix}All input dimensions should be specified for input '{tensor.name}' for "
            f"model '{model}', got {shape_text(shape)}"
        )
    if len(shape) > _MOST_DIMENSIONS or element_count(max(d, 1) for d in shape) > _MOST_ELEMENTS:
        raise InvalidRequest(
            f"{prefix}input '{tensor.name}' for model '{model}' has a shape that no memory holds: "
            f"{shape_text(shape[:_MOST_DIMENSIONS])}"
        )
    return _Declared(tensor.name, datatype, shape, model, prefix)


def _from_raw(declared: _Declared, raw: memoryview) -> NDArray[Any]:
    if declared.datatype is DataType.BYTES:
        return _decode_bytes(declared, raw)
    dtype = declared.datatype.numpy
    if len(raw) != declared.count * dtype.itemsize:
        raise declared.size_mismatch(len(raw))
    return np.frombuffer(raw, dtype, declared.count)


def _from_contents(declared: _Declared, contents: Any) -> NDArray[Any]:
    name, datatype, model = declared.name, declared.datatype, declared.model
    field = _CONTENTS_FIELD.get(datatype, "raw_input_contents")
    filled = [descriptor.name for descriptor, _ in contents.ListFields()]
    for other in filled:
        if other != field:
            raise InvalidRequest(
                f"unexpected explicit tensor data for input tensor '{name}' for model '{model}' "
                f"of type '{_TYPE_OF_FIELD[other]}', expected datatype '{datatype.value}'"
            )
    values = getattr(contents, field) if filled else ()
    if len(values) != declared.count:
        raise declared.size_mismatch(len(values) * datatype.numpy.itemsize)
    try:
        return np.array(values, dtype=datatype.numpy)
    except OverflowError as error:
        raise InvalidRequest(
            f"{declared.prefix}a value of input '{name}' for model '{model}' does not fit "
            f"{datatype.value}: {error}"
        ) from error


def _to_raw(tensor: Tensor) -> memoryview:
    """The tensor's bytes as the protocol lays them out: a view where numpy has them so."""
    array = tensor.array
    if tensor.datatype is DataType.BYTES:
        parts: list[bytes] = []
        for element in array.reshape(-1):
            parts += (len(element).to_bytes(4, "little"), element)
        return memoryview(b"".join(parts))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _decode_bytes(declared: _Declared, raw: memoryview) -> NDArray[np.object_]:
    """BYTES elements, each behind its 4-byte little-endian length."""
    prefix, where = declared.prefix, f"'{declared.name}' for model '{declared.model}'"
    elements: list[bytes] = []
    offset = 0
    while offset < len(raw) and len(elements) <= declared.count:
        left = len(raw) - offset
        if left < 4:
            raise InvalidRequest(
                f"{prefix}incomplete string length indicator for inference input {where}, "
                f"expecting 4 bytes but only {left} bytes available. Please make sure the string "
                "length indicator is in one buffer."
            )
        length = int.from_bytes(raw[offset : offset + 4], "little")
        offset += 4
        if len(raw) - offset < length:
            raise InvalidRequest(
                f"{prefix}incomplete string data for inference input {where}, expecting string of "
                f"length {length} but only {len(raw) - offset} bytes available. Please make sure "
                "the string data is in one buffer."
            )
        elements.append(bytes(raw[offset : offset + length]))
        offset += length
    if len(elements) > declared.count:
        raise InvalidRequest(
            f"{prefix}unexpected number of string elements {len(elements)} for inference input "
            f"{where}, expecting {declared.count}"
        )
    if len(elements) < declared.count:
        raise InvalidRequest(
            f"{prefix}expected {declared.count} string elements for inference input {where}, got "
            f"{len(elements)}"
        )
    array = np.empty(declared.count, dtype=np.object_)
    array[:] = elements
    return array
