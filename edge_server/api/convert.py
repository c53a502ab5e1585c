"""Protocol messages ↔ requests, and the classification of outputs. Raw contents become views on
the received bytes: no copy."""

from __future__ import annotations

import time
from dataclasses import dataclass
from threading import TIMEOUT_MAX
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.admission import COUNTED_FROM_BYTES
from edge_server.api.contents import DATATYPE_NAMES, Declared, from_contents, from_raw, to_raw
from edge_server.api.parameters import (
    RequestParameters,
    read_parameters,
    region_of,
    typed_value,
    write_parameter,
)
from edge_server.api.shared_memory import DISABLED, RegionSlice
from edge_server.errors import InvalidRequest, Unsupported
from edge_server.inference.request_check import (
    check_batch_sizes,
    check_names,
    check_tensor,
)
from edge_server.requests import InferRequest, InferResponse, log_prefix
from edge_server.tensors import DataType, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from edge_server.api.admission import Call
    from edge_server.api.shared_memory import SharedMemory
    from edge_server.model_config.config import ModelConfig

_NO_PARAMETERS = RequestParameters()
_MOST_STRINGS = 2**20
# Each string is a Python object beside its bytes, and has two places in lists.
_STRING_BYTES = 64
_STRINGS_COUNTED_FROM = COUNTED_FROM_BYTES // _STRING_BYTES
_NO_CLASSES = frozenset({DataType.BOOL, DataType.FP16, DataType.BF16, DataType.BYTES})
# Each class is a separate text; a dense output requested in full would be millions of texts.
_MOST_CLASSES = 65536


