"""The GPUs of this process and their contexts, and the driver library by ctypes: checks that
must precede the import of pycuda, calls that pycuda lacks, its errors, and a GPU without pycuda."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
import warnings
import weakref
from contextlib import suppress
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from edge_server.board.installation import remedy
from edge_server.errors import DeviceLost, EdgeServerError, InternalError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import TracebackType

    from numpy.typing import NDArray

# The kernels that are shipped were compiled for this driver or newer ones.
OLDEST_DRIVER = 11040

# On a Jetson, cuInit returns 100, 801 or 999, depending on the JetPack, to a user who may not open
# the device files.
_GROUPS = "on a Jetson add it to the groups video and render"
# CUresults of cuInit on a machine without a usable GPU, and the remedy for each.
_INIT_REMEDIES = {
    34: "this is the toolkit's empty stub, not a driver; take its folder out of LD_LIBRARY_PATH",
    100: f"no GPU, or this user may not open it; {_GROUPS}",
    101: "CUDA_VISIBLE_DEVICES names no GPU that is here",
    801: f"this user may not open the GPU's device files; {_GROUPS}",
    803: "the driver's library and its kernel module differ in version; restart the machine",
    804: "this driver is not supported on this GPU; install a newer one",
    # In a service, the driver's own setuid helper cannot make the device files.
    999: f"this user may not open the driver ({_GROUPS}), its /dev/nvidia-uvm is missing (sudo "
    "nvidia-modprobe -u -c 0), or its state is broken; restart the machine",
}

OUT_OF_MEMORY = 2
_ANEW = "compile them with its own toolkit (scripts/build_kernels)"
# CUresults of a kernel image that the driver refuses, and the remedy for each.
KERNEL_REMEDIES = MappingProxyType(
    {
        200: f"the file of the kernels is damaged, or of a kind that this driver does not know; "
        f"reinstall edge-server, or {_ANEW}",
        209: f"they were not compiled for this GPU and driver; {_ANEW}",
        218: f"this driver cannot compile their PTX; {_ANEW}",
        221: "the driver's compiler, libnvidia-ptxjitcompiler.so.1, is missing; reinstall the "
        "driver (on a Jetson: apt install --reinstall nvidia-l4t-cuda, in a container: "
        "--runtime nvidia)",
        222: f"they were not compiled for this GPU and driver; {_ANEW}",
        223: f"compiling PTX is switched off; take CUDA_DISABLE_PTX_JIT out of the environment, or "
        f"{_ANEW}",
    }
)
# Sticky CUresults, after which every call in the context fails the same way: memory errors of the
# hardware, a kernel that crashed or timed out, a destroyed context, and "unknown".
STICKY = (214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 999)

_LIBRARY = "libcuda.so.1"
# cuda.h, CUdevice_attribute.
_MULTIPROCESSORS = 16
_INTEGRATED = 18
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76


class NoDriver(Unavailable):
    """The driver does not start, or is too old; `code` is the result of cuInit, None without a
    driver."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


