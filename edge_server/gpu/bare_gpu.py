"""A GPU without pycuda: its properties and memory, for processes that may crash."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from edge_server.errors import Unavailable
from edge_server.gpu.libcuda import Libcuda

if TYPE_CHECKING:
    from numpy.typing import NDArray

# cuda.h, CUdevice_attribute.
_MULTIPROCESSORS = 16
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76


class BareGpu:
    """A GPU and its primary context, which TensorRT uses too.

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
