"""BF16 through DLPack, which numpy does not support: read and write the structures of dlpack.h."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from edge_server.tensors import DataType, element_count

_NAME = b"dltensor"
_USED_NAME = b"used_dltensor"
_CPU = 1
_BFLOAT = 4  # kDLBfloat
_BITS = 16


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = (
    ("dl_tensor", _DLTensor),
    ("manager_ctx", ctypes.c_void_p),
    ("deleter", _Deleter),
)

_api = ctypes.pythonapi
_is_valid = _api.PyCapsule_IsValid
_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_is_valid.restype = ctypes.c_int
_get_pointer = _api.PyCapsule_GetPointer
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_get_pointer.restype = ctypes.c_void_p
_set_name = _api.PyCapsule_SetName
_set_name.argtypes = (ctypes.py_object, ctypes.c_char_p)
_set_name.restype = ctypes.c_int
_new = _api.PyCapsule_New
_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_new.restype = ctypes.py_object

# Likewise, for a capsule that must not be referenced again, because it is being destroyed.
_dying_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _api)
)
_dying_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)

# Exported tensors until their consumer releases them: address → the objects at that address.
_exported: dict[int, tuple[Any, ...]] = {}


def is_bfloat16(capsule: Any) -> bool:
    """Return whether the capsule holds BF16 elements.

    Raises:
        TypeError: `capsule` is no DLPack capsule, or has been consumed.
    """
    datatype = _tensor_in(capsule).dtype
    return (datatype.code, datatype.bits, datatype.lanes) == (_BFLOAT, _BITS, 1)


def bfloat16_from(capsule: Any) -> np.ndarray[Any, Any]:
    """Return a copy of the tensor in a BF16 capsule, and consume the capsule."""
    address = _get_pointer(capsule, _NAME)
    managed = _DLManagedTensor.from_address(address)
    tensor = managed.dl_tensor
    if tensor.device_type != _CPU:
        raise TypeError("a BF16 tensor must be in host memory")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = (
        tuple(2 * stride for stride in tensor.strides[: tensor.ndim]) if tensor.strides else None
    )
    array = np.empty(shape, np.uint16)
    if array.size:
        begin = tensor.data + tensor.byte_offset
        # The bytes up to the farthest element.
        reach = element_count(shape) * 2
        if strides:
            reach = 2 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        memory = (ctypes.c_uint8 * reach).from_address(begin)
        array[...] = np.ndarray(shape, np.uint16, memory, strides=strides)
    _set_name(capsule, _USED_NAME)
    if managed.deleter:
        managed.deleter(ctypes.pointer(managed))
    return array.view(DataType.BF16.numpy)


def bfloat16_to(array: np.ndarray[Any, Any]) -> Any:
    """Return a capsule over `array`, whose elements are BF16 bits."""
    array = np.ascontiguousarray(array)
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    tensor = _DLTensor(
        array.ctypes.data,
        _CPU,
        0,
        array.ndim,
        _DLDataType(_BFLOAT, _BITS, 1),
        ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
        None,
        0,
    )
    managed = _DLManagedTensor(tensor, None, _forget_in_c)
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, array)
    return _new(address, _NAME, ctypes.cast(_forget_unused_in_c, ctypes.c_void_p))


def _forget(managed: Any) -> None:
    """Release the tensor when its consumer is done."""
    _exported.pop(ctypes.addressof(managed.contents), None)


def _forget_unused(capsule: int) -> None:
    """Release the tensor of an unconsumed capsule; `_forget` releases a consumed one."""
    if _dying_is_valid(capsule, _NAME):
        _exported.pop(_dying_pointer(capsule, _NAME), None)


_forget_in_c = _Deleter(_forget)
_forget_unused_in_c = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_forget_unused)


def _tensor_in(capsule: Any) -> Any:
    if type(capsule).__name__ != "PyCapsule" or not _is_valid(capsule, _NAME):
        raise TypeError(f"no DLPack capsule that is still unused: {capsule!r}")
    return _DLManagedTensor.from_address(_get_pointer(capsule, _NAME)).dl_tensor
