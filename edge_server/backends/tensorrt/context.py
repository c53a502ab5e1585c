"""One execution context of a plan, with its profile, shapes and addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorrt as trt

from edge_server.backends.tensorrt.engine import trt_log
from edge_server.backends.tensorrt.io_slots import ByteSpan
from edge_server.errors import DeviceLost, EdgeServerError, InternalError, InvalidRequest
from edge_server.gpu.memory import DeviceMemory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.backends.tensorrt.engine import Engine
    from edge_server.backends.tensorrt.plan_build.build_options import Shape, Shapes
    from edge_server.gpu.device import Device
    from edge_server.gpu.stream import PriorityStream, Stream


class Context:
    """Runs a plan on one stream, one batch after the other; for one thread at a time.

    Its settings persist: a model of fixed shapes is set once.

    Args:
        name: the instance's, for errors.
        ahead: for runs of another priority than that of `stream`, in whose order they stay.
    """

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
        """Set the shapes of the next runs; inputs that TensorRT reads on the host are bound before.

        Args:
            profile: the optimisation profile.
            shapes: of every other input.

        Raises:
            InvalidRequest: TensorRT refuses these shapes.
        """
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
        """Return the output's shape, with -1 where it depends on the data.

        Raises:
            InvalidRequest: the inputs' shapes contradict each other.
        """
        if name not in self._outputs:
            mark = trt_log().mark
            try:
                self._outputs[name] = tuple(self._context.get_tensor_shape(name))
            except ValueError as error:
                # An unknown shape has -1 dimensions, which Python rejects as a length.
                raise self._do_not_go_together(mark) from error
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
        """Enqueue one run on the stream; return before it is done.

        Raises:
            DeviceLost: the GPU fails every call.
            InternalError: TensorRT refused; with TensorRT's text.
        """
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
        """Set the profile.

        Raises:
            InternalError: TensorRT refuses the profile.
            DeviceLost: the device is lost.
        """
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
        set Python's error without the GIL in the calls that release it, which ends the process.

        Raises:
            InvalidRequest, InternalError: the outputs' shapes are not known.
        """
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

    def _do_not_go_together(self, mark: int) -> InvalidRequest:
        """Return the error for inputs whose shapes are valid alone, but not together."""
        return InvalidRequest(
            f"request specifies invalid shapes for {self._name}: they do not go together: "
            f"{trt_log().since(mark)}"
        )

    def _check_device(self) -> None:
        """Check whether the device is lost.

        Raises:
            DeviceLost: it is; other errors of the device are not the cause.
        """
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
                self.memory = DeviceMemory(self._device, max(1, size))
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
            stream.to_host(array, ByteSpan(self.memory.pointer, array.nbytes))
