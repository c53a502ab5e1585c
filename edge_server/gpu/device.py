"""One GPU and its primary context."""

from __future__ import annotations

import warnings
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from edge_server.errors import DeviceLost, EdgeServerError, Unavailable
from edge_server.gpu.event import Event
from edge_server.gpu.failures import Failures
from edge_server.gpu.freeing import Freeing
from edge_server.gpu.libcuda import Libcuda, version_text
from edge_server.gpu.memory import DeviceMemory, MappedMemory, host_memory
from edge_server.gpu.module import Module
from edge_server.gpu.priority_stream import PriorityStream
from edge_server.gpu.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from numpy.typing import DTypeLike, NDArray


def open_device(index: int = 0, *, on_lost: Callable[[DeviceLost], None] | None = None) -> Device:
    """The GPU `index`, its primary context retained.

    Args:
        index: as CUDA counts the GPUs that this process sees.
        on_lost: called with the first error after which only a new process helps, on the thread
            that met it, before it is raised there.

    Raises:
        Unavailable: no driver, no pycuda, no such GPU, or it cannot be used; with the remedy.
    """
    libcuda = Libcuda()
    driver = load_driver(libcuda)
    count = driver.Device.count()
    if not 0 <= index < count:
        here = "only GPU 0" if count == 1 else f"GPU 0 to {count - 1}"
        raise Unavailable(f"there is no GPU {index}: this machine has {here}")
    try:
        return Device(index, driver, libcuda, on_lost)
    except driver.Error as error:
        raise Unavailable(
            f"GPU {index} cannot be used: {error}; another process may hold it or its memory "
            "(nvidia-smi, or on a Jetson tegrastats)"
        ) from error


def load_driver(libcuda: Libcuda) -> Any:
    """The module pycuda.driver, initialised; `libcuda` proves that it can be.

    Raises:
        Unavailable: there is no pycuda, or one that does not fit the driver.
    """
    try:
        with warnings.catch_warnings():
            # A pycuda that does not fit the driver warns before it fails.
            warnings.simplefilter("ignore")
            # Only here, and only now: without libcuda its import fails.
            import pycuda.driver as driver  # noqa: PLC0415, PLR0402
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"no {error.name}: the CUDA driver is here, Python's way to it is not; "
            "build it with scripts/install_pycuda"
        ) from None
    except ImportError as error:
        raise Unavailable(
            f"pycuda does not fit this driver (CUDA {version_text(libcuda.driver_version)}): "
            f"{error}; build it anew with scripts/install_pycuda"
        ) from None
    driver.init()
    return driver