class Libcuda:
    """The loaded and initialised driver library.

    Attributes:
        driver_version: the newest CUDA version that the driver supports: 12060 is 12.6.

    Raises:
        NoDriver: no driver is installed, the driver has no usable GPU, or the driver is too old;
            the text names the remedy.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            # One that it needs may be missing, or it may not be readable.
            why = str(error)
            if why.startswith(f"{_LIBRARY}: cannot open shared object file: No such file"):
                why = f"{_LIBRARY} is not on this machine"
            raise NoDriver(
                f"no CUDA driver: {why}; install NVIDIA's driver "
                "(on a Jetson: apt install nvidia-l4t-cuda)"
            ) from None
        code: int = self._library.cuInit(0)
        if code:
            remedy = _INIT_REMEDIES.get(code, "see the kernel's log for the driver's messages")
            raise NoDriver(
                f"no CUDA device: cuInit returns {code} ({self.error_text(code)}): {remedy}", code
            )
        version = ctypes.c_int()
        self._library.cuDriverGetVersion(ctypes.byref(version))
        self.driver_version = version.value
        if self.driver_version < OLDEST_DRIVER:
            raise NoDriver(
                f"the CUDA driver is too old: it speaks CUDA {version_text(self.driver_version)}, "
                f"{version_text(OLDEST_DRIVER)} is needed; install a newer driver or JetPack",
                code,
            )

    def error_text(self, code: int) -> str:
        """Return the driver's text for the error `code`, as at the end of pycuda's messages;
        empty for a code unknown to the driver."""
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(code, ctypes.byref(text))
        return (text.value or b"").decode()

    @property
    def device_count(self) -> int:
        count = ctypes.c_int()
        self._library.cuDeviceGetCount(ctypes.byref(count))
        return count.value

    def pop_context(self) -> None:
        self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def make_wait(self, waiting: int, awaited: int) -> None:
        """Order later work of the stream `waiting` after the current work of the stream `awaited`;
        both are raw handles, and the context is current."""
        event = ctypes.c_void_p()
        without_timing = 2
        self.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(without_timing))
        try:
            self.call("cuEventRecord", event, ctypes.c_void_p(awaited))
            self.call("cuStreamWaitEvent", ctypes.c_void_p(waiting), event, ctypes.c_uint(0))
        finally:
            # The driver keeps the event's state as long as the wait needs it.
            self._library.cuEventDestroy_v2(event)

    def call(self, name: str, *arguments: object) -> None:
        """Call the driver's function `name`.

        Raises:
            OSError: the driver refused; with its code and text.
        """
        code: int = getattr(self._library, name)(*arguments)
        if code:
            # The name in the driver's header, and in pycuda.
            name = name.removesuffix("_v2")
            raise OSError(code, f"{name} failed: {self.error_text(code)}")


def version_text(version: int) -> str:
    """12060 → "12.6"."""
    return f"{version // 1000}.{version % 1000 // 10}"


class Failures:
    """Classifies the errors of one driver by the driver's own texts.

    pycuda reports no code, only a text that ends in the driver's text for the code
    (`cuStreamSynchronize failed: unspecified launch failure`).
    """

    def __init__(self, libcuda: Libcuda) -> None:
        self._sticky = {text: code for code in STICKY if (text := libcuda.error_text(code))}
        self._out_of_memory = libcuda.error_text(OUT_OF_MEMORY)
        self._kernels = {
            text: remedy
            for code, remedy in KERNEL_REMEDIES.items()
            if (text := libcuda.error_text(code))
        }

    def classify(self, driver_text: str, gpu: str, doing: str) -> EdgeServerError:
        """Return our error for pycuda's `driver_text`.

        Args:
            doing: the attempted action, as part of a sentence: `copy to the device`.

        Returns:
            DeviceLost when only a new process can recover, Unavailable where memory is short or the
            driver refuses the kernels, InternalError otherwise.
        """
        for text, code in self._sticky.items():
            if text in driver_text:
                return DeviceLost(
                    f"{gpu}: {doing}: {driver_text} (CUDA error {code}): "
                    "the process must be restarted"
                )
        if self._out_of_memory in driver_text:
            return Unavailable(
                f"{gpu}: {doing}: {driver_text}: fewer models, instances or smaller batches fit, "
                "or another process must give memory back"
            )
        for text, kernel_remedy in self._kernels.items():
            if text in driver_text:
                return Unavailable(f"{gpu}: {doing}: {driver_text}: {kernel_remedy}")
        return InternalError(f"{gpu}: {doing}: {driver_text}")


class BareGpu:
    """A GPU without pycuda, for processes that may crash; TensorRT uses its primary context too.

    Its memory is freed with the process.

    Args:
        index: in CUDA's order of the GPUs visible to this process.
    """

    def __init__(self, index: int = 0) -> None:
        self._cuda = Libcuda()
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), index)
        self._buffers: dict[str, tuple[ctypes.c_uint64, int]] = {}

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, len(text), self._device)
        return text.value.decode(errors="replace")

    @property
    def compute_capability(self) -> str:
        return f"{self._attribute(_CAPABILITY_MAJOR)}.{self._attribute(_CAPABILITY_MINOR)}"

    @property
    def multiprocessors(self) -> int:
        return self._attribute(_MULTIPROCESSORS)

    @property
    def integrated(self) -> bool:
        return bool(self._attribute(_INTEGRATED))

    @property
    def memory_bytes(self) -> int:
        size = ctypes.c_size_t()
        self._call("cuDeviceTotalMem_v2", ctypes.byref(size), self._device)
        return size.value

    def enter(self) -> None:
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxPushCurrent_v2", context)

    def put(self, name: str, array: NDArray[Any]) -> int:
        """Copy `array` to the device and return its address; the next array of the same name
        replaces it."""
        if name not in self._buffers or self._buffers[name][1] != array.nbytes:
            address = ctypes.c_uint64()
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(array.nbytes))
            self._buffers[name] = address, array.nbytes
        address, _ = self._buffers[name]
        source = ctypes.c_void_p(array.ctypes.data)
        self._call("cuMemcpyHtoD_v2", address, source, ctypes.c_size_t(array.nbytes))
        return address.value

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            self._cuda.call(name, *arguments)
        except OSError as error:
            raise Unavailable(f"the CUDA driver: {error.strerror} ({error.errno})") from error


def driver_facts() -> dict[str, Any]:
    """Return what `doctor` shows of the driver: `init`, the result of cuInit for the user of this
    process, `uid`; its `version` and its `devices`, or `error`; `missing` without a driver. Of one
    that is too old `init` is None.

    Raises:
        Unavailable: the driver fails after its start.
    """
    facts: dict[str, Any] = {"init": 0, "uid": os.geteuid()}
    try:
        libcuda = Libcuda()
    except NoDriver as error:
        if error.code is None:
            return {"missing": True, "error": str(error)}
        return facts | {"init": error.code or None, "error": str(error)}
    gpus = [BareGpu(index) for index in range(libcuda.device_count)]
    facts["version"] = version_text(libcuda.driver_version)
    facts["devices"] = [
        {
            "name": gpu.name,
            "compute_capability": gpu.compute_capability,
            "memory_bytes": gpu.memory_bytes,
            "integrated": gpu.integrated,
        }
        for gpu in gpus
    ]
    return facts


# The time limit of `close` for the last frees: the GPU may be stuck.
_CLOSING_S = 5.0


def open_device(index: int = 0, *, on_lost: Callable[[DeviceLost], None] | None = None) -> Device:
    """Open GPU `index` and retain its primary context.

    Args:
        index: in CUDA's order of the GPUs visible to this process.
        on_lost: called with the first error after which only a new process can recover, on the
            thread where the error occurred, before it is raised there.

    Raises:
        Unavailable: no driver, no pycuda, no such GPU, or the GPU is unusable; the text names the
            remedy.
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
    """Import and initialise pycuda.driver; `libcuda` proves that the driver is usable.

    Raises:
        Unavailable: pycuda is not installed, or does not fit the driver.
    """
    try:
        with warnings.catch_warnings():
            # A pycuda that does not fit the driver warns before it fails.
            warnings.simplefilter("ignore")
            # Imported late: without libcuda the import fails.
            import pycuda.driver as driver  # noqa: PLC0415, PLR0402
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"no {error.name}: the CUDA driver is here, Python's way to it is not; "
            f"{remedy('pycuda')}"
        ) from None
    except ImportError as error:
        raise Unavailable(
            f"pycuda does not fit this driver (CUDA {version_text(libcuda.driver_version)}): "
            f"{error}; {remedy('pycuda')}"
        ) from None
    driver.init()
    return driver


