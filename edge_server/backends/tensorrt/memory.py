"""Memory of an instance's tensors on device and host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.gpu.device import Device
    from edge_server.gpu.memory import DeviceMemory, MappedMemory

# The alignment of every address that TensorRT gets.
ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class Span:
    """A view on a part of device memory, without ownership."""

    pointer: int
    nbytes: int


class StagingBuffer:
    """Device memory for one tensor, with its counterpart on the host.

    Where the GPU accesses the host's memory both are the same (mapped pinned memory), and no copy
    is made. Otherwise pinned memory stands beside the device memory, for asynchronous copies.

    Args:
        pinned: False copies directly from and to the caller's array.

    Attributes:
        host: the host's view; None without host memory of its own.
    """

    def __init__(self, device: Device, nbytes: int, *, mapped: bool, pinned: bool) -> None:
        self.nbytes = max(1, nbytes)
        self.is_mapped = mapped
        self.host: NDArray[np.uint8] | None = None
        self._memory: DeviceMemory | MappedMemory
        if mapped:
            self._memory = device.mapped((self.nbytes,), np.uint8)
            self.host = self._memory.array
        else:
            self._memory = device.memory(self.nbytes)
            if pinned:
                self.host = device.pinned((self.nbytes,), np.uint8)

    @property
    def pointer(self) -> int:
        return self._memory.pointer

    def span(self, begin: int, nbytes: int) -> Span:
        return Span(self.pointer + begin, nbytes)


MakeStaging = Callable[[int], StagingBuffer]


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the same memory as bytes; `array` is C-contiguous."""
    return array.reshape(-1).view(np.uint8)
