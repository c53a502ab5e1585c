"""`pb_utils.Tensor`, its exchange through DLPack where numpy lacks BF16, the errors that `model.py`
uses, and the checks of the values that it passes.

An invalid value is the model's mistake and raises at its origin; an invalid message would end the
model's process. Triton accepts the same types.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.python.messages import Code, shortened
from edge_server.process.text import as_utf8
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from edge_server.backends.python.messages import Value

_INT64 = range(-(1 << 63), 1 << 63)


class TritonModelException(Exception):
    """Raised in `execute`, this error fails the whole batch."""


class TritonError:
    """The error of one response."""

    UNKNOWN = Code.UNKNOWN
    INTERNAL = Code.INTERNAL
    NOT_FOUND = Code.NOT_FOUND
    INVALID_ARG = Code.INVALID_ARG
    UNAVAILABLE = Code.UNAVAILABLE
    UNSUPPORTED = Code.UNSUPPORTED
    ALREADY_EXISTS = Code.ALREADY_EXISTS
    CANCELLED = Code.CANCELLED

    def __init__(self, message: str, code: int = Code.INTERNAL) -> None:
        self._message = text(message, "message")
        self._code = Code(code)

    def message(self) -> str:
        return self._message

    def code(self) -> Code:
        return self._code

    def __str__(self) -> str:
        return self._message


def text(value: Any, what: str) -> str:
    """Return a `str`, or UTF-8 in `bytes` decoded: models also pass elements of BYTES tensors as
    model names."""
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, found type '{type(value)}'")
    value.encode()
    # An exact `str`: a subclass cannot be encoded.
    return "".join(value)


def whole(value: Any, what: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an int, found type '{type(value)}'") from None
    if number not in _INT64:
        raise TypeError(f"{what} must fit 64 bits, found {number}")
    return number


def plain_parameters(parameters: Mapping[Any, Any] | None) -> dict[str, Value]:
    """Convert parameters to Python's own types: subclasses, like numpy's float64, cannot be
    encoded."""
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise TritonModelException(f"Expect parameters to have type dict, got {type(parameters)}")
    for key in parameters:
        if not isinstance(key, str):
            raise TritonModelException(
                f"Expect parameters keys to have type str, found type {type(key)}"
            )
    return {text(key, "parameters keys"): _plain(value) for key, value in parameters.items()}


def _plain(value: Any) -> Value:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value, "parameters values")
    if isinstance(value, int):
        return whole(value, "parameters values")
    if isinstance(value, float):
        return float(value)
    raise TritonModelException(
        f"Expect parameters values to have type bool/int/float/str, found type {type(value)}"
    )


def printable(value: Any) -> str:
    """Return `str(value)` as text that can be sent, even where `str` fails."""
    try:
        printed = str(value)
    except Exception as error:  # noqa: BLE001 - a failing `str` must not hide the original error
        printed = f"<{type(value).__name__} that cannot be printed: {type(error).__name__}>"
    return shortened(as_utf8(printed))


# Their numbers in Triton's C API are their places here, from 1.
DATA_TYPES = tuple(DataType)
# dlpack.h: kDLCPU, device 0; kDLUInt, kDLBfloat.
_CPU = (1, 0)
_UINT, _BFLOAT = 1, 4


class PbTensor:
    """`pb_utils.Tensor`: a named array on the host. That of an input lies in memory that the daemon
    shares with this process; the model may write to it, and it stays valid as long as it is
    referenced."""

    def __init__(self, name: str, numpy_array: np.ndarray[Any, Any]) -> None:
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"Tensor '{name}': expected a numpy array, got {type(numpy_array)}")
        datatype = type_of(numpy_array.dtype)
        if datatype is DataType.BF16:
            raise TritonModelException("NumPy dtype is not supported.")
        self._name = _named(name)
        self._datatype: DataType = datatype
        # The protocol is little-endian.
        self._array = numpy_array.astype(numpy_array.dtype.newbyteorder("<"), copy=False)

    @classmethod
    def over(cls, name: str, datatype: DataType, array: np.ndarray[Any, Any]) -> PbTensor:
        if datatype is not DataType.BF16:
            return cls(name, array)
        # numpy lacks BF16, so a model cannot pass it to the constructor; the tensor is otherwise
        # ordinary.
        tensor = cls(name, np.empty(0, np.uint8))
        tensor._datatype, tensor._array = datatype, array
        return tensor

    @property
    def content(self) -> tuple[DataType, np.ndarray[Any, Any]]:
        """Return the tensor's type and array as sent to the daemon."""
        return self._datatype, self._array

    def name(self) -> str:
        return self._name

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def triton_dtype(self) -> int:
        return DATA_TYPES.index(self._datatype) + 1

    def is_cpu(self) -> bool:
        return True

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """Return the array itself; BYTES elements are `bytes` objects."""
        if self._datatype is DataType.BF16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and "
                "from_dlpack() instead."
            )
        return self._array

    def to_dlpack(self) -> Any:
        if self._datatype is DataType.BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        if self._datatype is not DataType.BF16:
            return self._array.__dlpack__()
        capsule = self._array.view(np.uint16).__dlpack__()
        _element_type(capsule).code = _BFLOAT
        return capsule

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> PbTensor:
        """Return a tensor over the memory of `tensor`: a capsule, or an object with
        `__dlpack__`."""
        _named(name)
        if type(tensor).__name__ != "PyCapsule" and not hasattr(tensor, "__dlpack__"):
            raise TritonModelException(
                "Provided tensor is not supported. Tensor must be a DLPack capsule or have "
                "`__dlpack__` attribute"
            )
        if hasattr(tensor, "__dlpack_device__"):
            device, _ = tensor.__dlpack_device__()
            if int(device) != _CPU[0]:
                raise TritonModelException(
                    f"Tensor '{name}' is not in host memory; move it there first"
                )
        capsule = tensor.__dlpack__() if hasattr(tensor, "__dlpack__") else tensor
        element_type = _element_type(capsule)
        is_bf16 = (element_type.code, element_type.bits, element_type.lanes) == (_BFLOAT, 16, 1)
        if is_bf16:
            element_type.code = _UINT
        array = np.from_dlpack(_Capsule(capsule))
        if not array.flags.writeable:
            # numpy treats memory from an unversioned capsule as read-only, and would refuse to
            # export it.
            array = np.asarray(_Writable(array))
        if is_bf16:
            return PbTensor.over(name, DataType.BF16, array.view(DataType.BF16.numpy))
        return PbTensor(name, array)

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU


def _named(name: Any) -> str:
    named = text(name, "name")
    if not named:
        raise TritonModelException("Tensor name cannot be an empty string.")
    return named


def type_of(dtype: np.dtype[Any]) -> DataType:
    datatype = DataType.BYTES if dtype.type is np.bytes_ else DataType.from_numpy(dtype)
    if datatype is None:
        raise TritonModelException("NumPy dtype is not supported.")
    return datatype


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    """The beginning of dlpack.h's DLTensor, with which a capsule's memory begins."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
    )


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _element_type(capsule: Any) -> Any:
    try:
        address = _capsule_pointer(capsule, b"dltensor")
    except ValueError:
        raise TypeError(f"no DLPack capsule that is still unused: {capsule!r}") from None
    return _DLTensor.from_address(address).dtype


class _Capsule:
    """Wraps a capsule as the object with `__dlpack__` that numpy needs."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU


class _Writable:
    """Memory of an array that numpy treats as read-only."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._owner = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
