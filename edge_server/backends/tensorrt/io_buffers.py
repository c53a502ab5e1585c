"""What one run of a plan needs: its context, and memory of its tensors on device and host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorrt as trt

from edge_server.backends.tensorrt.engine import trt_log
from edge_server.backends.tensorrt.plan_config import numpy_of
from edge_server.errors import DeviceLost, EdgeServerError, InternalError, InvalidRequest
from edge_server.gpu.memory import BufferPool, ByteSpan, CudaArray, DeviceMemory, StagingBuffer
from edge_server.tensors import element_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from edge_server.backends.contract import ExecuteRequest
    from edge_server.backends.tensorrt.engine import Engine
    from edge_server.backends.tensorrt.plan_config import Options, PlanIO
    from edge_server.backends.tensorrt.plan_options import Shape, Shapes
    from edge_server.gpu.device import Device
    from edge_server.gpu.stream import PriorityStream, Stream

# The alignment of every address that TensorRT gets.
ALIGNMENT_BYTES = 256


class InputSlot:
    """Gathers the requests' parts of one input at the address that TensorRT reads; `staging` has
    the size of the largest batch of any profile."""

    def __init__(
        self, name: str, device: Device, dtype: np.dtype[Any], staging: StagingBuffer
    ) -> None:
        self.name = name
        self.dtype = dtype
        self._device = device
        self._staging = staging
        # Held until the next run: copies may still read these arrays.
        self._held: list[object] = []

    @property
    def pointer(self) -> int:
        """The input's fixed address, unless the run reads it in place."""
        return self._staging.pointer

    @property
    def nbytes(self) -> int:
        return self._staging.allocated_bytes

    def begin(self) -> None:
        self._held.clear()

    def clear(self, stream: Stream) -> None:
        """Set the buffer to 0: stale bytes may be NaN, or an index out of range."""
        stream.fill(self._staging.span(0, self._staging.nbytes))

    def in_place(self, requests: Sequence[ExecuteRequest], stream: Stream) -> CudaArray | None:
        """Return the batch's only part if it already lies on the device and can be read in place;
        `stream` waits for the stream that writes it."""
        if len(requests) > 1:
            return None
        array = self._on_device(requests[0])
        if array is None or array.pointer % ALIGNMENT_BYTES or not array.nbytes:
            return None
        stream.wait(array.ready)
        self._held.append(array)
        return array

    def gather(self, requests: Sequence[ExecuteRequest], stream: Stream) -> list[CudaArray]:
        """Copy all parts, one behind the other, to `pointer`; return the arrays that are read on
        the device, which are to be marked as read by this run."""
        staging = self._staging
        read: list[CudaArray] = []
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
            if not staging.is_mapped:
                request.copied("to_device", part.nbytes)
            begin = end
        self._flush(stream, copied_to, begin)
        return read

    def _part(self, request: ExecuteRequest) -> NDArray[np.uint8]:
        tensor = request.inputs[self.name]
        array = tensor.array
        if tensor.on_device is not None:
            # On another GPU, or of another library.
            array = tensor.on_device.on_host()
            request.copied("to_host", array.nbytes)
        # Its memory as bytes: an array of a request is C-contiguous.
        return array.reshape(-1).view(np.uint8)

    def _on_device(self, request: ExecuteRequest) -> CudaArray | None:
        array = request.inputs[self.name].on_device
        mine = isinstance(array, CudaArray) and array.device is self._device
        return array if mine else None  # type: ignore[return-value]

    def _flush(self, stream: Stream, begin: int, end: int) -> None:
        staging = self._staging
        if begin < end and staging.host is not None and not staging.is_mapped:
            stream.to_device(staging.span(begin, end - begin), staging.host[begin:end])


