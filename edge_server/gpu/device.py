"""The GPUs of this process, their contexts and errors, and the CUDA driver, called by ctypes."""

from __future__ import annotations

import ctypes
import queue
import threading
import weakref
from contextlib import suppress
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from edge_server.errors import DeviceLost, EdgeServerError, InternalError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

# The shipped kernels were compiled for this driver or newer ones, and for these GPUs.
OLDEST_DRIVER = 11040
OLDEST_CAPABILITY = (7, 5)

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

_OUT_OF_MEMORY = 2
_NOT_READY = 600
_ANEW = "compile them with its own toolkit (scripts/build_kernels)"
_OF_ANOTHER_GPU = f"they were not compiled for this GPU and driver; {_ANEW}"
# CUresults of a kernel image that the driver refuses, and the remedy for each.
_KERNEL_REMEDIES = {
    200: f"the file of the kernels is damaged, or of a kind that this driver does not know; "
    f"install edge-server anew, or {_ANEW}",
    209: _OF_ANOTHER_GPU,
    218: f"this driver cannot compile their PTX; {_ANEW}",
    221: "the driver's compiler, libnvidia-ptxjitcompiler.so.1, is missing; install the driver "
    "anew (on a Jetson: apt install --reinstall nvidia-l4t-cuda, in a container: "
    "--runtime nvidia)",
    222: _OF_ANOTHER_GPU,
    223: f"compiling PTX is switched off; take CUDA_DISABLE_PTX_JIT out of the environment, or "
    f"{_ANEW}",
}
# Sticky CUresults, after which every call in the context fails the same way: memory errors of the
# hardware, a kernel that crashed or timed out, a destroyed context, and "unknown".
_STICKY = (214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 999)

_LIBRARY = "libcuda.so.1"
_TYPES = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "u": ctypes.c_uint,
    "b": ctypes.c_ubyte,
    "n": ctypes.c_size_t,
    "q": ctypes.c_uint64,
}
# cuda.h: the driver's function → its parameters in letters of `_TYPES`; q is an address on the
# device, p any other pointer or handle.
PROTOTYPES = MappingProxyType(
    {
        "cuInit": "u",
        "cuDriverGetVersion": "p",
        "cuGetErrorString": "ip",
        "cuDeviceGetCount": "p",
        "cuDeviceGet": "pi",
        "cuDeviceGetName": "pii",
        "cuDeviceTotalMem_v2": "pi",
        "cuDeviceGetAttribute": "pii",
        "cuDevicePrimaryCtxRetain": "pi",
        "cuDevicePrimaryCtxRelease_v2": "i",
        "cuCtxPushCurrent_v2": "p",
        "cuCtxPopCurrent_v2": "p",
        "cuCtxSynchronize": "",
        "cuCtxGetStreamPriorityRange": "pp",
        "cuMemAlloc_v2": "pn",
        "cuMemFree_v2": "q",
        "cuMemHostAlloc": "pnu",
        "cuMemFreeHost": "p",
        "cuMemHostGetDevicePointer_v2": "ppu",
        "cuMemcpyHtoDAsync_v2": "qpnp",
        "cuMemcpyDtoHAsync_v2": "pqnp",
        "cuMemcpyDtoDAsync_v2": "qqnp",
        "cuMemsetD8Async": "qbnp",
        "cuStreamCreateWithPriority": "pui",
        "cuStreamDestroy_v2": "p",
        "cuStreamWaitEvent": "ppu",
        "cuStreamBeginCapture_v2": "pi",
        "cuStreamEndCapture": "pp",
        "cuEventCreate": "pu",
        "cuEventDestroy_v2": "p",
        "cuEventRecord": "pp",
        "cuEventSynchronize": "p",
        "cuEventQuery": "p",
        "cuModuleLoadData": "pp",
        "cuModuleGetFunction": "ppp",
        "cuModuleUnload": "p",
        "cuLaunchKernel": "puuuuuuuppp",
        "cuGraphInstantiateWithFlags": "ppq",
        "cuGraphDestroy": "p",
        "cuGraphLaunch": "pp",
        "cuGraphExecDestroy": "p",
    }
)
# Functions that never wait: they keep the interpreter's lock, as giving it up may take longer.
_QUICK = frozenset(
    {
        *("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuStreamWaitEvent", "cuEventRecord"),
        *("cuEventQuery", "cuLaunchKernel"),
    }
)

