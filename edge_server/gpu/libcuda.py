"""The driver library by ctypes: checks that must precede the import of pycuda, calls that pycuda
lacks, its errors, and a GPU without pycuda."""

from __future__ import annotations

import ctypes
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from edge_server.errors import DeviceLost, EdgeServerError, InternalError, Unavailable

if TYPE_CHECKING:
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
        f"install edge-server anew, or {_ANEW}",
        209: f"they were not compiled for this GPU and driver; {_ANEW}",
        218: f"this driver cannot compile their PTX; {_ANEW}",
        221: "the driver's compiler, libnvidia-ptxjitcompiler.so.1, is missing; install the driver "
        "anew (on a Jetson: apt install --reinstall nvidia-l4t-cuda, in a container: "
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
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76


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
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError:
            raise Unavailable(
                f"no CUDA driver: {_LIBRARY} is not on this machine; install NVIDIA's driver "
                "(on a Jetson: apt install nvidia-l4t-cuda)"
            ) from None
        code: int = self._library.cuInit(0)
        if code:
            remedy = _INIT_REMEDIES.get(code, "see the kernel's log for the driver's messages")
            raise Unavailable(
                f"no CUDA device: cuInit returns {code} ({self.error_text(code)}): {remedy}"
            )
        version = ctypes.c_int()
        self._library.cuDriverGetVersion(ctypes.byref(version))
        self.driver_version = version.value
        if self.driver_version < OLDEST_DRIVER:
            raise Unavailable(
                f"the CUDA driver is too old: it speaks CUDA {version_text(self.driver_version)}, "
                f"{version_text(OLDEST_DRIVER)} is needed; install a newer driver or JetPack"
            )

    def error_text(self, code: int) -> str:
        """Return the driver's text for the error `code`, as at the end of pycuda's messages;
        empty for a code unknown to the driver."""
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(code, ctypes.byref(text))
        return (text.value or b"").decode()

    def pop_context(self) -> None:
        """Pop the current context of this thread."""
        self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def make_wait(self, waiting: int, awaited: int) -> None:
        """Order later work of the stream `waiting` after the current work of the stream `awaited`;
        both are raw handles, and the context is current.

        Raises:
            OSError: the driver refused; with its code and text.
        """
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
            driver_text: the text of pycuda's error, or of the driver's.
            gpu: the GPU's name in messages: `GPU 0`.
            doing: the attempted action, as part of a sentence: `copy to the device`.

        Returns:
            DeviceLost when only a new process can recover, Unavailable where memory is short or the
            driver refuses the kernels, InternalError otherwise.
        """
        for text, code in self._sticky.items():
            if text in driver_text:
                return DeviceLost(
                    f"{gpu}: {doing}: {driver_text} (CUDA error {code}): "
                    "the process must start anew"
                )
        if self._out_of_memory in driver_text:
            return Unavailable(
                f"{gpu}: {doing}: {driver_text}: fewer models, instances or smaller batches fit, "
                "or another process must give memory back"
            )
        for text, remedy in self._kernels.items():
            if text in driver_text:
                return Unavailable(f"{gpu}: {doing}: {driver_text}: {remedy}")
        return InternalError(f"{gpu}: {doing}: {driver_text}")


class BareGpu:
    """A GPU without pycuda, for processes that may crash; TensorRT uses its primary context too.

    Its memory is freed with the process.

    Args:
        index: in CUDA's order of the GPUs visible to this process.

    Raises:
        Unavailable: no driver is installed, or the GPU does not exist; the text says which.
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
        """The compute capability, e.g. `8.7`."""
        return f"{self._attribute(_CAPABILITY_MAJOR)}.{self._attribute(_CAPABILITY_MINOR)}"

    @property
    def multiprocessors(self) -> int:
        return self._attribute(_MULTIPROCESSORS)

    def enter(self) -> None:
        """Make the primary context current on this thread."""
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