class OutputSlot:
    """Memory for one output, and the copies out of it. `staging` has the size of the largest output
    for any profile's inputs; a larger output gets more memory. `pool` is for what stays on the
    device."""

    def __init__(self, dtype: np.dtype[Any], staging: StagingBuffer, pool: BufferPool) -> None:
        self.dtype = dtype
        self._pool = pool
        # Graphs write to this buffer, which is therefore never replaced.
        self._usual = staging
        self._larger: StagingBuffer | None = None
        self._written = self._usual

    @property
    def nbytes(self) -> int:
        larger = self._larger
        return self._usual.allocated_bytes + (0 if larger is None else larger.allocated_bytes)

    @property
    def is_mapped(self) -> bool:
        """Whether the host reads the output in place, without a copy."""
        return self._usual.is_mapped

    def holds(self, shape: Shape) -> bool:
        return self._bytes(shape) <= self._usual.nbytes

    def pointer(self, shape: Shape) -> int:
        """Return the address at which the next run writes an output of that shape."""
        nbytes = self._bytes(shape)
        if nbytes <= self._usual.nbytes:
            self._written = self._usual
        elif self._larger is not None and nbytes <= self._larger.nbytes:
            self._written = self._larger
        else:
            self._written = self._larger = self._usual.larger(nbytes)
        return self._written.pointer

    def array(self, shape: Shape, stream: Stream) -> CudaArray:
        """Return device memory that its receiver may hold for any time."""
        return self._pool.take(stream, shape, self.dtype)

    def copy_to(self, array: CudaArray, stream: Stream) -> None:
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


class Context:
    """Runs a plan on one stream, one batch after the other; for one thread at a time. Its settings
    persist: a model of fixed shapes is set once. `ahead` is for runs of another priority than that
    of `stream`, in whose order they stay."""

    def __init__(
        self, engine: Engine, stream: Stream, name: str, ahead: PriorityStream | None = None
    ) -> None:
        self._device = engine.device
        self._io = engine.io
        self._stream = stream
        self._name = name
        self._ahead = ahead
        self._context: trt.IExecutionContext = engine.context()
        self._profile = 0
        # An input with a fixed shape is never set.
        self._fixed = {t.name: t.shape for t in engine.io.inputs if -1 not in t.shape}
        self._reads_shapes = any(t.holds_shape for t in engine.io.inputs)
        self._shapes: dict[str, Shape] = dict(self._fixed)
        self._outputs: dict[str, Shape] = {}
        self._shapes_inferred = False
        self._addresses: dict[str, int] = {}

    def set_shapes(self, profile: int, shapes: Shapes) -> None:
        """Set the shapes of the next runs; inputs that TensorRT reads on the host are bound."""
        context = self._context
        mark = trt_log().mark
        # The values of a shape tensor on the host may have changed.
        self._shapes_inferred = self._shapes_inferred and not self._reads_shapes
        if profile != self._profile:
            self._set_profile(profile, mark)
        for name, shape in shapes.items():
            if self._shapes.get(name) != shape:
                self._shapes_inferred = False
                if not context.set_input_shape(name, shape):
                    self._shapes.pop(name, None)
                    raise InvalidRequest(
                        f"request specifies invalid shape for input '{name}' for {self._name}. "
                        f"Error details: {trt_log().since(mark)}"
                    )
                self._shapes[name] = shape
        if not self._shapes_inferred:
            self._outputs.clear()
            self._infer_shapes(mark)
            self._shapes_inferred = True

    def output_shape(self, name: str) -> Shape:
        """Return the output's shape, with -1 where it depends on the data."""
        if name not in self._outputs:
            mark = trt_log().mark
            try:
                self._outputs[name] = tuple(self._context.get_tensor_shape(name))
            except ValueError as error:
                # An unknown shape has -1 dimensions, which Python rejects as a length.
                raise InvalidRequest(
                    f"request specifies invalid shapes for {self._name}: they do not go together: "
                    f"{trt_log().since(mark)}"
                ) from error
        return self._outputs[name]

    def bind(self, name: str, address: int) -> None:
        """Set the tensor's address, on the device, or on the host if TensorRT expects it there."""
        if self._addresses.get(name) != address:
            if not self._context.set_tensor_address(name, address):
                raise InternalError(f"{self._name}: TensorRT does not take '{name}' where it is")
            self._addresses[name] = address

    def allocate_with(self, name: str, allocator: Any) -> None:
        """Let `allocator`, an IOutputAllocator, place the output; keep the allocator alive."""
        if not self._context.set_output_allocator(name, allocator):
            raise InternalError(f"{self._name}: TensorRT takes no allocator for '{name}'")

    def enqueue(self) -> None:
        """Enqueue one run on the stream; return before it is done. Raises DeviceLost where the GPU
        fails every call, InternalError with TensorRT's text."""
        if self._ahead is None:
            self.enqueue_here()
            return
        self._ahead.begin(self._stream)
        self._enqueue_on(self._ahead.handle)
        self._ahead.end(self._stream)

    def enqueue_here(self) -> None:
        """Enqueue on the stream itself, for a recording."""
        self._enqueue_on(self._stream.handle)

    def _enqueue_on(self, handle: int) -> None:
        mark = trt_log().mark
        if not self._context.execute_async_v3(handle):
            self._check_device()
            raise InternalError(
                f"failed to run TRT inference: unable to enqueue for inference {self._name}: "
                f"{trt_log().since(mark)}"
            )

    def _set_profile(self, profile: int, mark: int) -> None:
        last = self._io.profile_count - 1
        failure = (
            f"Can not set the specified optimization profile {profile}[{profile}] for "
            f"{self._name}. Expected optimization profile index range 0-{last}"
        )
        # Up to TensorRT 10.12 a refusal ends the process (see `_infer_shapes`), so a missing
        # profile and a lost device are detected before.
        if not 0 <= profile <= last:
            raise InternalError(failure)
        self._stream.synchronize()
        try:
            self._context.set_optimization_profile_async(profile, self._stream.handle)
        except RuntimeError as error:
            raise InternalError(f"{failure}: {trt_log().since(mark)}") from error
        # The call copies to the device, and the next lines need the shapes of the new profile.
        self._stream.synchronize()
        self._profile = profile
        self._shapes = dict(self._fixed)
        self._shapes_inferred = False

    def _infer_shapes(self, mark: int) -> None:
        """Infer the outputs' shapes, without TensorRT's `infer_shapes`: up to 10.12 the bindings
        set Python's error without the GIL in the calls that release it, which ends the process."""
        if self._context.all_binding_shapes_specified:
            for tensor in self._io.outputs:
                self.output_shape(tensor.name)
            return
        shapes = {t.name: tuple(self._context.get_tensor_shape(t.name)) for t in self._io.inputs}
        missing = ", ".join(name for name, shape in shapes.items() if -1 in shape)
        raise InternalError(
            f"{self._name}: TensorRT does not know the shapes for {missing}: "
            f"{trt_log().since(mark)}"
        )

    def _check_device(self) -> None:
        try:
            self._device.check()
        except DeviceLost:
            raise
        except EdgeServerError:
            return

    def close(self) -> None:
        """Close the context; no run may be active, and its engine must still be open."""
        del self._context