class Device:
    """One GPU: its properties, its primary context, and the objects made in it.

    Everything made here makes the context current by itself; who does several things in a row
    takes `current()` around them, which costs a call of the driver once instead of every time.
    All of it may be used and dropped on any thread.

    Attributes:
        index: as CUDA counts.
        driver: the module pycuda.driver, for this package only.
        driver_version: the newest CUDA that the driver speaks: 12060 is 12.6.
        compute_capability: (8, 7) is Orin.
        integrated: host and device memory are the same chips.
        can_map_host_memory: kernels can read pinned host memory in place.
    """

    def __init__(
        self,
        index: int,
        driver: Any,
        libcuda: Libcuda,
        on_lost: Callable[[DeviceLost], None] | None = None,
    ) -> None:
        self.index = index
        self.driver = driver
        self.libcuda = libcuda
        self.driver_version = libcuda.driver_version
        self._on_lost = on_lost
        self._failures = Failures(libcuda)
        device = driver.Device(index)
        self.name: str = device.name()
        self.compute_capability: tuple[int, int] = device.compute_capability()
        self.total_memory_bytes: int = device.total_memory()
        attribute = driver.device_attribute
        self.integrated = bool(device.get_attribute(attribute.INTEGRATED))
        self.can_map_host_memory = bool(device.get_attribute(attribute.CAN_MAP_HOST_MEMORY))
        # The primary one: TensorRT, ONNX Runtime and torch work in it too.
        self._context = device.retain_primary_context()
        self._closed = False
        self._freeing = Freeing(self)

    def __str__(self) -> str:
        return f"GPU {self.index}"

    def current(self, doing: str = "use") -> _Current:
        """A context manager in which this GPU is the current one of this thread.

        What CUDA complains of inside is raised as our error, which says what was tried: `doing`.
        """
        return _Current(self, self._context, doing)

    def stream(self) -> Stream:
        """A new order of work, independent of all others, the default stream included."""
        return Stream(self)

    def priority_stream(self, priority: Literal["max", "min"]) -> PriorityStream:
        """A stream for another library's work that goes before all other work, or after it."""
        return PriorityStream(self, priority)

    def event(self, *, timed: bool = False, spin: bool = False) -> Event:
        """A mark in a stream.

        Args:
            timed: `ms_since` another timed event works.
            spin: a thread that waits for it burns its core instead of sleeping.
        """
        return Event(self, timed=timed, spin=spin)

    def memory(self, nbytes: int) -> DeviceMemory:
        """Device memory, its content undefined.

        Raises:
            Unavailable: there is not so much.
        """
        return DeviceMemory(self, nbytes)

    def pinned(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """A host array that the GPU copies from and to on its own, while the host goes on.

        It must live, and not be written, until the copy is over.

        Raises:
            Unavailable: there is not so much memory that can be pinned.
        """
        return host_memory(self, tuple(shape), np.dtype(dtype), mapped=False).array

    def mapped(self, shape: Sequence[int], dtype: DTypeLike) -> MappedMemory:
        """As `pinned`, and kernels reach it in place, at `pointer`.

        Raises:
            Unavailable: there is not so much memory that can be pinned.
        """
        return host_memory(self, tuple(shape), np.dtype(dtype), mapped=True)

    def module(self, image: bytes) -> Module:
        """Compiled kernels: a fatbin, a cubin or PTX.

        Raises:
            Unavailable: nothing in it runs on this GPU.
        """
        return Module(self, image)

    def check(self) -> None:
        """Return when all work so far is done and nothing is broken.

        Raises:
            DeviceLost: only a new process helps.
        """
        with self.current("check"):
            self.driver.Context.synchronize()

    def failure(self, driver_text: str, doing: str) -> EdgeServerError:
        """Our error for CUDA's text while `doing`; `on_lost` gets that of a lost device."""
        error = self._failures.classify(driver_text, str(self), doing)
        if isinstance(error, DeviceLost) and self._on_lost is not None:
            self._on_lost(error)
        return error

    def call(self, doing: str, function: str, *arguments: object) -> None:
        """Call the driver itself, and let Python's other threads run meanwhile.

        pycuda lets them wait where it allocates and frees, and the driver then waits for the GPU.

        Raises:
            EdgeServerError: the driver refused; the text says what was tried: `doing`.
        """
        with self.current(doing):
            try:
                self.libcuda.call(function, *arguments)
            except OSError as error:
                raise self.failure(str(error.strerror), doing) from error

    def allocate(self, doing: str, function: str, *arguments: object) -> None:
        """As `call`; where memory is short, once more after dropped memory is freed.

        Raises:
            Unavailable: there is not so much.
        """
        try:
            self.call(doing, function, *arguments)
        except Unavailable:
            self._freeing.wait()
            self.call(doing, function, *arguments)

    def free(self, function: str, pointer: object) -> None:
        """Let the driver's `function` free `pointer`: soon, on another thread than this."""
        if not self._closed:
            self._freeing.free(function, pointer)

    def hold(self, owner: object, thing: Any) -> list[Any]:
        """Keep `thing` of pycuda's until `owner` is garbage, whatever thread finds that out.

        pycuda frees in the thread that retained the context, or where the context is current;
        elsewhere it leaks, with a warning. So it is let go of where the context is current.

        Returns:
            A list with `thing` in it; emptied by `let_go`.
        """
        box = [thing]
        weakref.finalize(owner, self.let_go, box).atexit = False
        return box

    def let_go(self, box: list[Any]) -> None:
        """Drop what `hold` keeps; a second call does nothing."""
        if not box:
            return
        if self._closed:
            # With the context, CUDA has freed all that was in it.
            box.clear()
            return
        # Memory of a lost device cannot be freed, and need not.
        with suppress(EdgeServerError), self.current("free"):
            box.clear()

    def abandon(self) -> None:
        """Take the context off this thread without the driver, which is lost and will not.

        A thread that ends with a context on pycuda's own stack ends the whole process.
        """
        self._closed = True
        with suppress(self.driver.Error):
            self._context.detach()
        # The call takes detached contexts off the stack of pycuda.
        self.driver.Context.get_current()

    def close(self) -> None:
        """Give the primary context back, outside of `current`; nothing made here may be used
        afterwards."""
        if not self._closed:
            self._closed = True
            self._freeing.close()
            with suppress(self.driver.Error):
                # pycuda detaches in one thread only, and where the context is current.
                self._context.push()
                self._context.detach()
                # pycuda forgets the context, but leaves it on the driver's own stack.
                self.libcuda.pop_context()


class _Current:
    """See `Device.current`."""

    __slots__ = ("_context", "_device", "_doing", "_entered")

    def __init__(self, device: Device, context: Any, doing: str) -> None:
        self._device = device
        self._context = context
        self._doing = doing
        self._entered = False

    def __enter__(self) -> None:
        # pycuda knows without asking the driver; another GPU may have come in between.
        if self._device.driver.Context.get_current() != self._context:
            try:
                self._context.push()
            except self._device.driver.Error as error:
                raise self._ours(error) from error
            self._entered = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        driver_error = self._device.driver.Error
        if isinstance(error, driver_error):
            # pycuda's frames would keep its objects alive, until a thread without the context
            # drops the error.
            error.__traceback__ = None
        del traceback
        # The first error, as it says more than one that follows from it.
        ours = self._ours(error) if isinstance(error, driver_error) else None
        if self._entered:
            try:
                self._device.driver.Context.pop()
            except driver_error as pop_error:
                pop_failure = self._ours(pop_error)
                if isinstance(pop_failure, DeviceLost):
                    self._device.abandon()
                if error is None:
                    error, ours = pop_error, pop_failure
        if ours is not None:
            raise ours from error

    def _ours(self, error: BaseException) -> EdgeServerError:
        return self._device.failure(str(error), self._doing)
