"""Tensors and their types: the protocol's names, the configuration's names, numpy's names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


class DataType(Enum):
    """A tensor's element type; the value is the protocol's name (`FP32`, `BYTES`).

    In the order of the protocol's own enumeration, from 1.
    """

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BYTES = "BYTES"
    BF16 = "BF16"

    # The little-endian type of numpy; BYTES is an object array of `bytes`. numpy has no BF16: its
    # bits travel as a record of one `<u2`, which numpy refuses to calculate with.
    numpy: np.dtype[Any]

    # Enum's own hash is a call in Python for each look into a table; a member exists once.
    __hash__ = object.__hash__

    @property
    def config_name(self) -> str:
        """The type's name in config.pbtxt: `TYPE_FP32`; BYTES is `TYPE_STRING` there."""
        return "TYPE_STRING" if self is DataType.BYTES else f"TYPE_{self.value}"

    @staticmethod
    def from_config(name: str) -> DataType | None:
        """The type with the config.pbtxt name `name`; None for TYPE_INVALID and unknown names."""
        return _BY_CONFIG_NAME.get(name)

    @staticmethod
    def from_numpy(dtype: np.dtype[Any]) -> DataType | None:
        """The type of a numpy array's elements; None where the protocol has none."""
        known = _BY_NUMPY.get(dtype)
        return _BY_NUMPY.get(dtype.newbyteorder("<")) if known is None else known


_NUMPY: dict[DataType, np.dtype[Any]] = {
    DataType.BOOL: np.dtype(np.bool_),
    DataType.UINT8: np.dtype(np.uint8),
    DataType.UINT16: np.dtype("<u2"),
    DataType.UINT32: np.dtype("<u4"),
    DataType.UINT64: np.dtype("<u8"),
    DataType.INT8: np.dtype(np.int8),
    DataType.INT16: np.dtype("<i2"),
    DataType.INT32: np.dtype("<i4"),
    DataType.INT64: np.dtype("<i8"),
    DataType.FP16: np.dtype("<f2"),
    DataType.FP32: np.dtype("<f4"),
    DataType.FP64: np.dtype("<f8"),
    DataType.BF16: np.dtype([("bfloat16", "<u2")]),
    DataType.BYTES: np.dtype(np.object_),
}
_BY_CONFIG_NAME = {datatype.config_name: datatype for datatype in DataType}
_BY_NUMPY = {dtype: datatype for datatype, dtype in _NUMPY.items()}
for _datatype, _dtype in _NUMPY.items():
    _datatype.numpy = _dtype


@dataclass(frozen=True)
class TensorSpec:
    """The declaration of one of a model's tensors.

    Attributes:
        shape: without the batch dimension where the model batches; -1 is any size.
        optional: a request may omit this input.
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True)
class Signature:
    """A model's tensors in the file's order; the batch dimension is included.

    Attributes:
        with_defaults: inputs for which the file has default values; they count as inputs of the
            model where the configuration names them.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    with_defaults: tuple[TensorSpec, ...] = ()


class DeviceArray(Protocol):
    """An array in GPU memory with numpy's interface and no implicit conversion to numpy."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def nbytes(self) -> int: ...

    def reshape(self, shape: tuple[int, ...]) -> DeviceArray:
        """The same elements in another shape; one -1 in it is inferred.

        Raises:
            ValueError: the shape has another number of elements.
        """
        ...

    def on_host(self) -> NDArray[Any]:
        """A copy on the host, made after the pending writes to the array have ended.

        Raises:
            EdgeServerError: the device failed.
        """
        ...


class Tensor(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A value without a name: `array` is C-contiguous and never written by a reader.

    `array` is a numpy array, except between the steps of an ensemble, where models on a GPU may
    pass a `DeviceArray`. Code that did not request device tensors may assume numpy.
    """

    array: NDArray[Any]

    @property
    def on_device(self) -> DeviceArray | None:
        """The tensor's array where that is in GPU memory; None on the host."""
        return None if isinstance(self.array, np.ndarray) else self.array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def datatype(self) -> DataType:
        """Of the elements; TypeError where the protocol lacks this numpy type."""
        dtype = self.array.dtype
        datatype = _BY_NUMPY.get(dtype) or DataType.from_numpy(dtype)
        if datatype is None:
            raise TypeError(f"no tensor type for numpy {self.array.dtype}")
        return datatype

    @staticmethod
    def of(array: NDArray[Any]) -> Tensor:
        """A tensor over `array`; copied only where it is not C-contiguous."""
        return Tensor(np.ascontiguousarray(array) if array.ndim else array)


