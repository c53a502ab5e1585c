"""The data of one tensor: raw bytes or typed contents → numpy, numpy → raw bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from edge_server.errors import InvalidRequest
from edge_server.requests import log_prefix
from edge_server.tensors import DataType, shape_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# The fields of InferTensorContents, each with the types that use it, first the one whose name
# Triton's texts give the field. FP16 and BF16 are only sent raw.
_CONTENTS_FIELDS = {
    "bool_contents": (DataType.BOOL,),
    "int_contents": (DataType.INT32, DataType.INT16, DataType.INT8),
    "int64_contents": (DataType.INT64,),
    "uint_contents": (DataType.UINT32, DataType.UINT16, DataType.UINT8),
    "uint64_contents": (DataType.UINT64,),
    "fp32_contents": (DataType.FP32,),
    "fp64_contents": (DataType.FP64,),
    "bytes_contents": (DataType.BYTES,),
}
DATATYPES = {datatype.value: datatype for datatype in DataType}
DATATYPE_NAMES = {datatype.numpy: datatype.value for datatype in DataType}
_FIELD_OF_TYPE = {
    datatype: field for field, datatypes in _CONTENTS_FIELDS.items() for datatype in datatypes
}
# numpy's limit on 1.x; such a tensor has more elements than any board has memory for.
MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 2**48
# A copy of fewer bytes takes less time than a view.
_COPIED_BELOW_BYTES = 16 * 1024
# Number of values converted in one step, during which no other thread runs.
_VALUES_AT_ONCE = 2**14


class Declared(msgspec.Struct, frozen=True):
    name: str
    datatype: DataType
    shape: tuple[int, ...]
    count: int
    model: str
    request_id: str

    @staticmethod
    def of(tensor: Any, name: str, model: str, request_id: str) -> Declared:
        """Raises: InvalidRequest: an unknown type, or an invalid shape."""
        datatype = DATATYPES.get(tensor.datatype)
        if datatype is None:
            raise InvalidRequest(
                f"{log_prefix(request_id)}invalid datatype '{tensor.datatype[:32]}' for input "
                f"'{name}' for model '{model}'; known: {', '.join(DATATYPES)}"
            )
        # Avoid a tuple of millions: one dimension too many proves the error.
        shape = tuple(tensor.shape[: MOST_DIMENSIONS + 1])
        least = min(shape) if shape else 1
        if least < 0:
            raise InvalidRequest(
                f"{log_prefix(request_id)}All input dimensions should be specified for input "
                f"'{name}' for model '{model}', got {shape_text(shape)}"
            )
        count = math.prod(shape)
        # An empty tensor, too, has a shape that numpy can count.
        elements = count if least else math.prod(dim or 1 for dim in shape)
        if len(shape) > MOST_DIMENSIONS or elements > _MOST_ELEMENTS:
            raise InvalidRequest(
                f"{log_prefix(request_id)}input '{name}' for model '{model}' has a shape that no "
                f"memory holds: {shape_text(shape[:MOST_DIMENSIONS])}"
            )
        return Declared(name, datatype, shape, count, model, request_id)

    @property
    def prefix(self) -> str:
        return log_prefix(self.request_id)

    @property
    def size_bytes(self) -> int:
        """Size of the raw contents in bytes; BYTES have any size."""
        return self.count * self.datatype.numpy.itemsize

    def size_mismatch(self, got_bytes: int) -> InvalidRequest:
        return InvalidRequest(
            f"{self.prefix}input byte size mismatch for input '{self.name}' for model "
            f"'{self.model}'. Expected {self.size_bytes}, "
            f"got {got_bytes}"
        )


def from_raw(declared: Declared, raw: bytes | memoryview) -> NDArray[Any]:
    """Return the values in `raw` in their shape: a view on it, except for BYTES. Raises
    InvalidRequest where their number differs from the declared one.
    """
    if declared.datatype is DataType.BYTES:
        return _decode_bytes(declared, raw)
    dtype = declared.datatype.numpy
    if len(raw) != declared.count * dtype.itemsize:
        raise declared.size_mismatch(len(raw))
    array: NDArray[Any] = np.ndarray(declared.shape, dtype, raw)
    return array


def from_contents(declared: Declared, contents: Any) -> NDArray[Any]:
    """Return the values in an `InferTensorContents` in their shape.

    Raises: InvalidRequest: they are in another type's field, too many or few, or out of range.
    """
    name, datatype, model = declared.name, declared.datatype, declared.model
    field = _FIELD_OF_TYPE.get(datatype, "raw_input_contents")
    filled = [descriptor.name for descriptor, _ in contents.ListFields()]
    if len(filled) > 1 and field in filled:
        raise InvalidRequest(
            f"unexpected explicit tensor data for input tensor '{name}' for model '{model}', "
            "binary data was already supplied."
        )
    for other in filled:
        if other != field:
            raise InvalidRequest(
                f"unexpected explicit tensor data for input tensor '{name}' for model '{model}' "
                f"of type '{_CONTENTS_FIELDS[other][0].value}', expected datatype "
                f"'{datatype.value}'"
            )
    values = getattr(contents, field) if filled else ()
    if datatype is DataType.BYTES:
        # One element too many proves the error.
        return _elements(declared, values[: declared.count + 1], len(values))
    if len(values) != declared.count:
        raise declared.size_mismatch(len(values) * datatype.numpy.itemsize)
    array = np.empty(declared.count, datatype.numpy)
    try:
        for start in range(0, declared.count, _VALUES_AT_ONCE):
            end = start + _VALUES_AT_ONCE
            array[start:end] = to_array(values[start:end], datatype.numpy)
    except OverflowError as error:
        raise InvalidRequest(
            f"{declared.prefix}a value of input '{name}' for model '{model}' does not fit "
            f"{datatype.value}: {error}"
        ) from error
    return array.reshape(declared.shape)


def to_array(values: Sequence[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the numbers of a request; raise OverflowError where one does not fit the type, which
    numpy 1 itself would wrap round.
    """
    if dtype.kind in "iu" and len(values):
        limits = np.iinfo(dtype)
        for value in (min(values), max(values)):
            if not limits.min <= value <= limits.max:
                raise OverflowError(f"{value} is out of bounds for {dtype}")
    return np.array(values, dtype)


