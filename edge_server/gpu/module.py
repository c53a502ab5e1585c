"""Compiled kernels on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_server.gpu.device import Device


class Kernel:
    """One function of a module; run it with `Stream.launch`."""

    def __init__(self, name: str, device: Device, function: Any) -> None:
        self.name = name
        # pycuda's function keeps pycuda's module loaded, so that both are released in the context.
        self._box = device.hold(self, function)

    @property
    def raw(self) -> Any:
        """pycuda's function, for this package only."""
        return self._box[0]


class Module:
    """A loaded kernel image; made by `Device.module`."""

    def __init__(self, device: Device, image: bytes) -> None:
        self.device = device
        with device.current("load kernels"):
            self._box = device.hold(self, device.driver.module_from_buffer(image))

    def kernel(self, name: str, signature: str) -> Kernel:
        """Return the `extern "C"` function `name`.

        Args:
            signature: one letter per argument, as in `struct`: `P` pointer, `i` int32, `I` uint32,
                `f` float, `q` int64; `48s` is a struct of 48 bytes.

        Raises:
            InternalError: the image has no such function.
        """
        with self.device.current(f"find kernel {name}"):
            function = self._box[0].get_function(name)
            function.prepare(signature)
        return Kernel(name, self.device, function)