# cuda.h, CUdevice_attribute.
_MULTIPROCESSORS, _INTEGRATED, _CAN_MAP_HOST_MEMORY = 16, 18, 19
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


class CudaError(Exception):
    """The driver refused a call; the text is the function's name and the driver's own text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Libcuda:
    """The loaded and initialised driver library.

    Attributes:
        driver_version: the newest CUDA version that the driver supports: 12060 is 12.6.

    Raises:
        Unavailable: no driver is installed, the driver has no usable GPU, or the driver is too old;
            the text names the remedy.
    """

    def __init__(self) -> None:
        try:
            self._waiting, self._quick = ctypes.CDLL(_LIBRARY), ctypes.PyDLL(_LIBRARY)
        except OSError:
            raise Unavailable(
                f"no CUDA driver: {_LIBRARY} is not on this machine; install NVIDIA's driver "
                "(on a Jetson: apt install nvidia-l4t-cuda)"
            ) from None
        # Looked up when first called: too old a driver lacks some.
        self._functions: dict[str, Any] = {}
        if code := self.result("cuInit", 0):
            remedy = _INIT_REMEDIES.get(code, "see the kernel's log for the driver's messages")
            raise Unavailable(
                f"no CUDA device: cuInit returns {code} ({self._error_text(code)}): {remedy}"
            )
        self.driver_version = self.made("cuDriverGetVersion", kind=ctypes.c_int)
        if self.driver_version < OLDEST_DRIVER:
            raise Unavailable(
                f"the CUDA driver is too old: it speaks CUDA {version_text(self.driver_version)}, "
                f"{version_text(OLDEST_DRIVER)} is needed; install a newer driver or JetPack"
            )

    def result(self, name: str, *arguments: object) -> int:
        """Call the driver's function `name` and return its CUresult."""
        function = self._functions.get(name)
        if function is None:
            function = getattr(self._quick if name in _QUICK else self._waiting, name)
            function.argtypes = [_TYPES[letter] for letter in PROTOTYPES[name]]
            self._functions[name] = function
        code: int = function(*arguments)
        return code

    def call(self, name: str, *arguments: object) -> None:
        """Call the driver's function `name`.

        Raises:
            CudaError: the driver refused.
        """
        if code := self.result(name, *arguments):
            raise self.error(name, code)

    def made(self, name: str, *arguments: object, kind: Any = ctypes.c_void_p) -> int:
        """Call the driver's function `name`; return what it writes to its first parameter."""
        made = kind()
        self.call(name, ctypes.byref(made), *arguments)
        return made.value or 0

    def error(self, name: str, code: int) -> CudaError:
        # The name in the driver's header.
        shown = name.removesuffix("_v2")
        return CudaError(code, f"{shown} failed: {self._error_text(code)}")

    def _error_text(self, code: int) -> str:
        text = ctypes.c_char_p()
        self.result("cuGetErrorString", code, ctypes.byref(text))
        return (text.value or b"").decode()


def version_text(version: int) -> str:
    """12060 → "12.6"."""
    return f"{version // 1000}.{version % 1000 // 10}"