class Device:
    """One GPU: its properties and its primary context, in which streams, events, memory and kernels
    are made.

    Every such object makes the context current by itself; a caller with several operations in
    a row wraps them in `current()`, which switches the context once instead of every time. All
    objects may be used and dropped on any thread.

    Attributes:
        driver: the module pycuda.driver, for this package only.
        driver_version: the newest CUDA version that the driver supports: 12060 is 12.6.
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
        # The primary context: TensorRT, ONNX Runtime and torch work in it too.
        self._context = device.retain_primary_context()
        self._closed = False
        # Boxes of `hold`, by their id: `close` empties those that no finalizer has emptied yet.
        self._held: dict[int, list[Any]] = {}
        self._freeing = _Freeing(self)

    def __str__(self) -> str:
        return f"GPU {self.index}"

    def current(self, doing: str = "use") -> _Current:
        """Return a context manager that makes this GPU current on this thread.

        A CUDA error inside is raised as our error; its text names the attempted action, `doing`.
        """
        return _Current(self, self._context, doing)

    def check(self) -> None:
        """Return when all work so far is done without an error.

        Raises:
            DeviceLost: only a new process can recover.
        """
        with self.current("check"):
            self.driver.Context.synchronize()

    def failure(self, driver_text: str, doing: str) -> EdgeServerError:
        """Return our error for CUDA's text while `doing`; `on_lost` gets the error of a lost
        device."""
        error = self._failures.classify(driver_text, str(self), doing)
        if isinstance(error, DeviceLost) and self._on_lost is not None:
            self._on_lost(error)
        return error

    def call(self, doing: str, function: str, *arguments: object) -> None:
        """Call the driver with the GIL released.

        pycuda holds the GIL where it allocates and frees, and the driver then waits for the GPU.

        Raises:
            EdgeServerError: the driver refused; the text names the attempted action, `doing`.
        """
        with self.current(doing):
            try:
                self.libcuda.call(function, *arguments)
            except OSError as error:
                raise self.failure(str(error.strerror), doing) from error

    def allocate(self, doing: str, function: str, *arguments: object) -> None:
        """Call the driver; where memory is short, call it again after dropped memory is freed.

        Raises:
            Unavailable: the device has too little free memory.
        """
        try:
            self.call(doing, function, *arguments)
        except Unavailable:
            self._freeing.wait()
            self.call(doing, function, *arguments)

    def free(self, function: str, pointer: object) -> None:
        """Queue `pointer` for the driver's `function`, which frees it soon, on another thread."""
        if not self._closed:
            self._freeing.free(function, pointer)

    def hold(self, owner: object, thing: Any) -> list[Any]:
        """Keep pycuda's `thing` until `owner` is garbage-collected, on any thread, or `close`.

        pycuda frees on the thread that retained the context, or where the context is current;
        elsewhere the object leaks, with a warning. So `thing` is released where the context is
        current.

        Returns:
            A list that holds `thing`; `let_go` empties it.
        """
        box = [thing]
        self._held[id(box)] = box
        weakref.finalize(owner, self.let_go, box).atexit = False
        return box

    def let_go(self, box: list[Any]) -> None:
        """Release the object that `hold` keeps; a second call does nothing."""
        self._held.pop(id(box), None)
        if not box:
            return
        if self._closed:
            # Abandoned: CUDA frees everything in the context together with it.
            box.clear()
            return
        # The memory of a lost device cannot be freed, and need not be.
        with suppress(EdgeServerError), self.current("free"):
            box.clear()

    def abandon(self) -> None:
        """Remove the context from this thread without a driver call, which a lost driver would
        refuse.

        A thread that ends with a context on pycuda's own stack ends the whole process.
        """
        with suppress(self.driver.Error):
            self._context.detach()
        self._closed = True
        self._freeing.end()
        # The call removes detached contexts from pycuda's stack.
        self.driver.Context.get_current()

    def close(self) -> None:
        """Free what is held, then release the primary context, outside of `current`; no object made
        in it may be used afterwards."""
        if self._closed:
            return
        self._freeing.close()
        try:
            self._context.push()
        except self.driver.Error:
            self.abandon()
            return
        # Before the context goes: an owner that a garbage collection on another thread drops later
        # finds an empty box, whatever that thread's context is.
        for box in list(self._held.values()):
            box.clear()
        self._held.clear()
        self._closed = True
        with suppress(self.driver.Error):
            # pycuda detaches on one thread only, and where the context is current.
            self._context.detach()
            # pycuda drops the context, but leaves it on the driver's own stack.
            self.libcuda.pop_context()


