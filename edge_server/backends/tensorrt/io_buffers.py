"""Buffers for every tensor of an instance, allocated once for the largest batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edge_server.backends.tensorrt.host_tensors import HostTensors
from edge_server.backends.tensorrt.input_slot import InputSlot
from edge_server.backends.tensorrt.memory import MakeStaging, StagingBuffer
from edge_server.backends.tensorrt.output_slot import OutputSlot
from edge_server.backends.tensorrt.plan_io import numpy_of
from edge_server.gpu.buffer_pool import BufferPool
from edge_server.tensors import element_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.backends.tensorrt.allocator import OutputAllocator
    from edge_server.backends.tensorrt.context import Context
    from edge_server.backends.tensorrt.engine import Engine
    from edge_server.backends.tensorrt.options import Options
    from edge_server.backends.tensorrt.plan_io import PlanIO

# Callers may hold this many responses of one instance on the device at once.
KEPT_ANSWERS = 16
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

    def staging(*, pinned: bool) -> MakeStaging:
        return lambda nbytes: StagingBuffer(device, nbytes, mapped=mapped, pinned=pinned)

    sizes = _output_bytes(io, context, profiles)
    pool = BufferPool(
        device, max(_LEAST_POOL_BYTES, KEPT_ANSWERS * sum(sizes.values())), f"instance {name}"
    )
    inputs = {}
    for tensor in io.inputs:
        if not tensor.holds_shape:
            most = max(element_count(io.bounds(tensor, p).max) for p in profiles)
            dtype = numpy_of(tensor)
            make = staging(pinned=options.pinned_inputs)
            inputs[tensor.name] = InputSlot(tensor.name, device, dtype, most * dtype.itemsize, make)
    make = staging(pinned=options.pinned_outputs)
    outputs = {
        tensor.name: OutputSlot(numpy_of(tensor), sizes[tensor.name], make, pool)
        for tensor in io.outputs
        if not tensor.holds_shape
    }
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
