"""Stage host frames for a GPU; no thread waits for the copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge_server.gpu.memory import DeviceMemory, MappedMemory, pinned_array
from edge_server.gpu.stream import Event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.gpu.device import Device
    from edge_server.gpu.stream import Stream

# One slot to fill, one that a kernel reads, and a spare for a GPU busy with other work.
SLOTS = 3


class FrameStaging:
    """A ring of pinned buffers, for one stream and one thread at a time.

    Attributes:
        copies: frames are copied to the device, because it cannot read host memory at full speed.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self.copies = not (device.integrated and device.can_map_host_memory)
        self._device = device
        self._stream = stream
        self._slots = [_Slot(device) for _ in range(SLOTS)]
        # One buffer is enough: the stream orders copies and kernels.
        self._on_device: DeviceMemory | None = None

    def put(self, frames: Sequence[NDArray[np.uint8]]) -> int:
        """Stage `frames` one behind the other; return their address for the stream's next work.

        The caller may overwrite the frames after the return. The call waits only where the GPU is
        `SLOTS` batches behind. Call `read` once the stream has received the work that reads the
        slot.

        Raises:
            EdgeServerError: no memory is left for the frames, or the device failed.
        """
        self._slots.append(slot := self._slots.pop(0))
        slot.read.wait()
        nbytes = sum(frame.nbytes for frame in frames)
        host = slot.of(nbytes, mapped=not self.copies)
        begin = 0
        for frame in frames:
            host[begin : begin + frame.nbytes] = frame.reshape(-1)
            begin += frame.nbytes
        if not self.copies:
            return slot.pointer
        if self._on_device is None or self._on_device.nbytes < nbytes:
            self._on_device = DeviceMemory(self._device, nbytes)
        self._stream.to_device(self._on_device, host)
        return self._on_device.pointer

    def read(self) -> None:
        """Mark the slot of the last `put`: the stream has received all work that reads the slot."""
        self._slots[-1].read.record(self._stream)

    def close(self) -> None:
        """Free all slots; the stream must have finished with them."""
        self._slots.clear()
        self._on_device = None


class _Slot:
    """Pinned memory, and the event after which it may be overwritten."""

    def __init__(self, device: Device) -> None:
        self.read = Event(device)
        self.pointer = 0
        self._device = device
        self._host = np.empty(0, np.uint8)

    def of(self, nbytes: int, *, mapped: bool) -> NDArray[np.uint8]:
        """Return the first `nbytes` of the slot; a smaller slot grows."""
        if self._host.nbytes < nbytes:
            if mapped:
                memory = MappedMemory(self._device, (nbytes,), np.uint8)
                self._host, self.pointer = memory.array, memory.pointer
            else:
                self._host = pinned_array(self._device, (nbytes,), np.uint8)
        return self._host[:nbytes]
