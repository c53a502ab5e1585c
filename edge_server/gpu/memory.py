"""Device memory, and host memory that the device can access."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.gpu.device import Device

# cuda.h, CU_MEMHOSTALLOC_*.
_PORTABLE, _DEVICE_MAP = 1, 2


class DeviceMemory:
    """Bytes on the device, freed soon after garbage collection; made by `Device.memory`.

    Allocation waits for the driver: keep the memory, or use a `BufferPool`.

    Attributes:
        pointer: aligned to 256 bytes at least.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        address = ctypes.c_uint64()
        device.allocate(
            f"allocate {nbytes} bytes", "cuMemAlloc_v2", ctypes.byref(address), _size(nbytes)
        )
        self.pointer = address.value
        self._free = weakref.finalize(self, device.free, "cuMemFree_v2", address)
        self._free.atexit = False

    def close(self) -> None:
        """Queue the memory for freeing now."""
        self._free()


class MappedMemory:
    """Pinned host memory that kernels access in place; made by `Device.mapped`.

    On an integrated GPU no copy is made, but the GPU does not cache the memory: read it once. On
    any other GPU each access crosses the bus.

    Attributes:
        array: the host's view, which keeps the memory alive by itself.
        pointer: the device's address of the memory; 0 where the memory is only pinned.
    """

    def __init__(self, array: NDArray[Any], pointer: int) -> None:
        self.array = array
        self.pointer = pointer

    @property
    def nbytes(self) -> int:
        return self.array.nbytes


class _PinnedMemory:
    """The owner of pinned memory; numpy keeps it alive with every view."""

    def __init__(
        self, device: Device, shape: tuple[int, ...], dtype: np.dtype[Any], flags: int
    ) -> None:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        address, mapped = ctypes.c_void_p(), ctypes.c_uint64()
        device.allocate(
            f"pin {nbytes} bytes of host memory",
            "cuMemHostAlloc",
            ctypes.byref(address),
            _size(max(nbytes, 1)),
            ctypes.c_uint(flags),
        )
        weakref.finalize(self, device.free, "cuMemFreeHost", address).atexit = False
        if flags & _DEVICE_MAP:
            device.call(
                "map host memory",
                "cuMemHostGetDevicePointer_v2",
                ctypes.byref(mapped),
                address,
                ctypes.c_uint(0),
            )
        self.pointer = mapped.value
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address.value, False),
            "version": 3,
        }


def host_memory(
    device: Device, shape: tuple[int, ...], dtype: np.dtype[Any], *, mapped: bool
) -> MappedMemory:
    """Return pinned host memory; kernels can access it if `mapped`."""
    owner = _PinnedMemory(device, shape, dtype, _PORTABLE | (_DEVICE_MAP if mapped else 0))
    return MappedMemory(np.asarray(owner).view(dtype).reshape(shape), owner.pointer)


def _size(nbytes: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(nbytes)
