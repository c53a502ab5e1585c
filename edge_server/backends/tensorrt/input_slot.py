"""One input of an instance: the buffer that gathers a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.tensorrt.memory import ALIGNMENT_BYTES, as_bytes
from edge_server.gpu.device_array import CudaArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.backends.contract import ExecuteRequest
    from edge_server.backends.tensorrt.memory import MakeStaging
    from edge_server.backends.tensorrt.plan_io import Shape
    from edge_server.gpu.device import Device
    from edge_server.gpu.stream import Stream


class InputSlot:
    """Gathers the requests' parts of one input at the address that TensorRT reads.

    Args:
        nbytes: of the largest batch of any profile.
    """

    def __init__(
        self, name: str, device: Device, dtype: np.dtype[Any], nbytes: int, make: MakeStaging
    ) -> None:
        self.name = name
        self.dtype = dtype
        self._device = device
        self._staging = make(nbytes)
        # Held until the next run: copies may still read these arrays.
        self._held: list[object] = []

    @property
    def pointer(self) -> int:
        """The input's fixed address, unless the run reads it in place."""
        return self._staging.pointer

    def begin(self) -> None:
        """Release the arrays of the last run, which is done."""
        self._held.clear()

    def clear(self, stream: Stream) -> None:
        """Set the buffer to 0: stale bytes may be NaN, or an index out of range."""
        stream.fill(self._staging.span(0, self._staging.nbytes))

    def in_place(self, requests: Sequence[ExecuteRequest], stream: Stream) -> CudaArray | None:
        """Return the batch's only part if it already lies on the device and can be read in place.

        `stream` waits for the stream that writes it.
        """
        if len(requests) > 1:
            return None
        array = self._on_device(requests[0])
        if array is None or array.pointer % ALIGNMENT_BYTES or not array.nbytes:
            return None
        stream.wait(array.ready)
        self._held.append(array)
        return array

    def gather(
        self, requests: Sequence[ExecuteRequest], stream: Stream, into: Shape | None = None
    ) -> list[CudaArray]:
        """Copy all parts, one behind the other, to `pointer`.

        Args:
            into: a larger shape, in whose first corner the only part or the rows are put; the rest
                is 0.

        Returns:
            The arrays that are read on the device: mark them read by this run.
        """
        staging = self._staging
        read: list[CudaArray] = []
        if into is not None and self._is_inside(requests, into):
            self._put_inside(requests, stream, into)
            return read
        begin = copied_to = 0
        for request in requests:
            array = self._on_device(request)
            if array is not None and array.nbytes:
                self._flush(stream, copied_to, begin)
                stream.wait(array.ready)
                stream.copy(staging.span(begin, array.nbytes), array)
                read.append(array)
                self._held.append(array)
                begin += array.nbytes
                copied_to = begin
                continue
            part = self._part(request)
            end = begin + part.nbytes
            if staging.host is not None:
                staging.host[begin:end] = part
            elif part.nbytes:
                stream.to_device(staging.span(begin, part.nbytes), part)
                copied_to = end
            self._count(request, part.nbytes)
            begin = end
        self._flush(stream, copied_to, begin)
        return read

    def _is_inside(self, requests: Sequence[ExecuteRequest], into: Shape) -> bool:
        """Return whether `into` differs by more than additional rows at the end."""
        return any(request.inputs[self.name].shape[1:] != into[1:] for request in requests)

    def _put_inside(self, requests: Sequence[ExecuteRequest], stream: Stream, into: Shape) -> None:
        whole = np.zeros(into, self.dtype)
        row = 0
        for request in requests:
            array = request.inputs[self.name]
            part = array.array if array.on_device is None else array.on_device.on_host()
            corner = [slice(row, row + len(part)), *(slice(0, size) for size in part.shape[1:])]
            whole[tuple(corner)] = part
            row += len(part)
            self._count(request, part.nbytes)
        if self._staging.host is None:
            stream.to_device(self._staging.span(0, whole.nbytes), whole)
        else:
            self._staging.host[: whole.nbytes] = as_bytes(whole)
            self._flush(stream, 0, whole.nbytes)

    def _part(self, request: ExecuteRequest) -> NDArray[np.uint8]:
        tensor = request.inputs[self.name]
        array = tensor.array
        if tensor.on_device is not None:
            # On another GPU, or of another library.
            array = tensor.on_device.on_host()
            request.copied("to_host", array.nbytes)
        return as_bytes(array)

    def _on_device(self, request: ExecuteRequest) -> CudaArray | None:
        array = request.inputs[self.name].on_device
        mine = isinstance(array, CudaArray) and array.device is self._device
        return array if mine else None  # type: ignore[return-value]

    def _flush(self, stream: Stream, begin: int, end: int) -> None:
        """Copy pinned memory from `begin` to `end` to the device."""
        staging = self._staging
        if begin < end and staging.host is not None and not staging.is_mapped:
            stream.to_device(staging.span(begin, end - begin), staging.host[begin:end])

    def _count(self, request: ExecuteRequest, nbytes: int) -> None:
        if not self._staging.is_mapped:
            request.copied("to_device", nbytes)
