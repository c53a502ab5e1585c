"""Buffers for every tensor of an instance, allocated once for the largest batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.tensorrt.io_slots import InputSlot, OutputSlot, StagingBuffer
from edge_server.backends.tensorrt.plan_io import numpy_of
from edge_server.errors import InvalidRequest
from edge_server.gpu.memory import BufferPool
from edge_server.tensors import element_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from edge_server.backends.contract import ExecuteRequest
    from edge_server.backends.tensorrt.context import Context, OutputAllocator
    from edge_server.backends.tensorrt.engine import Engine
    from edge_server.backends.tensorrt.options import Options
    from edge_server.backends.tensorrt.plan_build.build_options import Shape, Shapes
    from edge_server.backends.tensorrt.plan_io import PlanIO

# Callers may hold this many responses of one instance on the device at once.
RESPONSES_ON_DEVICE = 16
_LEAST_POOL_BYTES = 1 << 20


@dataclass
class IoBuffers:
    """The buffers of one instance's tensors.

    Attributes:
        inputs, outputs: on the device, or mapped into it.
        host: tensors that TensorRT reads and writes on the host.
        allocators: of outputs whose size only the run determines.
        pool: of outputs that stay on the device.
    """

    inputs: dict[str, InputSlot]
    outputs: dict[str, OutputSlot]
    host: HostTensors
    pool: BufferPool
    allocators: dict[str, OutputAllocator] = field(default_factory=dict)

    @property
    def mapped_outputs(self) -> frozenset[str]:
        """Names of the outputs that the host reads in place, without a copy."""
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
    """Allocate buffers for the largest inputs and outputs of `profiles`.

    Raises:
        Unavailable: the GPU has too little free memory.
    """
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
    """Keeps shape tensors at fixed addresses from run to run.

    Args:
        instance: its name, for errors.
    """

    def __init__(self, io: PlanIO, instance: str) -> None:
        self._instance = instance
        self._values = {t.name: np.zeros(t.shape, numpy_of(t)) for t in io.inputs if t.holds_shape}
        self._dtypes = {t.name: numpy_of(t) for t in io.outputs if t.holds_shape}
        self._outputs: dict[str, NDArray[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._values or self._dtypes)

    @property
    def addresses(self) -> dict[str, int]:
        """The addresses of the inputs."""
        return {name: held.ctypes.data for name, held in self._values.items()}

    def read(self, request: ExecuteRequest) -> Shapes:
        """Store the shape inputs of `request`; return their values by input.

        Raises:
            InvalidRequest: an input has another number of values.
        """
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
        """Return the address of the output for the next run."""
        held = self._outputs.get(name)
        if held is None or held.shape != shape:
            held = self._outputs[name] = np.zeros(shape, self._dtypes[name])
        address: int = held.ctypes.data
        return address

    def output(self, name: str) -> NDArray[Any]:
        """Return the shape tensor that the last run wrote."""
        copy: NDArray[Any] = self._outputs[name].copy()
        return copy

    def __contains__(self, name: str) -> bool:
        return name in self._dtypes
