"""Allocate outputs whose size only the run determines."""

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
    """Gives TensorRT memory for one output while it runs, and keeps the memory for the next run.

    TensorRT calls it in the middle of a run, so no method raises.

    Attributes:
        memory: the output's memory; None before the first run.
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
        """Prepare for the next run."""
        self.shape = ()
        self.failure = None

    def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
        """Return the address of `size` writable bytes; 0 where memory is short."""
        del tensor_name, memory, alignment  # the driver's alignment always suffices
        return self._pointer(size)

    def reallocate_output_async(
        self, tensor_name: str, memory: int, size: int, alignment: int, stream: int
    ) -> int:
        """Allocate like `reallocate_output`; called by TensorRT 10 and newer. No run uses the
        earlier memory any more."""
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
        """Copy the last output to `array`, of its shape; the copy is done once `stream` is."""
        if self.memory is not None and array.nbytes:
            stream.to_host(array, Span(self.memory.pointer, array.nbytes))
