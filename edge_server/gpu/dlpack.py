"""Exchange device arrays with other libraries: DLPack and the CUDA array interface."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.tensors import DataType

if TYPE_CHECKING:
    from edge_server.gpu.stream import Stream

# DLDeviceType.
CUDA = 2
CUDA_MANAGED = 13

# DLDataTypeCode by numpy's kind; bfloat16 has its own code.
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_BFLOAT = 4


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor, the unversioned form, which every consumer supports."""

    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _Lent:
    """The tensor of a capsule; alive from `make_capsule` until its consumer calls the deleter."""

    def __init__(self, owner: object, shape: tuple[int, ...]) -> None:
        self.owner = owner
        self.shape = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        self.managed = _ManagedTensor()


def _delete(managed: int) -> None:
    context = _ManagedTensor.from_address(managed).context
    _PYTHON.Py_DecRef(ctypes.c_void_p(context))


def _forget(capsule: int) -> None:
    """Free the tensor of a dying capsule unless a consumer has taken it."""
    if _PYTHON.PyCapsule_IsValid(ctypes.c_void_p(capsule), _NAME):
        _delete(_PYTHON.PyCapsule_GetPointer(ctypes.c_void_p(capsule), _NAME))


# The callbacks take bare addresses: a consumer may drop its array on any thread, and a dying
# capsule may not be touched as an object.
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DELETER = _CALLBACK(_delete)
_DESTRUCTOR = _CALLBACK(_forget)

_NAME = b"dltensor"
_PYTHON = ctypes.PyDLL(None)
_PYTHON.PyCapsule_New.restype = ctypes.py_object
_PYTHON.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_PYTHON.PyCapsule_IsValid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_PYTHON.PyCapsule_GetPointer.restype = ctypes.c_void_p
_PYTHON.PyCapsule_GetPointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_PYTHON.Py_IncRef.argtypes = (ctypes.c_void_p,)
_PYTHON.Py_DecRef.argtypes = (ctypes.c_void_p,)


def make_capsule(
    owner: object,
    pointer: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    device: tuple[int, int],
) -> object:
    """Return a capsule over C-contiguous memory; the capsule keeps `owner` alive until its consumer
    is done.

    Args:
        device: in the form of `__dlpack_device__`.

    Raises:
        BufferError: DLPack lacks the element type.
    """
    lent = _Lent(owner, shape)
    managed = lent.managed
    managed.tensor = _Tensor(
        data=pointer,
        device=_Device(*device),
        ndim=len(shape),
        type=_type_of(dtype),
        shape=ctypes.cast(lent.shape, ctypes.POINTER(ctypes.c_int64)),
        strides=None,
        byte_offset=0,
    )
    managed.context = id(lent)
    managed.deleter = ctypes.cast(_DELETER, ctypes.c_void_p)
    capsule = _PYTHON.PyCapsule_New(
        ctypes.byref(managed), _NAME, ctypes.cast(_DESTRUCTOR, ctypes.c_void_p)
    )
    _PYTHON.Py_IncRef(ctypes.c_void_p(id(lent)))
    return capsule


def described(thing: Any, stream: Stream) -> tuple[int, tuple[int, ...], np.dtype[Any], object]:
    """Return the address and description of `thing`; `stream` waits for its library's pending work
    on it.

    Returns:
        Pointer, shape, type, and the owner that must live as long as the memory is used.

    Raises:
        TypeError: `thing` is no C-contiguous array on the device of `stream`.
    """
    interface = getattr(thing, "__cuda_array_interface__", None)
    # Before version 3 (torch) the interface names no stream to wait for; by DLPack the library gets
    # our stream.
    if interface and (interface["version"] >= 3 or not hasattr(thing, "__dlpack__")):
        return _by_interface(thing, interface, stream)
    if not hasattr(thing, "__dlpack__"):
        raise TypeError(
            f"{type(thing).__name__} has neither __cuda_array_interface__ nor __dlpack__"
        )
    kind, index = thing.__dlpack_device__()
    if kind not in (CUDA, CUDA_MANAGED) or index != stream.device.index:
        raise TypeError(
            f"{type(thing).__name__} lies on DLPack's device ({int(kind)}, {index}), "
            f"not on {stream.device}"
        )
    capsule = thing.__dlpack__(stream=stream.handle)
    # The capsule keeps its name, so it calls the deleter itself when its last reference is dropped.
    return (*read_capsule(capsule), capsule)


def _by_interface(
    thing: Any, interface: dict[str, Any], stream: Stream
) -> tuple[int, tuple[int, ...], np.dtype[Any], object]:
    dtype = np.dtype(interface["typestr"])
    shape = tuple(interface["shape"])
    _check_contiguous(shape, interface.get("strides"), dtype.itemsize)
    if interface.get("mask") is not None:
        raise TypeError("an array with a mask is no tensor")
    if (writer := interface.get("stream")) is not None:
        stream.wait_for_handle(writer)
    return interface["data"][0], shape, dtype, thing


def read_capsule(capsule: object) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """Return pointer, shape and type of a capsule's tensor, which stays in the capsule.

    Raises:
        TypeError: numpy lacks the element type, or the array is not C-contiguous.
    """
    address = ctypes.c_void_p(id(capsule))
    if not _PYTHON.PyCapsule_IsValid(address, _NAME):
        raise TypeError("this DLPack capsule has been taken already, or is of a newer form")
    tensor = _Tensor.from_address(_PYTHON.PyCapsule_GetPointer(address, _NAME))
    dtype = _dtype_of(tensor.type)
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides:
        strides = tuple(count * dtype.itemsize for count in tensor.strides[: tensor.ndim])
        _check_contiguous(shape, strides, dtype.itemsize)
    return (tensor.data or 0) + tensor.byte_offset, shape, dtype


def _check_contiguous(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int
) -> None:
    if strides is None or 0 in shape:
        return
    step = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != step:
            raise TypeError(f"the array is not C-contiguous: shape {shape}, strides {strides}")
        step *= size


def _type_of(dtype: np.dtype[Any]) -> _Type:
    if dtype == DataType.BF16.numpy:
        return _Type(_BFLOAT, 16, 1)
    if dtype.kind not in _CODES or not dtype.isnative:
        raise BufferError(f"DLPack has no type for numpy {dtype}")
    return _Type(_CODES[dtype.kind], 8 * dtype.itemsize, 1)


def _dtype_of(kind: _Type) -> np.dtype[Any]:
    if kind.lanes == 1 and kind.bits % 8 == 0:
        if (kind.code, kind.bits) == (_BFLOAT, 16):
            return DataType.BF16.numpy
        for letter, code in _CODES.items():
            if code == kind.code:
                return np.dtype(f"{letter}{kind.bits // 8}")
    raise TypeError(f"numpy has no type for DLPack's ({kind.code}, {kind.bits}, {kind.lanes})")
