"""Recognises messages that differ from earlier ones only in their tensors' bytes and their id.

A client sends the same tensors to the same model again and again, so that nearly all of a request
is known byte by byte: names, types, shapes, parameters. Such a request is recognised by comparing
bytes; only its raw contents are parsed. The heads of responses are kept likewise. Other requests
take the ordinary path (`wire`, `convert`), which gives the same result.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.grpc.wire import RAW_OUTPUT_CONTENTS_TAG, raw_contents_places, varint
from edge_server.requests import InferRequest
from edge_server.tensors import DataType, Tensor

if TYPE_CHECKING:
    from edge_server.requests import Cancellation, InferResponse

# An appliance has few clients; a client that sends ever new heads must not fill its memory.
_MOST_HEADS = 256
_LONGEST_HEAD_BYTES = 4096

_MODEL_NAME, _MODEL_VERSION, _ID = 0x0A, 0x12, 0x1A
_ID_TAG = bytes([_ID])


@dataclass(frozen=True)
class _Input:
    """One tensor of a known request; offsets refer to a message without id.

    Attributes:
        before: the tag and length that precede the tensor's bytes.
    """

    name: str
    before: bytes
    before_at: int
    at: int
    dtype: np.dtype[Any]
    count: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Known:
    """The constant part of a known request.

    Attributes:
        request: the request without tensors, id, deadline and cancellation.
    """

    request: InferRequest
    inputs: tuple[_Input, ...]


class KnownRequests:
    """Earlier requests, keyed by the bytes that precede the tensors' bytes.

    Safe to use from any thread: entries are only ever added, or all removed at once.
    """

    def __init__(self) -> None:
        self._head_bytes: dict[int, int] = {}
        self._known: dict[bytes, _Known] = {}

    def recall(
        self, data: bytes, timeout_s: float | None, cancellation: Cancellation | None
    ) -> InferRequest | None:
        """Return the request in `data` with tensors as views on it; None if it is not recognised.

        Args:
            timeout_s: seconds until the caller's deadline; None is never.
        """
        id_at, id_end = _id_field(data)
        size = len(data) - (id_end - id_at)
        head_bytes = self._head_bytes.get(size)
        if head_bytes is None:
            return None
        shift = id_end - id_at
        known = self._known.get(data[:id_at] + data[id_end : shift + head_bytes])
        if known is None:
            return None
        inputs = {}
        for tensor in known.inputs:
            if not data.startswith(tensor.before, shift + tensor.before_at):
                return None
            array = np.frombuffer(data, tensor.dtype, tensor.count, shift + tensor.at)
            inputs[tensor.name] = Tensor(array.reshape(tensor.shape))
        like = known.request
        try:
            request_id = data[id_at + 2 : id_end].decode() if shift else ""
        except UnicodeDecodeError:
            return None
        return InferRequest(
            like.model_name,
            inputs,
            like.model_version,
            like.outputs,
            request_id,
            None if timeout_s is None else time.monotonic() + timeout_s,
            False,
            like.priority,
            like.timeout_us,
            like.sequence,
            like.parameters,
            cancellation,
        )

    def remember(self, data: bytes, message: Any, request: InferRequest) -> None:
        """Keep the parsed form of `data`, if requests of its kind can be recognised.

        Args:
            message: `data` as a `ModelInferRequest`, with or without its raw contents.
            request: the request that `convert` made of it.
        """
        id_at, id_end = _id_field(data)
        places = raw_contents_places(data)
        if not places or not _is_plain(message, len(places)) or request.sequence is not None:
            return  # the heads of sequences are of no use after their end
        shift = id_end - id_at
        head_end = places[0][0]
        head = data[:id_at] + data[id_end:head_end]
        if id_end > head_end or len(head) > _LONGEST_HEAD_BYTES:
            return
        if message.id.encode() != data[id_at + 2 : id_end]:
            return  # the id that counts is elsewhere in the message
        if len(self._known) >= _MOST_HEADS:
            self._known, self._head_bytes = {}, {}
        # Without tensors and call: gRPC counts a call as open while a reference to it exists.
        like = structs.replace(request, inputs={}, id="", deadline=None, cancellation=None)
        self._known[head] = _Known(
            like,
            tuple(
                _Input(
                    name,
                    data[before_at:at],
                    before_at - shift,
                    at - shift,
                    tensor.array.dtype,
                    tensor.array.size,
                    tensor.shape,
                )
                for (name, tensor), (before_at, at) in zip(
                    request.inputs.items(), places, strict=True
                )
            ),
        )
        self._head_bytes[len(data) - shift] = len(head)


def _id_field(data: bytes) -> tuple[int, int]:
    """Return start and end of the id field, tag included, in a message whose fields are in order;
    an empty range without one.

    Names, versions and ids are taken to be shorter than 128 bytes; a longer one is not found.
    """
    at = 0
    try:
        if data[0] == _MODEL_NAME and data[1] < 0x80:
            at = 2 + data[1]
            if data[at] == _MODEL_VERSION and data[at + 1] < 0x80:
                at += 2 + data[at + 1]
            if data[at] == _ID and data[at + 1] < 0x80:
                return at, at + 2 + data[at + 1]
    except IndexError:
        pass
    return at, at


def _is_plain(message: Any, raw_count: int) -> bool:
    """Return whether every input has its data in the raw contents and no other option is set."""
    return (
        len(message.inputs) == raw_count
        and not any(
            tensor.HasField("contents")
            or tensor.parameters
            or tensor.datatype == DataType.BYTES.value
            for tensor in message.inputs
        )
        and not any(output.parameters for output in message.outputs)
    )


@dataclass(frozen=True)
class _Head:
    """A response without its id and its tensors' bytes.

    Attributes:
        before_raw: the tag and length that precede each tensor's bytes.
    """

    before_id: bytes
    after_id: bytes
    before_raw: tuple[bytes, ...]


class KnownResponses:
    """The heads of earlier responses, by model and by the tensors' names, types and shapes.

    Safe to use from any thread, like `KnownRequests`.
    """

    def __init__(self) -> None:
        self._heads: dict[tuple[Any, ...], _Head] = {}

    def write(self, response: InferResponse) -> bytes | None:
        """Return `response` as a `ModelInferResponse` in one copy; None if it is not plain."""
        key: list[Any] = [response.model_name, response.model_version]
        arrays = []
        for name, tensor in response.outputs.items():
            array = tensor.array
            arrays.append(array)
            key += (name, array.dtype, array.shape)
        head = self._heads.get(tuple(key)) or self._remember(tuple(key), response)
        if head is None or response.parameters:
            return None
        parts: list[Any] = [head.before_id]
        if response.id:
            encoded = response.id.encode()
            parts += (_ID_TAG, varint(len(encoded)), encoded)
        parts.append(head.after_id)
        for before, array in zip(head.before_raw, arrays, strict=True):
            parts += (before, array if array.flags.c_contiguous else array.tobytes())
        return b"".join(parts)

    def _remember(self, key: tuple[Any, ...], response: InferResponse) -> _Head | None:
        message = pb.ModelInferResponse(
            model_name=response.model_name, model_version=response.model_version
        )
        before_raw = []
        for name, tensor in response.outputs.items():
            if tensor.datatype is DataType.BYTES:
                return None
            message.outputs.add(name=name, datatype=tensor.datatype.value, shape=tensor.shape)
            before_raw.append(RAW_OUTPUT_CONTENTS_TAG + varint(tensor.array.nbytes))
        head = message.SerializeToString()
        names = pb.ModelInferResponse(
            model_name=response.model_name, model_version=response.model_version
        ).SerializeToString()
        if not head.startswith(names):
            return None
        if len(self._heads) >= _MOST_HEADS:
            self._heads = {}
        known = _Head(names, head[len(names) :], tuple(before_raw))
        self._heads[key] = known
        return known