@dataclass(frozen=True)
class TopClasses:
    """The requested classification of one output: at most `count` classes, `batched` where its
    first dimension counts batch elements; a class without a label is returned without one.
    """

    count: int
    batched: bool
    labels: Sequence[str] = ()

    def of(self, scores: Tensor) -> Tensor:
        """Return `<score as %f>:<index>[:<label>]`, highest first, equal scores in index order.

        Args:
            scores: of any shape; the dimensions after the batch are flattened to one class list.

        Returns: BYTES of shape [batch, k], or [k] where the model does not batch.

        Raises: InvalidRequest: the type has no scores, or the request wants too many classes.
        """
        if scores.datatype in _NO_CLASSES:
            raise InvalidRequest(
                "class result not available for output due to unsupported type "
                f"'{scores.datatype.value}'"
            )
        array = scores.array
        batch = array.shape[0] if self.batched else 1
        rows = array.reshape(batch, array.size // batch if batch else 0)
        count = min(self.count, rows.shape[1])
        if batch * count > _MOST_CLASSES:
            raise InvalidRequest("classification output tensor too large")
        texts = np.empty((batch, count), dtype=np.object_)
        for row, row_texts in zip(rows, texts, strict=True):
            row_texts[:] = [self._text(row, place) for place in _best_first(row)[:count]]
        return Tensor(texts if self.batched else texts[0])

    def _text(self, row: NDArray[Any], place: int) -> bytes:
        label = self.labels[place] if place < len(self.labels) else ""
        return f"{row[place]:f}:{place}{':' if label else ''}{label}".encode()


def _best_first(row: NDArray[Any]) -> NDArray[np.intp]:
    """Return indices from the highest value to the lowest; equal values in order."""
    return row.size - 1 - np.argsort(row[::-1], kind="stable")[::-1]


# The form of an output that a request wants classified or in shared memory.
OutputForm = TopClasses | RegionSlice
AS_IT_IS: Mapping[str, OutputForm] = MappingProxyType({})


def to_infer_request(
    message: Any,
    raw: Sequence[bytes | memoryview],
    config: ModelConfig,
    timeout_s: float | None = None,
    call: Call | None = None,
    *,
    shared_memory: SharedMemory | None = None,
) -> tuple[InferRequest, Mapping[str, OutputForm]]:
    """Return the request of a `ModelInferRequest`, and the outputs that it wants in another form.

    Args:
        message: the `ModelInferRequest` without its raw contents, which may be large.
        raw: the raw contents; the tensors are views on them.
        config: of the model, which the request is checked against before its tensors are converted.
        timeout_s: seconds until the caller's deadline; None, and more than `TIMEOUT_MAX` (gRPC
            reports some hundred billion years), is never.
        call: cancels the request, and counts its strings; None does neither.
        shared_memory: the regions that tensors may refer to; None refuses them.

    Raises:
        InvalidRequest, NotFound: tensors or parameters contradict each other, or the form of an
            output is invalid (Triton's texts).
        Unavailable: the budget has no room for the strings, or the tensors in shared memory.
        Unsupported: the request uses shared memory, which is off.
    """
    parameters = read_parameters(message.parameters) if message.parameters else _NO_PARAMETERS
    model, request_id = message.model_name, message.id
    # A slice is a list; iteration over protobuf's own sequence costs twice as much.
    given, wanted = message.inputs[:], message.outputs[:]
    tensors = {tensor.name: tensor for tensor in given}
    outputs = {output.name: output for output in wanted}
    if len(tensors) < len(given) or len(outputs) < len(wanted):
        raise _twice(request_id, input=given, output=wanted)
    check_names(config, request_id, tensors.keys(), outputs)
    raw_contents = iter(raw)
    inputs: dict[str, Tensor] = {}
    batch_sizes: dict[str, int] = {}
    strings = 0
    for name, tensor in tensors.items():
        declared = Declared.of(tensor, name, model, request_id)
        batch_sizes[name] = check_tensor(
            config, request_id, name, declared.datatype, declared.shape
        )
        if declared.datatype is DataType.BYTES:
            strings += declared.count
            _count_strings(declared, strings, call)
        place = _place(tensor, shared_memory) if tensor.parameters else None
        if place is not None:
            array = _from_region(declared, tensor, place)
        elif tensor.HasField("contents"):
            if raw:
                raise InvalidRequest(
                    "contents field must not be specified when using raw_input_contents for "
                    f"'{name}' for model '{model}'"
                )
            array = from_contents(declared, tensor.contents)
        else:
            # Raw contents go to the inputs in order of need.
            data = next(raw_contents, None)
            if data is None:
                raise InvalidRequest(
                    f"unable to find data for input tensor '{name}' for model '{model}' in request."
                )
            array = from_raw(declared, data)
        inputs[name] = Tensor(array)
    if config.max_batch_size:
        check_batch_sizes(config, request_id, batch_sizes)
    deadline = None
    if timeout_s is not None and timeout_s <= TIMEOUT_MAX:
        deadline = time.monotonic() + timeout_s
    request = InferRequest(
        model_name=model,
        model_version=message.model_version,
        inputs=inputs,
        outputs=tuple(outputs),
        id=request_id,
        deadline=deadline,
        priority=parameters.priority,
        timeout_us=parameters.timeout_us,
        sequence=parameters.sequence,
        parameters=parameters.custom,
        cancellation=call,
    )
    return request, output_forms(outputs, config, shared_memory) if outputs else AS_IT_IS


def output_forms(
    outputs: Mapping[str, Any],
    config: ModelConfig,
    shared_memory: SharedMemory | None = None,
) -> Mapping[str, OutputForm]:
    """Return those of a request's `outputs` that it wants in another form; raise as
    `to_infer_request`.
    """
    forms: dict[str, OutputForm] = {}
    for name, output in outputs.items():
        if not output.parameters:
            continue
        place = _place(output, shared_memory)
        count = _class_count(output.parameters)
        if place is not None:
            if count is not None:
                raise InvalidRequest(
                    "output can't set both 'shared_memory_region' and 'classification'"
                )
            forms[name] = place
        elif count is not None:
            labels = config.labels.get(name, ())
            forms[name] = TopClasses(count, config.max_batch_size > 0, labels)
    return forms or AS_IT_IS


def to_response_message(
    response: InferResponse, forms: Mapping[str, OutputForm] = AS_IT_IS
) -> tuple[Any, list[bytes | memoryview]]:
    """Return the `ModelInferResponse` for `response` without its raw contents, and the contents;
    outputs requested in shared memory have been written there.

    Raises: InvalidRequest, InternalError: an output has no classes, or does not fit its region.
    """
    message = pb.ModelInferResponse()
    message.model_name, message.model_version = response.model_name, response.model_version
    message.id = response.id
    if response.parameters:
        for key, parameter in response.parameters.items():
            write_parameter(message.parameters[key], parameter)
    raw: list[bytes | memoryview] = []
    outputs = message.outputs
    for name, tensor in response.outputs.items():
        form = forms.get(name)
        value = form.of(tensor) if isinstance(form, TopClasses) else tensor
        array = value.array
        datatype = DATATYPE_NAMES.get(array.dtype) or value.datatype.value
        output = outputs.add()
        output.name, output.datatype = name, datatype
        output.shape.extend(array.shape)
        data = to_raw(array)
        if isinstance(form, RegionSlice):
            form.write(name, memoryview(data))
            _name_region(output.parameters, form, len(data))
            data = b""
        raw.append(data)
    return message, raw


def _name_region(parameters: Any, place: RegionSlice, written_bytes: int) -> None:
    parameters["shared_memory_region"].string_param = place.region.name
    parameters["shared_memory_byte_size"].int64_param = written_bytes
    if place.offset:
        parameters["shared_memory_offset"].int64_param = place.offset


def _count_strings(declared: Declared, strings: int, call: Call | None) -> None:
    """Raises: InvalidRequest: the request has too many strings with this input's; Unavailable: see
    `Call.count`."""
    if strings > _MOST_STRINGS:
        raise InvalidRequest(
            f"{declared.prefix}with input '{declared.name}' for model '{declared.model}' the "
            f"request has {strings} strings, at most {_MOST_STRINGS} are read; send large data as "
            "UINT8"
        )
    if call is not None and declared.count >= _STRINGS_COUNTED_FROM:
        call.count(_STRING_BYTES * declared.count)


def _twice(request_id: str, **tensors: Sequence[Any]) -> InvalidRequest:
    """Return the error for `tensors`, by kind, of which two of one kind have the same name."""
    kind, name = next(
        (kind, each.name)
        for kind, listed in tensors.items()
        for place, each in enumerate(listed)
        if any(each.name == before.name for before in listed[:place])
    )
    return InvalidRequest(f"{log_prefix(request_id)}{kind} '{name}' already exists in request")


def _from_region(declared: Declared, tensor: Any, place: RegionSlice) -> NDArray[Any]:
    if tensor.HasField("contents"):
        raise InvalidRequest(
            "unexpected 'content' provided when using shared memory for input tensor "
            f"'{declared.name}' for model '{declared.model}'"
        )
    # Check before copying: a wrong byte size may be any number.
    if declared.datatype is not DataType.BYTES and place.byte_size != declared.size_bytes:
        raise declared.size_mismatch(place.byte_size)
    return from_raw(declared, place.read())


def _place(tensor: Any, shared_memory: SharedMemory | None) -> RegionSlice | None:
    if shared_memory is None:
        if "shared_memory_region" in tensor.parameters:
            raise Unsupported(DISABLED)
        return None
    named = region_of(tensor.name, tensor.parameters)
    return None if named is None else shared_memory.find(*named)


def _class_count(parameters: Any) -> int | None:
    if "classification" not in parameters:
        return None
    count: int = typed_value(
        parameters["classification"], "'classification' parameter", "int64_param", end=""
    )
    if count <= 0:
        raise InvalidRequest("invalid value for 'classification' parameter, expected >= 0")
    return count
