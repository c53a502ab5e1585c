"""A stream of higher or lower priority than the default."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from edge_server.gpu.device import Device
    from edge_server.gpu.stream import Stream

_NON_BLOCKING = 1


class PriorityStream:
    """A stream for another library, which uses the raw `handle`; pycuda's streams all have the same
    priority.

    Raises:
        EdgeServerError: the driver cannot make the stream.
    """

    def __init__(self, device: Device, priority: Literal["max", "min"]) -> None:
        self._device = device
        self._handle = ctypes.c_void_p()
        least, greatest = ctypes.c_int(), ctypes.c_int()
        self._call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        self._call(
            "cuStreamCreateWithPriority",
            ctypes.byref(self._handle),
            ctypes.c_uint(_NON_BLOCKING),
            greatest if priority == "max" else least,
        )

    @property
    def handle(self) -> int:
        return self._handle.value or 0

    def begin(self, stream: Stream) -> None:
        """Order the next work on this stream after all work that `stream` holds."""
        stream.hold_back_handle(self.handle)

    def end(self, stream: Stream) -> None:
        """Order the next work of `stream` after all work on this stream."""
        stream.wait_for_handle(self.handle)

    def close(self) -> None:
        """Destroy the stream; no work may run on it any more."""
        if self._handle:
            handle, self._handle = self._handle, ctypes.c_void_p()
            self._call("cuStreamDestroy_v2", handle)

    def _call(self, name: str, *arguments: object) -> None:
        self._device.call("use a stream with a priority", name, *arguments)
