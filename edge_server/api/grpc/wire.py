"""ModelInfer messages on the wire, without protobuf's copies of the tensors.

Parsing a request with protobuf copies every `raw_input_contents` entry, and building a response
copies every output twice. Here the top-level fields of a request are walked once: raw contents
become views on the received bytes, protobuf parses the small rest. A response is protobuf's
serialisation of everything but the raw contents, which are appended from the arrays' own memory.

Source: protobuf encoding, https://protobuf.dev/programming-guides/encoding/ .
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from edge_server.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from edge_server.api.admission import Call

# Below this size protobuf's own parser, in C, is faster than a walk in Python.
_WALK_FROM_BYTES = 16 * 1024
# Of a request that cannot be walked, nobody counts the fields.
_UNWALKED_UP_TO_BYTES = 16 * 1024
# Limit for bytes parsed by protobuf, which lets no other thread run meanwhile.
_PROTOBUF_UP_TO_BYTES = 4 * 1024 * 1024
# Its objects take as many times the memory of the bytes they are parsed from, at most: a number may
# have one byte on the wire, and an empty text two. Fixed numbers and long texts stay as they are.
_TIMES_PARSED = 16
_TIMES_KEPT = 2
# Fields 6, 7 and 8 of InferTensorContents: fp32_contents, fp64_contents, bytes_contents.
_KEPT = frozenset({(6 << 3) | 2, (7 << 3) | 2, (8 << 3) | 2})
# `inputs` of a request, and `contents` of an input.
_FIFTH = (5 << 3) | 2
_CONTENTS_LEVEL = 2
# Of more fields, the memory is that of the most expensive ones.
_MOST_FIELDS_ESTIMATED = 100

_VARINT, _LENGTH_DELIMITED = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
_parse: Callable[[bytes], Any] = pb.ModelInferRequest.FromString
_RAW_INPUT_CONTENTS = (7 << 3) | _LENGTH_DELIMITED
_RAW_OUTPUT_CONTENTS = bytes([(6 << 3) | _LENGTH_DELIMITED])
_INFER_RESPONSE = bytes([(2 << 3) | _LENGTH_DELIMITED])
_LONGEST_VARINT = 10
_LONGEST_BYTE = 0x7F

# Every top-level field costs a step in Python here and an object in protobuf, so that a few
# megabytes of empty fields would fill a board's memory; a request has some per input.
_MOST_FIELDS = 1000
_TOO_MANY_FIELDS = f"a ModelInferRequest of more than {_MOST_FIELDS} fields is not read"
# A load's parameters are entries of two fields, key and value, and a value is one field.
_LOAD_PARAMETERS = (3 << 3) | _LENGTH_DELIMITED
_PARAMETER_VALUE = (2 << 3) | _LENGTH_DELIMITED
_MOST_FIELDS_OF_PARAMETER = 4
_TOO_MANY_IN_LOAD = (
    f"a RepositoryModelLoadRequest of more than {_MOST_FIELDS} fields, or with a parameter of more "
    f"than {_MOST_FIELDS_OF_PARAMETER}, is not read; bring a model of many files into the "
    "repository instead"
)


def read_request(data: bytes, call: Call | None = None) -> tuple[Any, Sequence[bytes | memoryview]]:
    """Return a `ModelInferRequest`, and its raw contents: of a large request, views on `data`.

    Raises:
        InvalidRequest: `data` is no such message, has more fields than any request needs, or too
            many bytes that are not raw contents.
        Unavailable: there is no room for what protobuf makes of it, which `call` counts.
    """
    walked = _walk(memoryview(data)) if len(data) >= _WALK_FROM_BYTES else None
    if walked is None and len(data) > _UNWALKED_UP_TO_BYTES:
        raise InvalidRequest("the request is no ModelInferRequest that this server can read")
    try:
        if walked is not None:
            rest, raw = walked
            if len(rest) > _PROTOBUF_UP_TO_BYTES:
                raise InvalidRequest(
                    f"the request has {len(rest)} bytes beside its raw_input_contents, at most "
                    f"{_PROTOBUF_UP_TO_BYTES} are read; send large tensors in raw_input_contents "
                    "instead of typed contents"
                )
            if call is not None and len(rest) >= _WALK_FROM_BYTES:
                call.count(_made_of(memoryview(rest)))
            return _parse(rest), raw
        message = _parse(data)
    except DecodeError as error:
        raise InvalidRequest(f"the request is no ModelInferRequest: {error}") from error
    contents = message.raw_input_contents[:]
    if len(contents) > _MOST_FIELDS:
        raise InvalidRequest(_TOO_MANY_FIELDS)
    return message, contents


def read_load_request(data: bytes) -> Any:
    """Return a `RepositoryModelLoadRequest`, which may carry files of any size, but not any
    number.
    """
    if len(data) >= _WALK_FROM_BYTES:
        _check_load(memoryview(data))
    try:
        return pb.RepositoryModelLoadRequest.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"the request is no RepositoryModelLoadRequest: {error}") from error


def _check_load(data: memoryview) -> None:
    parts = [(data, _MOST_FIELDS, _LOAD_PARAMETERS)]
    for part, most, inner in parts:  # grows while it is walked
        for tag, _, place, after in _fields(part, most, _TOO_MANY_IN_LOAD):
            if tag is None:
                raise InvalidRequest(
                    "the request is no RepositoryModelLoadRequest that this server can read"
                )
            if tag == _LOAD_PARAMETERS == inner:
                parts.append((part[place:after], _MOST_FIELDS_OF_PARAMETER, _PARAMETER_VALUE))
            elif tag == _PARAMETER_VALUE == inner:
                parts.append((part[place:after], _MOST_FIELDS_OF_PARAMETER, 0))


def _made_of(part: memoryview, level: int = 0) -> int:
    """Return the most memory that protobuf takes for `part`: at `level` 0 of a request's fields, at
    1 of an input's, at 2 of those of an input's contents.
    """
    most_bytes = _TIMES_PARSED * len(part)
    made_bytes = 0
    try:
        for tag, start, place, after in _fields(part, _MOST_FIELDS_ESTIMATED):
            if tag is None:
                return most_bytes
            if tag == _FIFTH and level < _CONTENTS_LEVEL and after - place >= _WALK_FROM_BYTES:
                made_bytes += _made_of(part[place:after], level + 1)
            elif tag in _KEPT and level == _CONTENTS_LEVEL:
                made_bytes += _TIMES_KEPT * (after - start)
            else:
                made_bytes += _TIMES_PARSED * (after - start)
    except InvalidRequest:
        return most_bytes
    return made_bytes


def write_response(message: Any, raw: Iterable[bytes | memoryview]) -> bytes:
    """Return the `ModelInferResponse` `message` with `raw` as its raw contents; one copy."""
    parts: list[bytes | memoryview] = [message.SerializeToString()]
    for entry in raw:
        parts += (_RAW_OUTPUT_CONTENTS, _varint(len(entry)), entry)
    return b"".join(parts)


def write_stream_response(response: bytes) -> bytes:
    """Return a `ModelStreamInferResponse` around a serialised `ModelInferResponse`; one copy."""
    return b"".join((_INFER_RESPONSE, _varint(len(response)), response))


def _walk(data: memoryview) -> tuple[bytes, list[memoryview]] | None:
    """Return all top-level fields but the raw contents, and the raw contents; None where a field is
    damaged or merely unusual: protobuf decides.
    """
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    for tag, start, place, after in _fields(data):
        if tag is None:
            return None
        if tag == _RAW_INPUT_CONTENTS:
            raw.append(data[place:after])
        else:
            rest.append(data[start:after])
    return b"".join(rest), raw


def _fields(
    data: memoryview, most: int = _MOST_FIELDS, too_many: str = _TOO_MANY_FIELDS
) -> list[tuple[int | None, int, int, int]]:
    """Return for each top-level field its tag, its start, and start and end of its value.

    The tag is None, and the list ends, at a field that cannot be parsed. Raises InvalidRequest
    where there are more than `most`.
    """
    fields: list[tuple[int | None, int, int, int]] = []
    end = len(data)
    start = 0
    for _ in range(most + 1):
        if start == end:
            return fields
        try:
            # Nearly all tags, and the lengths of short fields, have one byte.
            tag, place = data[start], start + 1
            if tag > _LONGEST_BYTE:
                tag, place = _read_varint(data, start)
            kind = tag & 7
            if kind == _LENGTH_DELIMITED:
                length, after = data[place], place + 1
                if length > _LONGEST_BYTE:
                    length, after = _read_varint(data, place)
                place, after = after, after + length
            elif kind == _VARINT:
                _, after = _read_varint(data, place)
            else:
                after = place + _FIXED_BYTES[kind]
        except (IndexError, KeyError):
            after = end + 1
        if after > end:
            fields.append((None, start, start, end))
            return fields
        fields.append((tag, start, place, after))
        start = after
    raise InvalidRequest(too_many)


def _read_varint(data: memoryview, place: int) -> tuple[int, int]:
    """Return the varint at `place`, and the offset after it; raise IndexError where it is
    incomplete.
    """
    value = 0
    for index in range(_LONGEST_VARINT):
        byte = data[place + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, place + index + 1
    raise IndexError(place)


@lru_cache(_MOST_FIELDS)  # a model's outputs mostly have the sizes that they had before
def _varint(value: int) -> bytes:
    encoded = []
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