def shape_fits(shape: tuple[int, ...], spec: tuple[int, ...]) -> bool:
    """Whether `shape` matches `spec`, where -1 is any size."""
    if len(shape) != len(spec):
        return False
    for got, want in zip(shape, spec, strict=True):  # noqa: SIM110 - every request comes by here
        if want not in (got, -1):
            return False
    return True


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as the protocol's messages print it: `[1,3,-1]`."""
    return "[" + ",".join(map(str, shape)) + "]"


def element_count(shape: Iterable[int]) -> int:
    """Product of the dimensions in Python integers, so that it cannot overflow."""
    return math.prod(shape)


def is_finite(tensor: Tensor) -> bool:
    """Whether a host tensor holds neither infinity nor NaN; types other than floats are finite."""
    array = tensor.array
    if array.dtype.kind == "f":
        return bool(np.isfinite(array).all())
    if array.dtype == DataType.BF16.numpy:
        return not bool(((array.view("<u2") & 0x7F80) == 0x7F80).any())
    return True


def as_floats(tensor: Tensor) -> NDArray[Any]:
    """The tensor's elements as float64; those of BYTES are all 0."""
    array = tensor.array
    if array.dtype.hasobject:
        return np.zeros(array.shape)
    if array.dtype == DataType.BF16.numpy:
        # A bfloat16 is the upper half of a float32.
        array = (array.view("<u2").astype("<u4") << 16).view("<f4")
    return array.astype(np.float64)


def zeros(datatype: DataType, shape: tuple[int, ...]) -> NDArray[Any]:
    if datatype is DataType.BYTES:
        return np.full(shape, b"", np.object_)
    return np.zeros(shape, datatype.numpy)


def random_data(datatype: DataType, shape: tuple[int, ...]) -> NDArray[Any]:
    """Any integer, floats in [0, 1), texts of 8 digits; the same each time."""
    generator = np.random.default_rng(0)
    dtype = datatype.numpy
    if datatype is DataType.BYTES:
        texts = [b"%08d" % n for n in generator.integers(0, 10**8, element_count(shape))]
        return np.array(texts, np.object_).reshape(shape)
    if datatype is DataType.BF16:
        # The upper half of a float32 is a bfloat16.
        bits = generator.random(shape, np.float32).view(np.uint32) >> 16
        return bits.astype("<u2").view(dtype)
    if dtype.kind == "f":
        return generator.random(shape).astype(dtype)
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(dtype)
    limits = np.iinfo(dtype)
    return generator.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def first_tensor(
    raw: bytes, datatype: DataType, shape: tuple[int, ...]
) -> tuple[NDArray[Any] | None, int]:
    """The tensor that `raw` begins with, None where `raw` is too short, and its size in bytes.

    Args:
        raw: little-endian elements in C order; of BYTES, each behind its length in 4 bytes.
    """
    count = element_count(shape)
    if datatype is not DataType.BYTES:
        n_bytes = count * datatype.numpy.itemsize
        if len(raw) < n_bytes:
            return None, n_bytes
        return np.frombuffer(raw, datatype.numpy, count).reshape(shape), n_bytes
    texts: list[bytes] = []
    at = 0
    for _ in range(count):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        if len(raw) < max(end, at + 4):
            return None, max(end, at + 4)
        texts.append(raw[at + 4 : end])
        at = end
    return np.array(texts, np.object_).reshape(shape), at
