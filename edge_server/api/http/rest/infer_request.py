"""The body of an inference request: JSON, and the binary tensors behind it.

JSON becomes the protocol's own message, whose raw contents are views on the body, so that a request
is checked and converted as over gRPC.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.contents import DATATYPES, MOST_DIMENSIONS, joined, to_array
from edge_server.api.http.rest import json_fields as fields
from edge_server.api.parameters import write_parameter
from edge_server.errors import InternalError, InvalidRequest, Unavailable
from edge_server.requests import log_prefix
from edge_server.tensors import DataType, shape_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from edge_server.api.admission import Call
    from edge_server.model_config.config import ModelConfig

_MISMATCH = "Unable to parse 'data': Shape does not match true shape of 'data' field"
_ONLY_BINARY = frozenset({DataType.FP16, DataType.BF16})
_INTEGER = frozenset({int})
_NUMBER = frozenset({int, float})
_DEEPEST = 100
_ELEMENTS_AT_ONCE = 2**12
# The loop's thread has some microseconds of work with each part that it sends.
_PART_BYTES = 2**18
# Of elements, and of bytes, in Triton's own counts.
_MOST_COUNTED = 2**63 - 1


def to_raw_contents(name: str, datatype: DataType, count: int, data: Any) -> bytes | memoryview:
    """Return `data`, nested in any way, as the raw contents of the input `name`.

    Args:
        count: of the elements, by the input's shape.

    Raises:
        InvalidRequest: the type does not travel in JSON, or a value does not fit it.
        InternalError: the number of elements, or the type of one, is another (Triton's status).
    """
    if datatype in _ONLY_BINARY:
        raise InvalidRequest(
            f"receiving {datatype.value} data via JSON is not supported. Please use the binary "
            f"data format for input {name}"
        )
    values = _flat(data)
    if len(values) != count:
        raise InternalError(_MISMATCH)
    kinds = set(map(type, values))
    if datatype is DataType.BYTES:
        if kinds - {str}:
            raise InternalError(
                "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
            )
        return joined([text.encode() for text in values])
    if datatype is DataType.BOOL:
        if kinds - {bool}:
            raise _wrong_type("boolean as boolean")
    elif datatype.numpy.kind == "f":
        if kinds - _NUMBER:
            raise _wrong_type("number as double")
    elif kinds - _INTEGER:
        word = "signed-integer" if datatype.numpy.kind == "i" else "unsigned-integer"
        raise _wrong_type(f"{word} as {word}")
    try:
        with np.errstate(over="ignore"):
            return to_array(values, datatype.numpy).tobytes()
    except OverflowError as error:
        raise InvalidRequest(
            f"a value of input '{name}' does not fit {datatype.value}: {error}"
        ) from error


def to_json(
    name: str, tensor: NDArray[Any], datatype: DataType, call: Call | None = None
) -> list[bytes]:
    """Return the elements of an output as JSON, flat and without brackets, in parts.

    Objects exist for `_ELEMENTS_AT_ONCE` at a time, and in between other threads run.

    Args:
        call: counts the parts of a long output; None counts nothing.

    Raises:
        InvalidRequest: the type, or a text, does not travel in JSON.
        Unavailable: there is no room for the next part.
    """
    if datatype in _ONLY_BINARY:
        raise InvalidRequest(
            f"sending {datatype.value} data via JSON is not supported. Please use the binary data "
            "format for output"
        )
    flat = tensor.reshape(-1)
    parts, text = [], bytearray()
    for start in range(0, flat.size, _ELEMENTS_AT_ONCE):
        some = flat[start : start + _ELEMENTS_AT_ONCE]
        elements: list[Any] = some.tolist()
        if datatype is DataType.BYTES:
            try:
                elements = [element.decode() for element in elements]
            except UnicodeDecodeError as error:
                raise InvalidRequest(
                    f"output '{name}' holds bytes that are no UTF-8 text, which JSON cannot carry; "
                    "request it as binary data"
                ) from error
        part = _encode(elements, is_finite=some.dtype.kind != "f" or bool(np.isfinite(some).all()))
        if call is not None and flat.size > _ELEMENTS_AT_ONCE:
            try:
                call.count(len(part))
            except Unavailable as error:
                raise Unavailable(f"{error}; request '{name}' as binary data") from error
        text += b"," * bool(start) + part[1:-1]
        if len(text) >= _PART_BYTES:
            parts.append(bytes(text))
            text.clear()
    return [*parts, bytes(text)]


def _encode(elements: list[Any], *, is_finite: bool) -> bytes:
    """Return JSON, with NaN and Infinity as Triton writes them."""
    if is_finite:
        return msgspec.json.encode(elements)
    import json  # noqa: PLC0415 - msgspec writes null for what is no JSON

    return json.dumps(elements, separators=(",", ":")).encode()


def _flat(data: Any) -> list[Any]:
    values = data if isinstance(data, list) else [data]
    for _ in range(_DEEPEST + 1):
        if not any(isinstance(value, list) for value in values):
            break
        values = list(
            chain.from_iterable(value if isinstance(value, list) else (value,) for value in values)
        )
    return values


def _wrong_type(words: str) -> InternalError:
    return InternalError(f"Unable to parse 'data': attempt to access JSON non-{words}")


LENGTH_HEADER = "inference-header-content-length"
_REGION = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")
_MOST_TENSORS = 1000


@dataclass
class Wanted:
    """Whether the response carries an output as binary data: listed ones, and all others."""

    binary: dict[str, bool] = field(default_factory=dict)
    others_binary: bool = False

    def is_binary(self, name: str) -> bool:
        return self.binary.get(name, self.others_binary)


def json_length(headers: Mapping[str, str], body_bytes: int) -> int:
    """Return the length of the JSON in the body; 0 is a raw binary request.

    Raises:
        InvalidRequest: it is no number, or longer than the body.
    """
    given = headers.get(LENGTH_HEADER)
    if given is None:
        return body_bytes
    if not (given.isascii() and given.isdigit() and len(given) < 12):
        raise InvalidRequest(f"Unable to parse Inference-Header-Content-Length, got: {given}")
    if int(given) > body_bytes:
        raise InvalidRequest(
            f"inference header size should be in range (0, {body_bytes}), got: {given}"
        )
    return int(given)


def raw_request(
    model: str, version: str, config: ModelConfig, body: memoryview
) -> tuple[Any, list[bytes | memoryview]]:
    """Return the message of a body that is the model's one input, and nothing else.

    Raises:
        InvalidRequest: the model has not one input, or a shape that the length does not tell.
    """
    if len(config.inputs) != 1:
        raise InvalidRequest(
            f"{log_prefix('')}Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(config.inputs)} inputs in '{model}' model configuration"
        )
    spec = config.inputs[0]
    shape = list(config.full_shape(spec))
    raw: bytes | memoryview = body
    if spec.datatype is DataType.BYTES:
        shape = [1 if dim == -1 else dim for dim in shape]
        if math.prod(shape) != 1:
            raise InvalidRequest(
                f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]"
            )
        raw = len(body).to_bytes(4, "little") + bytes(body)
    else:
        if config.max_batch_size > 0:
            shape[0] = 1
        if shape.count(-1) > 1:
            raise InvalidRequest(
                "The shape of the raw input '" + spec.name + "' can not be deduced because there "
                "are more than one variable-sized dimension"
            )
        if -1 in shape:
            size = spec.datatype.numpy.itemsize * math.prod(dim for dim in shape if dim != -1)
            shape[shape.index(-1)] = len(body) // size if size else 0
    message = pb.ModelInferRequest(model_name=model, model_version=version)
    message.inputs.add(name=spec.name, datatype=spec.datatype.value, shape=shape)
    return message, [memoryview(raw)]


def json_request(
    model: str, version: str, body: memoryview, length: int, call: Call | None = None
) -> tuple[Any, list[bytes | memoryview], Wanted]:
    """Return the message of a body, its raw contents, and the form of the outputs.

    Errors have Triton's texts and status.

    Args:
        length: of the JSON in `body`; behind it are the binary tensors, in order.
        call: counts what is made of the JSON; None counts nothing.
    """
    request = fields.read_json(body[:length], call)
    binary = body[length:]
    message = pb.ModelInferRequest(model_name=model, model_version=version)
    message.id = fields.field(request, "id", str, default="")
    wanted = Wanted()
    if "parameters" in request:
        parameters = fields.field(request, "parameters", dict)
        _read_parameters(message.parameters, parameters, wanted)
    raw: list[bytes | memoryview] = []
    for given in _tensors(request, "inputs"):
        data, binary = _read_input(message, given, model, binary)
        if data is not None:
            raw.append(data)
    if len(binary):
        raise InvalidRequest(f"unexpected additional input data for model '{model}'")
    for given in _tensors(request, "outputs") if "outputs" in request else ():
        _read_output(message, given, wanted)
    return message, raw, wanted


def _tensors(request: dict[str, Any], name: str) -> list[dict[str, Any]]:
    listed = fields.field(request, name, list)
    if len(listed) > _MOST_TENSORS:
        raise InvalidRequest(f"a request with more than {_MOST_TENSORS} {name} is not read")
    return [fields.field({name: each}, name, dict) for each in listed]


def _read_input(
    message: Any, given: dict[str, Any], model: str, binary: memoryview
) -> tuple[bytes | memoryview | None, memoryview]:
    """Add an input; return its raw contents, None where they are in shared memory, and what is left
    of the binary data."""
    parameters = fields.field(given, "parameters", dict, default={})
    _check_only_one(given, parameters)
    name = fields.field(given, "name", str)
    type_name = fields.field(given, "datatype", str)
    dims = fields.field(given, "shape", list)
    if len(dims) > MOST_DIMENSIONS:  # the product of many large ones takes minutes
        raise InvalidRequest(
            f"input '{name}' has a shape of {len(dims)} dimensions, at most {MOST_DIMENSIONS} are "
            "read"
        )
    shape = [fields.field({"shape": dim}, "shape", int) for dim in dims]
    count, datatype = math.prod(shape), DATATYPES.get(type_name)
    if max(count, *shape, 0) > _MOST_COUNTED:
        raise InvalidRequest(
            f"shape {shape_text(tuple(shape))} of input '{name}' causes total element count to "
            f"exceed maximum size of {_MOST_COUNTED}"
        )
    if datatype is not None and count * datatype.numpy.itemsize > _MOST_COUNTED:
        raise InvalidRequest(
            f"byte size overflow for input '{name}': {count} elements of {type_name} exceed "
            f"{_MOST_COUNTED} bytes"
        )
    tensor = message.inputs.add(name=name, datatype=type_name, shape=shape)
    if "binary_data_size" in parameters:
        size = fields.field(parameters, "binary_data_size", int)
        if size > len(binary):
            raise InvalidRequest(
                f"unexpected size for input '{name}', expecting {size - len(binary)} additional "
                f"bytes for model '{model}'"
            )
        return binary[:size], binary[size:]
    if "shared_memory_region" in parameters:
        _read_region(tensor, parameters)
        return None, binary
    if datatype is None:
        raise InvalidRequest(f"invalid datatype for input {name}")
    data = fields.field(given, "data", list)
    return (to_raw_contents(name, datatype, count, data) if count else b""), binary


def _check_only_one(given: dict[str, Any], parameters: dict[str, Any]) -> None:
    found = [
        name
        for name, table in (
            ("data", given),
            ("binary_data_size", parameters),
            ("shared_memory_region", parameters),
        )
        if name in table
    ]
    if len(found) == 1:
        return
    but = " set" + "".join(f" '{name}'" for name in found) if found else " no field is set"
    raise InvalidRequest(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in "
        f"'parameters', 'shared_memory_region' in 'parameters'. But{but}"
    )


def _read_output(message: Any, given: dict[str, Any], wanted: Wanted) -> None:
    parameters = fields.field(given, "parameters", dict, default={})
    name = fields.field(given, "name", str)
    binary = fields.field(parameters, "binary_data", bool, default=False)
    if name in wanted.binary:
        raise InvalidRequest(f"Duplicate output name '{name}' is not allowed in a request")
    output = message.outputs.add(name=name)
    classes = fields.field(parameters, "classification", int, default=0)
    if "shared_memory_region" in parameters:
        for other, set_too in (
            ("classification", "classification" in parameters),
            ("binary_data", binary),
        ):
            if set_too:
                raise InvalidRequest(f"Output can't set both 'shared_memory_region' and '{other}'")
        _read_region(output, parameters)
    elif classes:
        output.parameters["classification"].int64_param = min(classes, 2**62)
    wanted.binary[name] = binary


def _read_region(tensor: Any, parameters: dict[str, Any]) -> None:
    name, offset, size = _REGION
    tensor.parameters[name].string_param = fields.field(parameters, name, str)
    for key in (offset, size):
        number = fields.field(parameters, key, int, default=0)
        if number or key == size:
            # The message has them signed, and they are read as unsigned.
            tensor.parameters[key].int64_param = number - 2**64 if number >= 2**63 else number


def _read_parameters(message: Any, parameters: dict[str, Any], wanted: Wanted) -> None:
    for key, value in parameters.items():
        if key == "binary_data_output":
            wanted.others_binary = fields.field(parameters, key, bool)
        elif key == "sequence_id" and isinstance(value, str):
            message[key].string_param = value
        elif key == "sequence_id":
            number = fields.field(parameters, key, int)
            message[key].int64_param = number - 2**64 if number >= 2**63 else number
        elif key in ("sequence_start", "sequence_end"):
            message[key].bool_param = fields.field(parameters, key, bool)
        elif key in ("priority", "timeout"):
            message[key].int64_param = min(fields.field(parameters, key, int), 2**63 - 1)
        elif key.startswith("triton_"):
            raise InvalidRequest(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should "
                "not be specified."
            )
        else:
            set_parameter(message, key, value)


def set_parameter(message: Any, key: str, value: Any) -> None:
    """Set a parameter of the caller's own.

    Raises:
        InvalidRequest: a value of another type, or a number out of range.
    """
    if not isinstance(value, (bool, int, float, str)):
        raise InvalidRequest(
            f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'."
        )
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise InvalidRequest(f"parameter '{key}' is out of range: {value}")
    write_parameter(message[key], value)
