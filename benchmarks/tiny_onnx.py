"""A small ONNX file with a free batch, written without the onnx package, which no device needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# onnx.proto3: TensorProto.DataType.
_DATATYPES = {np.dtype(np.float32): 1, np.dtype(np.float16): 10}
_IR_VERSION = 8
_OPSET = 17


def relu_of_product(weights: NDArray[Any]) -> bytes:
    """`y = max(x @ weights, 0)`, where x is (n, rows of `weights`), in the weights' datatype."""
    datatype = _DATATYPES[weights.dtype]
    rows, columns = weights.shape
    graph = (
        _field(1, _node("MatMul", ["x", "w"], "product"))
        + _field(1, _node("Relu", ["product"], "y"))
        + _field(2, b"free")
        + _field(5, _tensor("w", weights, datatype))
        + _field(11, _value("x", datatype, rows))
        + _field(12, _value("y", datatype, columns))
    )
    return _field(1, _IR_VERSION) + _field(7, graph) + _field(8, _field(2, _OPSET))


def _node(operator: str, inputs: list[str], output: str) -> bytes:
    given = b"".join(_field(1, name.encode()) for name in inputs)
    return given + _field(2, output.encode()) + _field(4, operator.encode())


def _tensor(name: str, array: NDArray[Any], datatype: int) -> bytes:
    dims = b"".join(_field(1, size) for size in array.shape)
    data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    return dims + _field(2, datatype) + _field(8, name.encode()) + _field(9, data)


def _value(name: str, datatype: int, size: int) -> bytes:
    shape = _field(1, _field(2, b"n")) + _field(1, _field(1, size))
    return _field(1, name.encode()) + _field(2, _field(1, _field(1, datatype) + _field(2, shape)))


def _field(number: int, value: int | bytes) -> bytes:
    """A field of a protobuf message: a whole number, or bytes."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
