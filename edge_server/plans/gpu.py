"""The little of the CUDA driver that a build needs: is there a device, which, and memory on it.

Only a process that may crash uses this: see `child`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_server.appliance.jetpack import L4tRelease
from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DRIVER = "libcuda.so.1"
_RELEASE = Path("/etc/nv_tegra_release")
# cuda.h, CUdevice_attribute.
_MULTIPROCESSORS = 16
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76


class Gpu:
    """The first device of the CUDA driver, and its primary context, which TensorRT uses too.

    Raises:
        Unavailable: there is no driver, or no device; the text says which.
    """

    def __init__(self) -> None:
        try:
            self._cuda: Any = ctypes.CDLL(_DRIVER)
        except OSError as error:
            raise Unavailable(f"no CUDA driver here: {error}") from error
        self._call("cuInit", ctypes.c_uint(0))
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        if not count.value:
            raise Unavailable("the CUDA driver sees no GPU")
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)
        self._buffers: dict[str, tuple[ctypes.c_uint64, int]] = {}

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, len(text), self._device)
        return text.value.decode(errors="replace")

    @property
    def compute_capability(self) -> str:
        """`8.7`."""
        return f"{self._attribute(_CAPABILITY_MAJOR)}.{self._attribute(_CAPABILITY_MINOR)}"

    @property
    def multiprocessors(self) -> int:
        return self._attribute(_MULTIPROCESSORS)

    def enter(self) -> None:
        """Make the primary context this thread's."""
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxPushCurrent_v2", context)

    def put(self, name: str, array: NDArray[Any]) -> int:
        """The address of a copy of `array`; the next of the same name takes its place."""
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
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise Unavailable(f"{name} of the CUDA driver failed: {self._error(code)}")

    def _error(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(code, ctypes.byref(text))
        return f"{(text.value or b'unknown').decode()} ({code})"


def l4t_release(path: Path = _RELEASE) -> str:
    """`36.4.7` from `# R36 (release), REVISION: 4.7, …`; empty where this is no Jetson."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    return str(L4tRelease.parse(text) or "")
