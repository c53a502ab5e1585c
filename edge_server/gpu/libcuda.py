"""The driver library by ctypes: checks that must precede the import of pycuda, and calls that
pycuda lacks."""

from __future__ import annotations

import ctypes

from edge_server.errors import Unavailable

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


class Libcuda:
    """The loaded and initialised driver library.

    Attributes:
        driver_version: the newest CUDA version that the driver supports: 12060 is 12.6.

    Raises:
        Unavailable: no driver is installed, the driver has no usable GPU, or the driver is too old;
            the text names the remedy.
    """

    def __init__(self, name: str = "libcuda.so.1") -> None:
        try:
            self._library = ctypes.CDLL(name)
        except OSError:
            raise Unavailable(
                f"no CUDA driver: {name} is not on this machine; install NVIDIA's driver "
                "(on a Jetson: apt install nvidia-l4t-cuda)"
            ) from None
        code: int = self._library.cuInit(0)
        if code:
            remedy = _INIT_REMEDIES.get(code, "see the kernel's log for what the driver says")
            raise Unavailable(
                f"no CUDA device: cuInit answers {code} ({self.error_text(code)}): {remedy}"
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
