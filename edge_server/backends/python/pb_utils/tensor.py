"""`pb_utils.Tensor`, and its exchange through DLPack, where numpy lacks BF16."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from edge_server.backends.python.pb_utils.values import TritonModelException, text
from edge_server.tensors import DataType

# Their numbers in Triton's C API are their places here, from 1.
DATA_TYPES = tuple(DataType)
# dlpack.h: kDLCPU, device 0; kDLUInt, kDLBfloat.
_CPU = (1, 0)
_UINT, _BFLOAT = 1, 4


class PbTensor:
    """`pb_utils.Tensor`: a named array on the host.

    An input's array lies in memory that the daemon shares with this process. The model owns the
    array: it may be written to, and stays valid as long as it is referenced.
    """

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
        """Return a tensor of any type; the array has that type's form in numpy."""
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
        """Return the number of the type in Triton's C API."""
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
        """Return a DLPack capsule over the same memory."""
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
    """Return a tensor's name.

    Raises:
        TypeError: it is no text.
        TritonModelException: it is empty (Triton's text).
    """
    named = text(name, "name")
    if not named:
        raise TritonModelException("Tensor name cannot be an empty string.")
    return named


def type_of(dtype: np.dtype[Any]) -> DataType:
    """Return the protocol's type of an array's elements.

    Raises:
        TritonModelException: the protocol has no such type.
    """
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
    """Return the element type in the capsule's memory, for reading and writing.

    Raises:
        TypeError: `capsule` is no DLPack capsule, or has been consumed.
    """
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
