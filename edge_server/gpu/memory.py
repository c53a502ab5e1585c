"""Device memory, and host memory that the device can access."""

from __future__ import annotations

import ctypes
import math
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray

    from edge_server.gpu.device import Device

# cuda.h, CU_MEMHOSTALLOC_*.
_PORTABLE, _DEVICE_MAP = 1, 2


class DeviceMemory:
    """Bytes on the device, of undefined content, freed soon after garbage collection.

    Allocation waits for the driver: keep the memory, or use a `BufferPool`.

    Attributes:
        pointer: aligned to 256 bytes at least.

    Raises:
        Unavailable: the device has too little free memory.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        address = ctypes.c_uint64()
        device.allocate(
            f"allocate {nbytes} bytes",
            "cuMemAlloc_v2",
            ctypes.byref(address),
            ctypes.c_size_t(nbytes),
        )
        self.pointer = address.value
        weakref.finalize(self, device.free, "cuMemFree_v2", address).atexit = False


class MappedMemory:
    """Pinned host memory that kernels access in place.

    On an integrated GPU no copy is made, but the GPU does not cache the memory: read it once. On
    any other GPU each access crosses the bus.

    Attributes:
        array: the host's view, which keeps the memory alive by itself.
        pointer: the device's address of the memory.

    Raises:
        Unavailable: the system cannot pin that much memory.
    """

    def __init__(self, device: Device, shape: Sequence[int], dtype: DTypeLike) -> None:
        owner = _PinnedMemory(device, shape, dtype, mapped=True)
        self.array = owner.array(shape, dtype)
        self.pointer = owner.pointer

    @property
    def nbytes(self) -> int:
        return self.array.nbytes


def pinned_array(device: Device, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Return a host array that the GPU copies asynchronously; it must live, and stay unchanged,
    until the copy is done.

    Raises:
        Unavailable: the system cannot pin that much memory.
    """
    return _PinnedMemory(device, shape, dtype, mapped=False).array(shape, dtype)


class _PinnedMemory:
    """The owner of pinned memory; numpy keeps it alive with every view."""

    def __init__(
        self, device: Device, shape: Sequence[int], dtype: DTypeLike, *, mapped: bool
    ) -> None:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        address, on_device = ctypes.c_void_p(), ctypes.c_uint64()
        device.allocate(
            f"pin {nbytes} bytes of host memory",
            "cuMemHostAlloc",
            ctypes.byref(address),
            ctypes.c_size_t(max(nbytes, 1)),
            ctypes.c_uint(_PORTABLE | (_DEVICE_MAP if mapped else 0)),
        )
        weakref.finalize(self, device.free, "cuMemFreeHost", address).atexit = False
        if mapped:
            device.call(
                "map host memory",
                "cuMemHostGetDevicePointer_v2",
                ctypes.byref(on_device),
                address,
                ctypes.c_uint(0),
            )
        self.pointer = on_device.value
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address.value, False),
            "version": 3,
        }

    def array(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        return np.asarray(self).view(dtype).reshape(tuple(shape))