class _Current:
    __slots__ = ("_context", "_device", "_doing", "_entered")

    def __init__(self, device: Device, context: Any, doing: str) -> None:
        self._device = device
        self._context = context
        self._doing = doing
        self._entered = False

    def __enter__(self) -> None:
        # pycuda knows it without a driver call; another GPU may have become current in between.
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
            # pycuda's frames would keep its objects alive until a thread without the context drops
            # the error.
            error.__traceback__ = None
        del traceback
        # The first error names the cause of those that follow.
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
            try:
                raise ours from error
            finally:
                # Its traceback holds this frame: a cycle would keep the callers' streams and memory
                # until the garbage collector runs, on whichever thread that is.
                del ours, error

    def _ours(self, error: BaseException) -> EdgeServerError:
        return self._device.failure(str(error), self._doing)


class _Freeing:
    """Frees memory on its own thread, so that the thread that drops the memory never waits.

    The driver frees only once the GPU is idle. Freed on a request's thread, the memory would block
    that thread and, as pycuda holds the GIL meanwhile, every other thread.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        # The only queue with a reentrant put: the garbage collector runs finalizers in the middle
        # of any call, even of a put.
        self._jobs: queue.SimpleQueue[tuple[str, object] | threading.Event | None]
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"free {device}", daemon=True)
        self._thread.start()

    def free(self, function: str, pointer: object) -> None:
        self._jobs.put((function, pointer))

    def wait(self) -> None:
        """Return when all memory queued before is free, or the thread has ended."""
        reached = threading.Event()
        self._jobs.put(reached)
        while not reached.wait(1.0) and self._thread.is_alive():
            pass

    def close(self) -> None:
        """Free all queued memory; memory dropped later is freed with the context."""
        self.end()
        self._thread.join(_CLOSING_S)

    def end(self) -> None:
        """End the thread after what is queued; returns at once, on that thread too."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
                continue
            function, pointer = job
            # The memory of a lost device cannot be freed, and need not be.
            with suppress(EdgeServerError):
                self._device.call("free memory", function, pointer)