class Gpu:
    """The properties of one GPU, for which no context is made.

    Args:
        index: in CUDA's order of the GPUs visible to this process.

    Attributes:
        count: number of GPUs visible to this process.
        compute_capability: (8, 7) is Orin.
        integrated: host and device memory are the same chips.
        can_map_host_memory: kernels can read pinned host memory in place.

    Raises:
        Unavailable: no driver, no such GPU, or the GPU is unusable; the text names the remedy.
    """

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.libcuda = Libcuda()
        self.driver_version = self.libcuda.driver_version
        try:
            self._read()
        except CudaError as error:
            raise Unavailable(
                f"GPU {index} cannot be used: {error}; another process may hold it or its memory "
                "(nvidia-smi, or on a Jetson tegrastats)"
            ) from error

    def __str__(self) -> str:
        return f"GPU {self.index}"

    def _read(self) -> None:
        made = self.libcuda.made
        self.count = made("cuDeviceGetCount", kind=ctypes.c_int)
        if not 0 <= self.index < self.count:
            here = "only GPU 0" if self.count == 1 else f"GPU 0 to {self.count - 1}"
            raise Unavailable(f"there is no GPU {self.index}: this machine has {here}")
        self._device = made("cuDeviceGet", self.index, kind=ctypes.c_int)
        name = ctypes.create_string_buffer(256)
        self.libcuda.call("cuDeviceGetName", name, len(name), self._device)
        self.name = name.value.decode(errors="replace")
        self.total_memory_bytes = made("cuDeviceTotalMem_v2", self._device, kind=ctypes.c_size_t)
        self.multiprocessors = self._attribute(_MULTIPROCESSORS)
        self.integrated = bool(self._attribute(_INTEGRATED))
        self.can_map_host_memory = bool(self._attribute(_CAN_MAP_HOST_MEMORY))
        self.compute_capability = (
            self._attribute(_CAPABILITY_MAJOR),
            self._attribute(_CAPABILITY_MINOR),
        )
        if self.compute_capability < OLDEST_CAPABILITY:
            raise Unavailable(
                "the GPU is too old: {} has compute capability {}.{}, 7.5 is needed; without it "
                "models run on the CPU".format(self.name, *self.compute_capability)
            )

    def _attribute(self, number: int) -> int:
        return self.libcuda.made("cuDeviceGetAttribute", number, self._device, kind=ctypes.c_int)


class _Entered(threading.local):
    """The devices whose `with` blocks this thread is in, outermost first."""

    def __init__(self) -> None:
        self.devices: list[Device] = []


_entered = _Entered()
# The time limit of `close` for the last frees: the GPU may be stuck.
_CLOSING_S = 5.0


