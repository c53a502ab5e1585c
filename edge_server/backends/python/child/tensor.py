"""`pb_utils.Tensor`."""

from __future__ import annotations

from typing import Any

import numpy as np

from edge_server.backends.python.child.dlpack import bfloat16_from, bfloat16_to, is_bfloat16
from edge_server.backends.python.child.errors import TritonModelException
from edge_server.backends.python.child.given import text
from edge_server.tensors import DataType

# The protocol's types in the order of their numbers in Triton's C API, from 1.
DATA_TYPES = (
    DataType.BOOL,
    DataType.UINT8,
    DataType.UINT16,
    DataType.UINT32,
    DataType.UINT64,
    DataType.INT8,
    DataType.INT16,
    DataType.INT32,
    DataType.INT64,
    DataType.FP16,
    DataType.FP32,
    DataType.FP64,
    DataType.BYTES,
    DataType.BF16,
)
_CPU = (1, 0)  # kDLCPU, device 0


class Tensor:
    """A named array on the host.

    An input's array lies in memory that the daemon shares with this process. The model owns the
    array: it may be written to, and stays valid as long as it is referenced.
    """

    def __init__(self, name: str, numpy_array: np.ndarray[Any, Any]) -> None:
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"Tensor '{name}': expected a numpy array, got {type(numpy_array)}")
        datatype = DataType.from_numpy(numpy_array.dtype)
        if numpy_array.dtype.type is np.bytes_:
            datatype = DataType.BYTES
        if datatype is None or datatype is DataType.BF16:
            raise TritonModelException("NumPy dtype is not supported.")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        self._name = text(name, "name")
        self._datatype: DataType = datatype
        # The protocol is little-endian.
        self._array = numpy_array.astype(numpy_array.dtype.newbyteorder("<"), copy=False)

    @classmethod
    def over(cls, name: str, datatype: DataType, array: np.ndarray[Any, Any]) -> Tensor:
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
        if self._datatype is DataType.BF16:
            return bfloat16_to(self._array)
        return self._array.__dlpack__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Return a tensor over the memory of `tensor`: a capsule, or an object with
        `__dlpack__`."""
        if hasattr(tensor, "__dlpack_device__"):
            device, _ = tensor.__dlpack_device__()
            if int(device) != _CPU[0]:
                raise TritonModelException(
                    f"Tensor '{name}' is not in host memory; move it there first"
                )
        capsule = tensor.__dlpack__() if hasattr(tensor, "__dlpack__") else tensor
        if is_bfloat16(capsule):
            return Tensor.over(name, DataType.BF16, bfloat16_from(capsule))
        array = np.from_dlpack(_Capsule(capsule))
        # numpy treats memory from an unversioned capsule as read-only, and would refuse to export
        # it.
        return Tensor(name, array if array.flags.writeable else np.asarray(_Writable(array)))

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU


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
