"""Outputs whose size is known only when they are there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorrt as trt

from edge_server.backends.tensorrt.memory import Span
from edge_server.errors import EdgeServerError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.backends.tensorrt.plan_io import Shape
    from edge_server.gpu.device import Device
    from edge_server.gpu.memory import DeviceMemory
    from edge_server.gpu.stream import Stream


class OutputAllocator(trt.IOutputAllocator):  # type: ignore[misc]
    """Gives TensorRT memory for one output while it runs, and keeps it for the next run.

    TensorRT calls it in the middle of a run: it raises nothing there.

    Attributes:
        memory: where the output is; None before the first.
        shape: of the last output.
        failure: why the last run got no memory.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self.memory: DeviceMemory | None = None
        self.shape: Shape = ()
        self.failure: EdgeServerError | None = None

    def begin(self) -> None:
        """A run follows."""
        self.shape = ()
        self.failure = None

    def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
        """Where `size` bytes can be written; 0 where nowhere."""
        del tensor_name, memory, alignment  # of the driver all memory is aligned enough
        return self._pointer(size)

    def reallocate_output_async(
        self, tensor_name: str, memory: int, size: int, alignment: int, stream: int
    ) -> int:
        """As above, called by TensorRT 10 and newer; no run uses the earlier memory any more."""
        del tensor_name, memory, alignment, stream
        return self._pointer(size)

    def _pointer(self, size: int) -> int:
        if self.memory is None or size > self.memory.nbytes:
            try:
                self.memory = self._device.memory(max(1, size))
            except EdgeServerError as error:
                self.failure = error
                return 0
        return self.memory.pointer

    def notify_shape(self, tensor_name: str, shape: Any) -> None:
        del tensor_name
        self.shape = tuple(shape)

    def copy_to(self, array: NDArray[Any], stream: Stream) -> None:
        """Fill `array`, of the last output's shape, with it; it is there once `stream` is."""
        if self.memory is not None and array.nbytes:
            stream.to_host(array, Span(self.memory.pointer, array.nbytes))