class Device(Gpu):
    """One GPU with its primary context, in which streams, events, memory and kernels are made.

    `with device:` makes it current on this thread. Every object made on it does so by itself; a
    caller with several operations in a row encloses them, which switches the context once. All
    objects may be used and dropped on any thread: the device's own thread frees them, because the
    driver frees memory only once the GPU is idle, and the thread that drops it must not wait.

    Args:
        on_lost: called with the first error after which only a new process can recover, on the
            thread where the error occurred, before it is raised there.
    """

    def __init__(
        self, index: int = 0, *, on_lost: Callable[[DeviceLost], None] | None = None
    ) -> None:
        self._on_lost = on_lost
        super().__init__(index)
        self._closed = False
        # The only queue with a reentrant put: the garbage collector runs finalizers in the middle
        # of any call, even of a put.
        self._dropped: queue.SimpleQueue[tuple[str, int] | threading.Event | None]
        self._dropped = queue.SimpleQueue()
        self._freeing = threading.Thread(target=self._free, name=f"free {self}", daemon=True)
        self._freeing.start()

    def _read(self) -> None:
        super()._read()
        # TensorRT, ONNX Runtime and torch work in the primary context too.
        self._context = self.libcuda.made("cuDevicePrimaryCtxRetain", self._device)

    def __enter__(self) -> None:
        inside = _entered.devices
        # Another GPU may have become current in between.
        if not inside or inside[-1] is not self:
            try:
                self.libcuda.call("cuCtxPushCurrent_v2", self._context)
            except CudaError as error:
                raise self._failure(error, "make current") from error
        inside.append(self)

    def __exit__(self, *_: object) -> None:
        inside = _entered.devices
        inside.pop()
        if not inside or inside[-1] is not self:
            # Only a lost device refuses, and so it will the next call.
            self.libcuda.result("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def check(self) -> None:
        """Return when all work so far is done without an error.

        Raises:
            DeviceLost: only a new process can recover.
        """
        self.call("check", "cuCtxSynchronize")

    def call(self, doing: str, name: str, *arguments: object) -> None:
        """Call the driver's function `name` with this GPU current.

        Args:
            doing: the attempted action, as part of a sentence: `copy to the device`.

        Raises:
            DeviceLost: only a new process can recover.
            Unavailable: memory is short, or the driver refuses the kernels.
            InternalError: the driver refused for any other reason.
        """
        with self:
            try:
                self.libcuda.call(name, *arguments)
            except CudaError as error:
                raise self._failure(error, doing) from error

    def make(
        self, owner: object, doing: str, made_by: str, freed_by: str, *arguments: object
    ) -> tuple[int, weakref.finalize[..., Any]]:
        """Return the handle that the driver's `made_by` writes to its first parameter.

        `freed_by` gets the handle soon after `owner` is garbage-collected, or the returned
        finalizer is called. Where memory is short, what has been dropped is freed first.
        """
        # An address on the device has as many bits.
        made = ctypes.c_void_p()
        parameters = ctypes.byref(made), *arguments
        with self:
            code = self.libcuda.result(made_by, *parameters)
            if code == _OUT_OF_MEMORY:
                self.finish_freeing()
                code = self.libcuda.result(made_by, *parameters)
            if code:
                raise self._failure(self.libcuda.error(made_by, code), doing)
        handle = made.value or 0
        finalizer = weakref.finalize(owner, self._drop, freed_by, handle)
        finalizer.atexit = False
        return handle, finalizer

    def ready(self, event: int) -> bool:
        """Return whether the event of that handle is reached; never waits."""
        with self:
            code = self.libcuda.result("cuEventQuery", event)
        if code not in (0, _NOT_READY):
            raise self._failure(self.libcuda.error("cuEventQuery", code), "query an event")
        return code == 0

    def finish_freeing(self) -> None:
        """Return when all that was dropped before is freed, or the device is closed."""
        reached = threading.Event()
        self._dropped.put(reached)
        while not reached.wait(1.0) and self._freeing.is_alive():
            pass

    def close(self) -> None:
        """Free what was dropped and release the primary context, outside of `with`; no object made
        on the device may be used afterwards."""
        if not self._closed:
            self._closed = True
            self._dropped.put(None)
            self._freeing.join(_CLOSING_S)
            self.libcuda.result("cuDevicePrimaryCtxRelease_v2", self._device)

    def _failure(self, error: CudaError, doing: str) -> EdgeServerError:
        text = f"{self}: {doing}: {error}"
        if error.code in _STICKY:
            lost = DeviceLost(f"{text} (CUDA error {error.code}): the process must start anew")
            if self._on_lost is not None:
                self._on_lost(lost)
            return lost
        if error.code == _OUT_OF_MEMORY:
            return Unavailable(
                f"{text}: fewer models, instances or smaller batches fit, or another process must "
                "give memory back"
            )
        if error.code in _KERNEL_REMEDIES:
            return Unavailable(f"{text}: {_KERNEL_REMEDIES[error.code]}")
        return InternalError(text)

    def _drop(self, freed_by: str, handle: int) -> None:
        # With the context, CUDA frees everything in it.
        if not self._closed:
            self._dropped.put((freed_by, handle))

    def _free(self) -> None:
        while (job := self._dropped.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
                continue
            # What is on a lost device cannot be freed, and need not be.
            with suppress(EdgeServerError):
                self.call("free", *job)


class Devices:
    """Opens GPUs, and records the loss of a GPU.

    Construction calls no driver; on a machine without one, the first `gpu` raises the reason.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Device] = {}
        self._lost: DeviceLost | None = None

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
            if index not in self._open:
                self._open[index] = Device(index, on_lost=self._lose)
            return self._open[index]

    def check(self) -> None:
        """Return if every open GPU works.

        Raises:
            DeviceLost: a GPU is lost, on whichever thread; only a new process can recover.
        """
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """Close all GPUs; no object made on them may be used afterwards."""
        with self._lock:
            for device in self._open.values():
                device.close()
            self._open.clear()

    def _lose(self, error: DeviceLost) -> None:
        # The first error names the cause.
        self._lost = self._lost or error

    @cached_property
    def _counted(self) -> tuple[int, str]:
        try:
            return Gpu().count, ""
        except Unavailable as error:
            return 0, str(error)
