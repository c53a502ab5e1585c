"""Streams and events of a GPU, the kernels that streams launch, and CUDA graphs: work of a stream,
recorded once and launched in one call.

pycuda has no graphs, so the driver is called by ctypes, on pycuda's streams by their handles.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from edge_server.errors import EdgeServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from edge_server.gpu.device import Device, Libcuda

_NON_BLOCKING = 1


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
        flags = device.driver.event_flags
        chosen = int(flags.DISABLE_TIMING) | (0 if spin else int(flags.BLOCKING_SYNC))
        with device.current("make an event"):
            self._box = device.hold(self, device.driver.Event(chosen))

    def record(self, stream: Stream) -> GpuEvent:
        """Record the event behind the work that `stream` holds now; return the event."""
        with self.device.current("record an event"):
            self._box[0].record(stream.raw)
        self.stream = stream
        return self

    def wait(self) -> None:
        """Block this thread until the event is reached."""
        with self.device.current("wait for an event"):
            self._box[0].synchronize()

    def reached(self) -> bool:
        """Return whether the event is reached; never waits."""
        with self.device.current("query an event"):
            done: bool = self._box[0].query()
        return done

    @property
    def raw(self) -> Any:
        return self._box[0]


class Stream:
    """Queues copies, fills, kernels and waits, and returns before they are done.

    Work is ordered within a stream only; events order work between
    streams.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        with device.current("make a stream"):
            self._box = device.hold(self, device.driver.Stream(_NON_BLOCKING))
            self.handle: int = self._box[0].handle
        self._fence = GpuEvent(device)

    def record(self, event: GpuEvent | None = None) -> GpuEvent:
        """Record `event`, or a new one, behind all work that this stream holds now."""
        return (event or GpuEvent(self.device)).record(self)

    def wait(self, event: GpuEvent) -> None:
        """Order the next work on this stream after `event`; this thread does not wait."""
        with self.device.current("wait for another stream"):
            self._box[0].wait_for_event(event.raw)

    def synchronize(self) -> None:
        """Return when all queued work is done; the thread sleeps meanwhile."""
        with self.device.current("synchronize"):
            # Wait by an event: a thread that waits for a stream busy-waits.
            self._fence.raw.record(self._box[0])
            self._fence.raw.synchronize()

    def to_device(self, destination: OnDevice, source: NDArray[Any]) -> None:
        """Copy the whole of `source` to the front of `destination`.

        Args:
            destination: device memory of at least the size of `source`.
            source: C-contiguous; pinned memory must live unchanged until the copy is done, any
                other memory is read before this returns.
        """
        _check_fits(source.nbytes, destination.nbytes)
        _check_contiguous(source)
        with self.device.current("copy to the device"):
            self.device.driver.memcpy_htod_async(destination.pointer, source, self._box[0])

    def to_host(self, destination: NDArray[Any], source: OnDevice) -> None:
        """Fill the whole of `destination` from the front of `source`.

        Args:
            destination: C-contiguous, no larger than `source`; pinned memory must live, and may be
                read once the copy is done, any other memory may be read when this returns.
        """
        _check_fits(destination.nbytes, source.nbytes)
        _check_contiguous(destination)
        with self.device.current("copy to the host"):
            self.device.driver.memcpy_dtoh_async(destination, source.pointer, self._box[0])

    def copy(self, destination: OnDevice, source: OnDevice) -> None:
        """Copy the whole of `source` to the front of `destination`, on the device."""
        _check_fits(source.nbytes, destination.nbytes)
        with self.device.current("copy on the device"):
            self.device.driver.memcpy_dtod_async(
                destination.pointer, source.pointer, source.nbytes, self._box[0]
            )

    def fill(self, destination: OnDevice, byte: int = 0) -> None:
        with self.device.current("fill memory"):
            self.device.driver.memset_d8_async(
                destination.pointer, byte, destination.nbytes, self._box[0]
            )

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        *arguments: int | float | bytes | OnDevice,
    ) -> None:
        """Launch `kernel` on `grid` blocks of `block` threads.

        Args:
            grid: x, y and z; missing sizes are 1.
            block: likewise.
            arguments: in the order of the kernel's signature: numbers, bytes of a struct, or device
                memory, passed as its pointer.
        """
        with self.device.current(f"run kernel {kernel.name}"):
            kernel.raw.prepared_async_call(
                (*grid, 1, 1)[:3],
                (*block, 1, 1)[:3],
                self._box[0],
                *(getattr(argument, "pointer", argument) for argument in arguments),
            )

    def wait_for_handle(self, handle: int) -> None:
        """Order the next work after all work that another library's stream, a cudaStream_t,
        holds now."""
        self._tie(self.handle, handle)

    def hold_back_handle(self, handle: int) -> None:
        """Order the next work of another library's stream after all work that this stream holds."""
        self._tie(handle, self.handle)

    def _tie(self, waiting: int, awaited: int) -> None:
        doing = "wait across libraries"
        with self.device.current(doing):
            try:
                self.device.libcuda.make_wait(waiting, awaited)
            except OSError as error:
                raise self.device.failure(str(error.strerror), doing) from error

    @property
    def raw(self) -> Any:
        return self._box[0]


class PriorityStream:
    """A stream for another library, which uses the raw `handle`; pycuda's streams all have the same
    priority. It is destroyed soon after garbage collection."""

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
        weakref.finalize(self, device.free, "cuStreamDestroy_v2", self._handle).atexit = False

    @property
    def handle(self) -> int:
        return self._handle.value or 0

    def begin(self, stream: Stream) -> None:
        """Order the next work on this stream after all work that `stream` holds."""
        stream.hold_back_handle(self.handle)

    def end(self, stream: Stream) -> None:
        """Order the next work of `stream` after all work on this stream."""
        stream.wait_for_handle(self.handle)

    def _call(self, name: str, *arguments: object) -> None:
        self._device.call("use a stream with a priority", name, *arguments)


class Kernel:
    """One function of a module; run it with `Stream.launch`."""

    def __init__(self, name: str, device: Device, function: Any) -> None:
        self.name = name
        # pycuda's function keeps pycuda's module loaded, so that both are released in the context.
        self._box = device.hold(self, function)

    @property
    def raw(self) -> Any:
        return self._box[0]


class Module:
    """A loaded kernel image: a fatbin, a cubin or PTX."""

    def __init__(self, device: Device, image: bytes) -> None:
        self.device = device
        with device.current("load kernels"):
            self._box = device.hold(self, device.driver.module_from_buffer(image))

    def kernel(self, name: str, signature: str) -> Kernel:
        """Return the `extern "C"` function `name`.

        Args:
            signature: one letter per argument, as in `struct`: `P` pointer, `i` int32, `I` uint32,
                `f` float, `q` int64; `48s` is a struct of 48 bytes.
        """
        with self.device.current(f"find kernel {name}"):
            function = self._box[0].get_function(name)
            function.prepare(signature)
        return Kernel(name, self.device, function)


def _check_fits(nbytes: int, room_bytes: int) -> None:
    if nbytes > room_bytes:
        raise ValueError(f"{nbytes} bytes do not fit into {room_bytes}")


def _check_contiguous(array: NDArray[Any]) -> None:
    # pycuda would also accept Fortran order, and copy the bytes in memory order.
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} is not C-contiguous")


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
