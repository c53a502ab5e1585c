"""CUDA graphs: work of a stream, recorded once and launched in one call.

pycuda has none, so the driver is called by ctypes, on pycuda's streams by their handles.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.errors import EdgeServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edge_server.gpu.device import Device, Libcuda
    from edge_server.gpu.stream import Stream

_HANDLE, _RETURNED = ctypes.c_void_p, ctypes.byref
# The driver's functions, as cuda.h has declared them since CUDA 11.4: what each parameter is.
PROTOTYPES: Mapping[str, tuple[Callable[..., object], ...]] = MappingProxyType(
    {
        "cuStreamBeginCapture_v2": (_HANDLE, ctypes.c_int),
        "cuStreamEndCapture": (_HANDLE, _RETURNED),
        "cuGraphInstantiateWithFlags": (_RETURNED, _HANDLE, ctypes.c_ulonglong),
        "cuGraphLaunch": (_HANDLE, _HANDLE),
        "cuGraphExecDestroy": (_HANDLE,),
        "cuGraphDestroy": (_HANDLE,),
    }
)
# cuda.h, CUstreamCaptureMode. In the stricter modes another thread that allocates or frees during
# the capture invalidates the graph.
_RELAXED = 2


def record_graph(stream: Stream, work: Callable[[], None]) -> Graph:
    """Record the work that `work` queues on `stream`, without running it.

    Args:
        work: queues on `stream` only, never waits on the host and allocates nothing. It has run
            once without being recorded, so that libraries are set up.

    Raises:
        InternalError: CUDA cannot record this work.
        EdgeServerError: raised by `work`.
    """
    device = stream.device
    doing = "record a graph"
    recorded, executable = ctypes.c_void_p(), ctypes.c_void_p()
    with device.current(doing):
        _call(device, doing, "cuStreamBeginCapture_v2", stream.handle, _RELAXED)
        try:
            try:
                work()
            except BaseException:
                # A stream left in capture mode is unusable.
                with suppress(EdgeServerError):
                    _call(device, doing, "cuStreamEndCapture", stream.handle, recorded)
                raise
            _call(device, doing, "cuStreamEndCapture", stream.handle, recorded)
            _call(device, doing, "cuGraphInstantiateWithFlags", executable, recorded.value, 0)
        finally:
            if recorded.value:
                _call(device, doing, "cuGraphDestroy", recorded.value)
    return Graph(device, executable.value or 0)


class Graph:
    """A recorded graph; made by `record_graph`. Its memory must stay allocated, at the same
    address, as long as the graph lives."""

    def __init__(self, device: Device, handle: int) -> None:
        self.device = device
        self._box = device.hold(self, _Executable(device.libcuda, handle))

    def launch(self, stream: Stream) -> None:
        """Launch the recorded work on `stream`; return before it is done."""
        handle = self._box[0].handle
        _call(self.device, "launch a graph", "cuGraphLaunch", handle, stream.handle)

    def close(self) -> None:
        """Destroy the graph now; launched work still runs."""
        self.device.let_go(self._box)


class _Executable:
    """The executable graph, destroyed with its last reference."""

    def __init__(self, libcuda: Libcuda, handle: int) -> None:
        self.handle = handle
        self._libcuda = libcuda

    def __del__(self) -> None:
        # A lost device refuses, and frees everything with the process.
        with suppress(OSError):
            self._libcuda.call("cuGraphExecDestroy", *_arguments("cuGraphExecDestroy", self.handle))


def _call(device: Device, doing: str, name: str, *values: object) -> None:
    device.call(doing, name, *_arguments(name, *values))


def _arguments(name: str, *values: object) -> list[object]:
    return [kind(value) for kind, value in zip(PROTOTYPES[name], values, strict=True)]
