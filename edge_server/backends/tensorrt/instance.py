"""An instance of a plan: a context, a stream, and buffers for its tensors."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.contract import Phases
from edge_server.backends.tensorrt.context import Context, OutputAllocator
from edge_server.backends.tensorrt.graphs import Graphs, record
from edge_server.backends.tensorrt.io_buffers import allocate_io
from edge_server.backends.tensorrt.plan_io import ProfileChoice
from edge_server.errors import EdgeServerError, InternalError, Unavailable
from edge_server.gpu.stream import GpuEvent, PriorityStream, Stream
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.backends.contract import ExecuteRequest, Tensors
    from edge_server.backends.tensorrt.engine import Engine
    from edge_server.backends.tensorrt.graphs import GraphShapes, RecordedRun
    from edge_server.backends.tensorrt.options import Options
    from edge_server.backends.tensorrt.plan_build.build_options import Shape
    from edge_server.gpu.device_array import CudaArray


class PlanInstance:
    """Runs batches, one after the other, on its own stream.

    All requests of a batch are one run. Responses on the device are sent as soon as the run is
    enqueued: only the next run and the readers wait for it then, and no duration of such a run is
    reported.

    Args:
        profiles: the optimisation profiles that the instance may use.
        graphs: the runs to record.
        owns_engine: the engine closes with the instance.

    Raises:
        Unavailable: the GPU has too little memory for the instance.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        profiles: Sequence[int],
        options: Options,
        *,
        graphs: Sequence[GraphShapes],
        owns_engine: bool,
    ) -> None:
        self._engine = engine
        self._device = engine.device
        self._name = name
        self._batched = options.batched
        self._owns_engine = owns_engine
        self._profiles = ProfileChoice(engine.io, profiles, name)
        with self._device.current(f"make instance {name}"):
            self._stream = Stream(self._device)
            self._copies = Stream(self._device) if options.copy_stream else self._stream
            self._through = GpuEvent(self._device, spin=options.busy_wait)
            self._copied = GpuEvent(self._device, spin=options.busy_wait)
            ahead = PriorityStream(self._device, options.priority) if options.priority else None
            self._context = Context(engine, self._stream, name, ahead)
            self._graphs = Graphs()
            try:
                self._buffers = allocate_io(engine, self._context, profiles, options, name)
                if options.graphs:
                    self._graphs = record(
                        engine, self._context, self._stream, self._buffers, wanted=graphs, name=name
                    )
            except BaseException:
                # Closed before its engine, which the model closes.
                self._context.close()
                raise

    def execute(self, requests: Sequence[ExecuteRequest]) -> Phases:
        began_ns = time.monotonic_ns()
        try:
            with self._device.current(f"run {self._name}"):
                run = Run(requests, batched=self._batched)
                enqueued_ns, ready_ns = self._run(run)
            responses = run.responses(self._buffers.mapped_outputs)
        except EdgeServerError as error:
            for request in requests:
                request.respond(error, True)
            return Phases(0, time.monotonic_ns() - began_ns, 0)
        for request, response in zip(requests, responses, strict=True):
            request.respond(response, True)
        return Phases(
            enqueued_ns - began_ns, ready_ns - enqueued_ns, time.monotonic_ns() - ready_ns
        )

    def close(self) -> None:
        """Close all resources in the order of their dependencies."""
        with self._device.current(f"close {self._name}"):
            try:
                self._stream.synchronize()
            finally:
                self._graphs.close()
                self._context.close()
                self._buffers.close()
                if self._owns_engine:
                    self._engine.close()

    def _run(self, run: Run) -> tuple[int, int]:
        """Run the batch; return when the inputs were enqueued and when the outputs were ready,
        in ns."""
        # This run reuses the buffers of the last one.
        self._through.wait()
        for slot in self._buffers.inputs.values():
            slot.begin()
        try:
            recorded = self._graphs.find(run.shapes)
            enqueued_ns = self._enqueue(run) if recorded is None else self._launch(run, recorded)
            self._copy_to_host(run)
        finally:
            self._through.record(self._stream)
            for array in run.read:
                array.read_by(self._through)
        return enqueued_ns, time.monotonic_ns()

    def _launch(self, run: Run, recorded: RecordedRun) -> int:
        """Run the batch as a recorded graph."""
        for name, slot in self._buffers.inputs.items():
            run.read += slot.gather(run.requests, self._stream, recorded.wanted.shapes[name])
        enqueued_ns = time.monotonic_ns()
        try:
            recorded.graph.launch(self._stream)
        except InternalError as error:
            raise InternalError(
                "failed to run TRT inference: unable to execute graph for inference "
                f"{self._name}: {error}"
            ) from error
        for name, whole in recorded.output_shapes.items():
            output = self._buffers.outputs[name]
            output.pointer(whole)
            # A graph for more rows also writes rows of no request.
            run.output_shapes[name] = (run.rows, *whole[1:]) if self._batched else whole
            array = self._device_array(run, name)
            if array is not None:
                output.copy_to(array, self._stream)
        return enqueued_ns

    def _enqueue(self, run: Run) -> int:
        """Run the batch by the context."""
        host = self._buffers.host
        values = host.read(run.requests[0])
        for name, address in host.addresses.items():
            self._context.bind(name, address)
            run.shapes.pop(name)
        self._context.set_shapes(self._profiles.of({**run.shapes, **values}), run.shapes)
        for name, slot in self._buffers.inputs.items():
            array = slot.in_place(run.requests, self._stream)
            if array is None:
                run.read += slot.gather(run.requests, self._stream)
            else:
                run.read.append(array)
            self._context.bind(name, slot.pointer if array is None else array.pointer)
        for tensor in self._engine.io.outputs:
            self._bind_output(run, tensor.name, self._context.output_shape(tensor.name))
        enqueued_ns = time.monotonic_ns()
        allocators = self._buffers.allocators
        try:
            self._context.enqueue()
        except InternalError as error:
            failures = (each.failure for each in allocators.values())
            raise next(filter(None, failures), error) from error
        # TensorRT has set the sizes by now.
        run.output_shapes.update({name: each.shape for name, each in allocators.items()})
        return enqueued_ns

    def _bind_output(self, run: Run, name: str, shape: Shape) -> None:
        buffers = self._buffers
        if name in buffers.host:
            self._context.bind(name, buffers.host.place(name, shape))
        elif -1 in shape:
            if name not in buffers.allocators:
                buffers.allocators[name] = OutputAllocator(self._device)
                self._context.allocate_with(name, buffers.allocators[name])
            buffers.allocators[name].begin()
        else:
            run.output_shapes[name] = shape
            array = self._device_array(run, name)
            slot = buffers.outputs[name]
            self._context.bind(name, slot.pointer(shape) if array is None else array.pointer)

    def _device_array(self, run: Run, name: str) -> CudaArray | None:
        """Return device memory for an output that stays on the device; None where the output
        goes to the host, is not requested, or too much device memory is already lent."""
        shape = run.output_shapes[name]
        if not run.on_device or name not in run.wanted or 0 in shape:
            return None
        with suppress(Unavailable):
            run.device_outputs[name] = self._buffers.outputs[name].array(shape, self._stream)
        return run.device_outputs.get(name)

    def _copy_to_host(self, run: Run) -> None:
        """Copy the other requested outputs to the host, and wait for the copies."""
        for array in run.device_outputs.values():
            array.written(self._stream)
        names = [name for name in run.wanted if name not in run.device_outputs]
        if not names:
            return
        if self._copies is not self._stream:
            self._copies.wait(self._stream.record())
        buffers = self._buffers
        for name in names:
            if name in buffers.allocators:
                shape, dtype = run.output_shapes[name], buffers.outputs[name].dtype
                run.host_outputs[name] = np.empty(shape, dtype)
                buffers.allocators[name].copy_to(run.host_outputs[name], self._copies)
            elif name not in buffers.host:
                slot = buffers.outputs[name]
                run.host_outputs[name] = slot.begin_to_host(run.output_shapes[name], self._copies)
        self._copied.record(self._copies).wait()
        for name in names:
            if name in buffers.host:
                run.host_outputs[name] = buffers.host.output(name)
            elif name not in buffers.allocators:
                run.host_outputs[name] = buffers.outputs[name].owned(run.host_outputs[name])


