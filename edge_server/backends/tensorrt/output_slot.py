"""One output of an instance: the buffer that TensorRT writes, and the copies to callers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.tensors import element_count

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.backends.tensorrt.memory import MakeStaging, StagingBuffer
    from edge_server.backends.tensorrt.plan_io import Shape
    from edge_server.gpu.buffer_pool import BufferPool
    from edge_server.gpu.device_array import CudaArray
    from edge_server.gpu.stream import Stream


class OutputSlot:
    """Memory for one output, and the copies out of it.

    Args:
        nbytes: of the largest output for any profile's inputs; a larger output gets more memory.
        pool: for outputs that stay on the device.
    """

    def __init__(
        self, dtype: np.dtype[Any], nbytes: int, make: MakeStaging, pool: BufferPool
    ) -> None:
        self.dtype = dtype
        self._make = make
        self._pool = pool
        # Graphs write to this buffer, which is therefore never replaced.
        self._usual = make(nbytes)
        self._larger: StagingBuffer | None = None
        self._written = self._usual

    @property
    def is_mapped(self) -> bool:
        """Whether the host reads the output in place, without a copy."""
        return self._usual.is_mapped

    def holds(self, shape: Shape) -> bool:
        """Return whether an output of that shape fits the fixed buffer."""
        return self._bytes(shape) <= self._usual.nbytes

    def pointer(self, shape: Shape) -> int:
        """Return the address at which the next run writes an output of that shape."""
        nbytes = self._bytes(shape)
        if nbytes <= self._usual.nbytes:
            self._written = self._usual
        elif self._larger is not None and nbytes <= self._larger.nbytes:
            self._written = self._larger
        else:
            self._written = self._larger = self._make(nbytes)
        return self._written.pointer

    def array(self, shape: Shape, stream: Stream) -> CudaArray:
        """Return device memory that its receiver may hold for any time.

        Raises:
            Unavailable: callers already hold too much of it.
        """
        return self._pool.take(stream, shape, self.dtype)

    def copy_to(self, array: CudaArray, stream: Stream) -> None:
        """Copy the output at `pointer` to `array`."""
        if array.nbytes:
            stream.copy(array, self._written.span(0, array.nbytes))

    def begin_to_host(self, shape: Shape, stream: Stream) -> NDArray[Any]:
        """Return the output at `pointer` on the host, complete once `stream` has done its work
        so far."""
        nbytes = self._bytes(shape)
        staging = self._written
        # Without pinned memory the copy is done when this returns.
        host = np.empty(nbytes, np.uint8) if staging.host is None else staging.host[:nbytes]
        if nbytes and not staging.is_mapped:
            stream.to_host(host, staging.span(0, nbytes))
        return host.view(self.dtype).reshape(shape)

    def owned(self, host: NDArray[Any]) -> NDArray[Any]:
        """Return a copy of the result of `begin_to_host` that the next run does not overwrite."""
        return host if self._written.host is None else host.copy()

    def _bytes(self, shape: Shape) -> int:
        return element_count(shape) * self.dtype.itemsize