class OutputAllocator(trt.IOutputAllocator):  # type: ignore[misc]
    """Gives TensorRT memory for one output while it runs, and keeps the memory for the next run.
    TensorRT calls it in the middle of a run, so no method raises."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self.memory: DeviceMemory | None = None
        self.shape: Shape = ()
        self.failure: EdgeServerError | None = None

    def begin(self) -> None:
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
                self.memory = DeviceMemory(self._device, max(1, size))
            except EdgeServerError as error:
                self.failure = error
                return 0
        return self.memory.pointer

    def notify_shape(self, tensor_name: str, shape: Any) -> None:
        del tensor_name
        self.shape = tuple(shape)

    def copy_to(self, array: NDArray[Any], stream: Stream) -> None:
        if self.memory is not None and array.nbytes:
            stream.to_host(array, ByteSpan(self.memory.pointer, array.nbytes))


# Callers may hold this many responses of one instance on the device at once.
RESPONSES_ON_DEVICE = 16
_LEAST_POOL_BYTES = 1 << 20


@dataclass
class IoBuffers:
    """The buffers of one instance's tensors: on the device, or mapped into it; on the `host`, where
    TensorRT reads and writes them there; the `allocators` of outputs whose size only the run
    determines; and the `pool` of outputs that stay on the device."""

    inputs: dict[str, InputSlot]
    outputs: dict[str, OutputSlot]
    host: HostTensors
    pool: BufferPool
    allocators: dict[str, OutputAllocator] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """What is allocated, on the device and pinned on the host; on any thread."""
        allocated = [each.memory for each in list(self.allocators.values())]
        return (
            sum(slot.nbytes for slot in list(self.inputs.values()))
            + sum(slot.nbytes for slot in list(self.outputs.values()))
            + sum(memory.nbytes for memory in allocated if memory is not None)
            + self.pool.held_bytes
        )

    @property
    def mapped_outputs(self) -> frozenset[str]:
        mapped = {name for name, slot in self.outputs.items() if slot.is_mapped}
        return frozenset(mapped - self.allocators.keys())

    def close(self) -> None:
        """Free all buffers; no run may use them any more."""
        self.inputs.clear()
        self.outputs.clear()
        self.allocators.clear()
        self.pool.close()


def allocate_io(
    engine: Engine, context: Context, profiles: Sequence[int], options: Options, name: str
) -> IoBuffers:
    device, io = engine.device, engine.io
    mapped = options.mapped and device.integrated and device.can_map_host_memory

    def staging(nbytes: int, *, pinned: bool) -> StagingBuffer:
        return StagingBuffer(device, nbytes, mapped=mapped, pinned=pinned)

    sizes = _output_bytes(io, context, profiles)
    pool_bytes = max(_LEAST_POOL_BYTES, RESPONSES_ON_DEVICE * sum(sizes.values()))
    pool = BufferPool(device, pool_bytes, f"instance {name}")
    inputs, outputs = {}, {}
    for tensor in io.tensors:
        if tensor.holds_shape:
            continue
        dtype = numpy_of(tensor)
        if tensor.is_input:
            most = max(element_count(io.bounds(tensor, p).max) for p in profiles)
            memory = staging(most * dtype.itemsize, pinned=options.pinned_inputs)
            inputs[tensor.name] = InputSlot(tensor.name, device, dtype, memory)
        else:
            memory = staging(sizes[tensor.name], pinned=options.pinned_outputs)
            outputs[tensor.name] = OutputSlot(dtype, memory, pool)
    return IoBuffers(inputs, outputs, HostTensors(io, name), pool)


def _output_bytes(io: PlanIO, context: Context, profiles: Sequence[int]) -> Mapping[str, int]:
    """Return the maximum size of each output; 0 for an output whose size only a run determines."""
    most = dict.fromkeys((tensor.name for tensor in io.outputs), 0)
    if any(tensor.holds_shape for tensor in io.inputs):
        return most
    for profile in profiles:
        context.set_shapes(profile, {t.name: io.bounds(t, profile).max for t in io.inputs})
        for tensor in io.outputs:
            shape = context.output_shape(tensor.name)
            if -1 not in shape:
                nbytes = element_count(shape) * numpy_of(tensor).itemsize
                most[tensor.name] = max(most[tensor.name], nbytes)
    return most


class HostTensors:
    """Keeps shape tensors at fixed addresses from run to run."""

    def __init__(self, io: PlanIO, instance: str) -> None:
        self._instance = instance
        self._values = {t.name: np.zeros(t.shape, numpy_of(t)) for t in io.inputs if t.holds_shape}
        self._dtypes = {t.name: numpy_of(t) for t in io.outputs if t.holds_shape}
        self._outputs: dict[str, NDArray[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._values or self._dtypes)

    @property
    def addresses(self) -> dict[str, int]:
        return {name: held.ctypes.data for name, held in self._values.items()}

    def read(self, request: ExecuteRequest) -> Shapes:
        inputs = request.host_inputs() if self._values else {}
        for name, held in self._values.items():
            array = inputs[name].array
            if array.shape != held.shape:
                raise InvalidRequest(
                    f"input '{name}' of {self._instance} has shape {list(array.shape)}, the plan "
                    f"takes {list(held.shape)}"
                )
            held[...] = array
        return {name: tuple(map(int, held.flat)) for name, held in self._values.items()}

    def place(self, name: str, shape: Shape) -> int:
        held = self._outputs.get(name)
        if held is None or held.shape != shape:
            held = self._outputs[name] = np.zeros(shape, self._dtypes[name])
        address: int = held.ctypes.data
        return address

    def output(self, name: str) -> NDArray[Any]:
        copy: NDArray[Any] = self._outputs[name].copy()
        return copy

    def __contains__(self, name: str) -> bool:
        return name in self._dtypes