class Run:
    """The requests of a batch, and their outputs.

    Attributes:
        rows: of the whole batch; 0 where the model does not batch.
        shapes: input → shape of the whole batch.
        wanted: the outputs that some request names.
        on_device: all requests accept them on the device.
        read: device arrays that the run reads in place.
        output_shapes: output → shape; set when it is known.
        device_outputs: outputs that stay on the device.
        host_outputs: outputs on the host.
    """

    def __init__(self, requests: Sequence[ExecuteRequest], *, batched: bool) -> None:
        self.requests = requests
        first = requests[0].inputs
        self.rows = 0
        if batched:
            self._rows = [next(iter(r.inputs.values())).shape[0] for r in requests]
            self.rows = sum(self._rows)
        self.shapes: dict[str, Shape] = {
            name: (self.rows, *tensor.shape[1:]) if batched else tensor.shape
            for name, tensor in first.items()
        }
        self.wanted = frozenset[str]().union(*(request.outputs for request in requests))
        self.on_device = all(request.request.on_device for request in requests)
        self.read: list[CudaArray] = []
        self.output_shapes: dict[str, Shape] = {}
        self.device_outputs: dict[str, CudaArray] = {}
        self.host_outputs: dict[str, NDArray[Any]] = {}

    def responses(self, uncounted: frozenset[str]) -> list[Tensors]:
        """Return each request's part of the outputs.

        Args:
            uncounted: outputs that reached the host without a copy.

        Raises:
            InternalError: an output has another number of rows than the batch.
        """
        made: dict[str, Any] = {**self.host_outputs, **self.device_outputs}
        parts: list[Tensors]
        if len(self.requests) == 1:
            parts = [{name: Tensor(made[name]) for name in self.requests[0].outputs}]
        else:
            for name, array in made.items():
                if array.shape[:1] != (self.rows,):
                    raise InternalError(
                        f"output '{name}' has shape {list(array.shape)} for a batch of {self.rows}"
                    )
            ends = np.cumsum(self._rows).tolist()
            parts = [
                {name: Tensor(made[name][begin:end]) for name in request.outputs}
                for request, begin, end in zip(self.requests, [0, *ends], ends, strict=False)
            ]
        for request, part in zip(self.requests, parts, strict=True):
            for name, tensor in part.items():
                if name in self.host_outputs and name not in uncounted:
                    request.copied("to_host", tensor.array.nbytes)
        return parts
