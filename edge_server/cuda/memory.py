"""Memory of the device, and host memory that the device reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.cuda.device import Device


class DeviceMemory:
    """Bytes on the device, freed when this is garbage; made by `Device.memory`.

    Freeing waits for the whole device: keep them, or take them from a `BufferPool`.

    Attributes:
        pointer: aligned to 256 bytes at least.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        with device.current(f"allocate {nbytes} bytes"):
            self._box = device.hold(self, device.driver.mem_alloc(nbytes))
            self.pointer = int(self._box[0])

    def close(self) -> None:
        """Free it now."""
        self.device.let_go(self._box)


class MappedMemory:
    """Pinned host memory that kernels reach in place; made by `Device.mapped`.

    On an integrated GPU nothing is copied, and the GPU does not cache it: read it once. On any
    other each access crosses the bus.

    Attributes:
        array: the host's view. It keeps the memory alive by itself.
        pointer: where the device finds it; 0 where it is only pinned.
    """

    def __init__(self, array: NDArray[Any], pointer: int) -> None:
        self.array = array
        self.pointer = pointer

    @property
    def nbytes(self) -> int:
        return self.array.nbytes


class _Pinned:
    """What owns pinned memory, and what numpy keeps alive with every view on it."""

    def __init__(
        self, device: Device, shape: tuple[int, ...], dtype: np.dtype[Any], flags: int
    ) -> None:
        driver = device.driver
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with device.current(f"pin {nbytes} bytes of host memory"):
            array = driver.pagelocked_empty(max(nbytes, 1), np.uint8, mem_flags=flags)
            self._box = device.hold(self, array)
            mapped = flags & driver.host_alloc_flags.DEVICEMAP
            self.pointer = int(array.base.get_device_pointer()) if mapped else 0
        self.__array_interface__ = {**array.__array_interface__, "shape": (nbytes,)}


def host_memory(
    device: Device, shape: tuple[int, ...], dtype: np.dtype[Any], *, mapped: bool
) -> MappedMemory:
    """Pinned host memory, reachable by kernels where it is `mapped`."""
    flags = device.driver.host_alloc_flags
    chosen = flags.PORTABLE | (flags.DEVICEMAP if mapped else 0)
    owner = _Pinned(device, shape, dtype, chosen)
    return MappedMemory(np.asarray(owner).view(dtype).reshape(shape), owner.pointer)
