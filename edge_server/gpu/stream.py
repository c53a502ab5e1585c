"""Streams and events of a GPU, and the kernels and CUDA graphs that streams launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from edge_server.gpu.device import Device

_NON_BLOCKING = 1
# cuda.h, CUevent_flags.
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2
# CU_LAUNCH_PARAM_END, _BUFFER_POINTER and _BUFFER_SIZE.
_END, _BUFFER_POINTER, _BUFFER_SIZE = None, 1, 2
# In the stricter modes a free on another thread during the capture invalidates the graph.
_CAPTURE_RELAXED = 2

Priority = Literal["", "max", "min"]


class OnDevice(Protocol):
    """Memory on a device: CudaArray, DeviceMemory, MappedMemory."""

    @property
    def pointer(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class GpuEvent:
    """A mark that streams record, and that streams and threads wait for; made in a `Device`.

    The event stands for its last record; an event never recorded counts as reached.

    Args:
        spin: a thread that waits for the event busy-waits instead of sleeping.
    """

    def __init__(self, device: Device, *, spin: bool = False) -> None:
        self.device = device
        self.stream: Stream | None = None
        flags = _DISABLE_TIMING | (0 if spin else _BLOCKING_SYNC)
        self.handle, _ = device.make(
            self, "make an event", "cuEventCreate", "cuEventDestroy_v2", flags
        )

    def record(self, stream: Stream) -> GpuEvent:
        """Record the event behind the work that `stream` holds now; return the event."""
        self.device.call("record an event", "cuEventRecord", self.handle, stream.handle)
        self.stream = stream
        return self

    def wait(self) -> None:
        """Block this thread until the event is reached."""
        self.device.call("wait for an event", "cuEventSynchronize", self.handle)

    def reached(self) -> bool:
        return self.device.ready(self.handle)


class Stream:
    """Queues copies, fills, kernels and waits, and returns before they are done.

    Work is ordered within a stream only; events order work between streams.

    Args:
        priority: of its work among all work of the GPU; empty is the default.

    Attributes:
        handle: the CUstream, for other libraries.
    """

    def __init__(self, device: Device, priority: Priority = "") -> None:
        self.device = device
        least, greatest = ctypes.c_int(), ctypes.c_int()
        doing = "make a stream"
        device.call(
            doing, "cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest)
        )
        number = {"": 0, "min": least.value, "max": greatest.value}[priority]
        made_by, freed_by = "cuStreamCreateWithPriority", "cuStreamDestroy_v2"
        self.handle, _ = device.make(self, doing, made_by, freed_by, _NON_BLOCKING, number)
        self._fence = GpuEvent(device)

    def record(self, event: GpuEvent | None = None) -> GpuEvent:
        """Record `event`, or a new one, behind all work that this stream holds now."""
        return (event or GpuEvent(self.device)).record(self)

    def wait(self, event: GpuEvent) -> None:
        """Order the next work on this stream after `event`; this thread does not wait."""
        self.device.call(
            "wait for another stream", "cuStreamWaitEvent", self.handle, event.handle, 0
        )

    def synchronize(self) -> None:
        """Return when all queued work is done; the thread sleeps until then."""
        # Wait by an event: a thread that waits for a stream busy-waits.
        fence, doing = self._fence.handle, "synchronize"
        with self.device:
            self.device.call(doing, "cuEventRecord", fence, self.handle)
            self.device.call(doing, "cuEventSynchronize", fence)

    def to_device(self, destination: OnDevice, source: NDArray[Any]) -> None:
        """Copy the whole of `source` to the front of `destination`.

        Args:
            destination: device memory of at least the size of `source`.
            source: C-contiguous; pinned memory must live unchanged until the copy is done, any
                other memory is read before this returns.
        """
        _check(source.nbytes, destination.nbytes, source)
        to, begin = destination.pointer, source.ctypes.data
        name = "cuMemcpyHtoDAsync_v2"
        self.device.call("copy to the device", name, to, begin, source.nbytes, self.handle)

    def to_host(self, destination: NDArray[Any], source: OnDevice) -> None:
        """Fill the whole of `destination` from the front of `source`.

        Args:
            destination: C-contiguous, no larger than `source`; pinned memory must live, and may be
                read once the copy is done, any other memory may be read when this returns.
        """
        _check(destination.nbytes, source.nbytes, destination)
        to, begin = destination.ctypes.data, source.pointer
        name = "cuMemcpyDtoHAsync_v2"
        self.device.call("copy to the host", name, to, begin, destination.nbytes, self.handle)

    def copy(self, destination: OnDevice, source: OnDevice) -> None:
        """Copy the whole of `source` to the front of `destination`, on the device."""
        _check(source.nbytes, destination.nbytes)
        to, begin = destination.pointer, source.pointer
        name = "cuMemcpyDtoDAsync_v2"
        self.device.call("copy on the device", name, to, begin, source.nbytes, self.handle)

    def fill(self, destination: OnDevice, byte: int = 0) -> None:
        to, nbytes = destination.pointer, destination.nbytes
        self.device.call("fill memory", "cuMemsetD8Async", to, byte, nbytes, self.handle)

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: bytes,
    ) -> None:
        """Launch `kernel` on `grid` blocks of `block` threads.

        Args:
            arguments: one behind the other, each aligned as in C.
        """
        size = ctypes.c_size_t(len(arguments))
        extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER,
            ctypes.cast(ctypes.c_char_p(arguments), ctypes.c_void_p),
            _BUFFER_SIZE,
            ctypes.addressof(size),
            _END,
        )
        shape = (*grid, *block)
        self.device.call(
            f"run kernel {kernel.name}",
            "cuLaunchKernel",
            *(kernel.handle, *shape, 0, self.handle, None, extra),
        )


class Module:
    """A loaded kernel image: a fatbin, a cubin or PTX."""

    def __init__(self, device: Device, image: bytes) -> None:
        self._device = device
        made_by, freed_by = "cuModuleLoadData", "cuModuleUnload"
        self._handle, _ = device.make(self, "load kernels", made_by, freed_by, image)

    def kernel(self, name: str) -> Kernel:
        """Return the `extern "C"` function `name`."""
        found = ctypes.c_void_p()
        self._device.call(
            f"find kernel {name}",
            "cuModuleGetFunction",
            *(ctypes.byref(found), self._handle, name.encode()),
        )
        return Kernel(name, found.value or 0, self)


@dataclass(frozen=True)
class Kernel:
    """One function of a module; run it with `Stream.launch`. The module is unloaded with its last
    kernel."""

    name: str
    handle: int
    module: Module


def _check(nbytes: int, room_bytes: int, array: NDArray[Any] | None = None) -> None:
    if nbytes > room_bytes:
        raise ValueError(f"{nbytes} bytes do not fit into {room_bytes}")
    if array is not None and not array.flags.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} is not C-contiguous")


class Graph:
    """The work that `work` queues on `stream`, recorded without running it.

    Its memory must stay allocated, at the same address, as long as the graph lives.

    Args:
        work: queues on `stream` only, never waits on the host and allocates nothing. It has run
            once without being recorded, so that libraries are set up.
    """

    def __init__(self, stream: Stream, work: Callable[[], None]) -> None:
        self.device = device = stream.device
        doing, recorded = "record a graph", ctypes.c_void_p()
        end = "cuStreamEndCapture", stream.handle, ctypes.byref(recorded)
        with device:
            device.call(doing, "cuStreamBeginCapture_v2", stream.handle, _CAPTURE_RELAXED)
            try:
                try:
                    work()
                except BaseException:
                    # A stream left in capture mode is unusable.
                    device.libcuda.result(*end)
                    raise
                device.call(doing, *end)
                made_by, freed_by = "cuGraphInstantiateWithFlags", "cuGraphExecDestroy"
                self._handle, self._free = device.make(self, doing, made_by, freed_by, recorded, 0)
            finally:
                if recorded.value:
                    device.libcuda.result("cuGraphDestroy", recorded)

    def launch(self, stream: Stream) -> None:
        """Launch the recorded work on `stream`; return before it is done."""
        self.device.call("launch a graph", "cuGraphLaunch", self._handle, stream.handle)

    def close(self) -> None:
        """Destroy the graph; launched work still runs."""
        self._free()