def to_raw(array: NDArray[Any]) -> bytes | memoryview:
    """Return a tensor's bytes in the protocol's layout: a view on a large one if numpy's layout is
    the same."""
    if array.dtype.hasobject:
        return joined(array.reshape(-1))
    if array.nbytes < _COPIED_BELOW_BYTES:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def joined(elements: NDArray[Any] | Sequence[bytes]) -> bytes | memoryview:
    """Return BYTES elements one after the other, each behind its length; one copy, and for a part
    of the elements at a time.
    """
    whole = bytearray()
    for start in range(0, len(elements), _VALUES_AT_ONCE):
        parts: list[bytes] = []
        for element in elements[start : start + _VALUES_AT_ONCE]:
            parts += (len(element).to_bytes(4, "little"), element)
        if len(elements) <= _VALUES_AT_ONCE:
            return b"".join(parts)
        whole += b"".join(parts)
    return memoryview(whole)


def _decode_bytes(declared: Declared, raw: bytes | memoryview) -> NDArray[np.object_]:
    """Return BYTES elements, each stored after its 4-byte little-endian length."""
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
    return _elements(declared, elements, len(elements))


def _elements(declared: Declared, elements: Sequence[bytes], got: int) -> NDArray[np.object_]:
    prefix, where = declared.prefix, f"'{declared.name}' for model '{declared.model}'"
    if got > declared.count:
        raise InvalidRequest(
            f"{prefix}unexpected number of string elements {got} for inference input {where}, "
            f"expecting {declared.count}"
        )
    if got < declared.count:
        raise InvalidRequest(
            f"{prefix}expected {declared.count} string elements for inference input {where}, got "
            f"{got}"
        )
    array = np.empty(declared.count, dtype=np.object_)
    array[:] = elements
    return array.reshape(declared.shape)