class Devices:
    """Opens GPUs, and records the loss of a GPU.

    Construction calls no driver; on a machine without one, the first `gpu` raises the reason.

    Args:
        files: of a machine that is built for its GPU: lists the GPU's device files that are there.
            Where no GPU is usable, `check` looks every `look_s` whether one has come.
    """

    def __init__(
        self, files: Callable[[], Collection[str]] | None = None, look_s: float = 5.0
    ) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Device] = {}
        self._lost: DeviceLost | None = None
        self._files = files
        self._files_at_first = frozenset(() if files is None else files())
        self._look_s, self._looked_s = look_s, time.monotonic()

    @property
    def count(self) -> int:
        """Return the number of GPUs; the driver is queried once."""
        return self._counted[0]

    @property
    def reason(self) -> str:
        """Return why this machine has no usable GPU, with the remedy; empty when it has one."""
        return self._counted[1]

    def gpu(self, index: int = 0) -> Device:
        """Return GPU `index`, in CUDA's order of the GPUs visible to this process.

        Raises:
            Unavailable: the GPU is missing or unusable; the text names the remedy.
        """
        with self._lock:
            device = self._open.get(index)
            if device is None:
                device = self._open[index] = open_device(index, on_lost=self._lose)
            return device

    @property
    def awaited(self) -> bool:
        """Return whether this machine is built for a GPU, and none was usable at the start."""
        return self._files is not None and not self.count

    def check(self) -> None:
        """Return if every open GPU works.

        Raises:
            DeviceLost: a GPU is lost, on whichever thread, or one has come that is `awaited`; only
                a new process can use it.
        """
        if self._lost is not None:
            raise self._lost
        now = time.monotonic()
        if now - self._looked_s >= self._look_s:
            self._looked_s = now
            if self.awaited:
                self._look_for_awaited()

    def close(self) -> None:
        """Close all GPUs; no object made on them may be used afterwards."""
        with self._lock:
            for device in self._open.values():
                device.close()
            self._open.clear()

    def _look_for_awaited(self) -> None:
        """Raise DeviceLost where a new process may find a GPU: systemd lets a service open those
        device files that were there when it started, and a driver may keep how it failed."""
        come = sorted(
            frozenset(() if self._files is None else self._files()) - self._files_at_first
        )
        reason = _count_gpus()[1]
        if come or not reason:
            what = f"{', '.join(come[:3])} came after this process" if come else "its driver works"
            raise DeviceLost(f"the GPU has come: {what}: restart the process to use it")

    def _lose(self, error: DeviceLost) -> None:
        # The first error names the cause.
        self._lost = self._lost or error

    @cached_property
    def _counted(self) -> tuple[int, str]:
        return _count_gpus()


def _count_gpus() -> tuple[int, str]:
    """Return the number of GPUs, and why there is none."""
    try:
        return load_driver(Libcuda()).Device.count(), ""
    except Unavailable as error:
        return 0, str(error)
