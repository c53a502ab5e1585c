"""An instance of a plan: a context, a stream, buffers, and recorded runs (CUDA graphs)."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.contract import Phases, rows_of
from edge_server.backends.tensorrt.io_buffers import Context, OutputAllocator, allocate_io
from edge_server.backends.tensorrt.plan_config import nearest_profile
from edge_server.errors import (
    DeviceLost,
    EdgeServerError,
    InternalError,
    ModelConfigError,
    Unavailable,
    Unsupported,
)
from edge_server.gpu.stream import GpuEvent, PriorityStream, Stream, record_graph
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from edge_server.backends.contract import ExecuteRequest, Tensors
    from edge_server.backends.tensorrt.engine import Engine
    from edge_server.backends.tensorrt.io_buffers import IoBuffers
    from edge_server.backends.tensorrt.plan_config import Options, PlanIO
    from edge_server.backends.tensorrt.plan_options import Shape, Shapes
    from edge_server.gpu.memory import CudaArray
    from edge_server.gpu.stream import Graph
    from edge_server.model_config.config import ModelConfig

log = logging.getLogger(__name__)

# Triton's default.
_USUAL_BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class GraphShapes:
    """The shapes of every input, batch dimension included, that one graph is captured for, and the
    smallest batch that it may serve, with the rest of its rows 0."""

    shapes: Shapes
    least_rows: int
    profile: int

    def serves(self, shapes: Shapes) -> bool:
        return shapes == self.shapes or all(
            shape[1:] == self.shapes[name][1:]
            and self.least_rows <= shape[0] <= self.shapes[name][0]
            for name, shape in shapes.items()
        )


@dataclass(frozen=True)
class RecordedRun:
    """A recorded run of fixed shapes on fixed memory, with its own context, if it has one."""

    wanted: GraphShapes
    graph: Graph
    output_shapes: Mapping[str, Shape]
    context: Context | None


class Graphs:
    """The recorded runs of an instance; `failure` says why there are none, though they are
    wanted."""

    def __init__(self, runs: Sequence[RecordedRun] = (), failure: str = "") -> None:
        self._runs = list(runs)
        self.failure = failure

    def find(self, shapes: Shapes) -> RecordedRun | None:
        """Return the run for exactly `shapes`, or the first that may serve them; None if none
        does."""
        serving = [run for run in self._runs if run.wanted.serves(shapes)]
        exact = (run for run in serving if run.wanted.shapes == shapes)
        return next(exact, serving[0] if serving else None)

    def close(self) -> None:
        """Destroy the graphs, then their contexts; no run may be active."""
        runs, self._runs = self._runs, []
        for run in runs:
            run.graph.close()
        for run in runs:
            if run.context is not None:
                run.context.close()


def record(
    engine: Engine,
    context: Context,
    stream: Stream,
    buffers: IoBuffers,
    *,
    wanted: Sequence[GraphShapes],
    name: str,
) -> Graphs:
    """Record all of `wanted`; if one cannot be recorded, record none and log one line. A context
    must stay unchanged once a run of it is recorded, so each run has its own; a plan of fixed
    shapes never changes its context and uses `context`."""
    runs: list[RecordedRun] = []
    try:
        if buffers.host:
            raise Unsupported("it has tensors on the host")
        if engine.dla_core is not None:
            # Work for NVDLA goes through a separate driver.
            raise Unsupported("what runs on NVDLA cannot be recorded")
        if not (engine.io.is_fixed or engine.shares_profiles):
            raise Unsupported("TensorRT before 10 lets a profile with free dimensions be one run's")
        for each in wanted:
            own = None if engine.io.is_fixed else Context(engine, stream, name)
            shapes, graph = _recorded(own or context, stream, buffers, each)
            runs.append(RecordedRun(each, graph, shapes, own))
    except DeviceLost:
        raise
    except EdgeServerError as error:
        failure = f"runs without CUDA graphs: {error}"
        log.warning("instance %s: %s", name, failure)
        with suppress(EdgeServerError):
            stream.synchronize()
        Graphs(runs).close()
        return Graphs(failure=failure)
    return Graphs(runs)


def _recorded(
    context: Context, stream: Stream, buffers: IoBuffers, wanted: GraphShapes
) -> tuple[dict[str, Shape], Graph]:
    context.set_shapes(wanted.profile, wanted.shapes)
    for name, slot in buffers.inputs.items():
        context.bind(name, slot.pointer)
        slot.clear(stream)
    shapes: dict[str, Shape] = {}
    for name, output in buffers.outputs.items():
        shapes[name] = context.output_shape(name)
        if -1 in shapes[name] or not output.holds(shapes[name]):
            raise Unsupported(f"the size of output '{name}' is not known beforehand")
        context.bind(name, output.pointer(shapes[name]))
    # TensorRT defers the work of a change of shapes to the next run, and that work cannot be
    # recorded.
    context.enqueue_here()
    stream.synchronize()
    return shapes, record_graph(stream, context.enqueue_here)


def graph_shapes(
    config: ModelConfig, io: PlanIO, profiles: Sequence[int]
) -> tuple[GraphShapes, ...]:
    """Return the graphs to capture, smaller batches first. Without a `graph_spec` the batch sizes
    are the preferred ones, or Triton's default, in each of `profiles`, with their optimal sizes.
    Shapes that no profile accepts are left out."""
    specs = config.message.optimization.cuda.graph_spec
    if specs:
        wanted = [_spec(config, io, spec, profiles) for spec in specs]
    else:
        wanted = [
            _usual(io, batch_size, profile)
            for batch_size in _batch_sizes(config)
            for profile in profiles
        ]
    return tuple(each for each in wanted if each is not None and _fits(io, each))


def _batch_sizes(config: ModelConfig) -> Iterable[int]:
    if config.max_batch_size == 0:
        return (0,)
    batching = config.dynamic_batching
    preferred = batching.preferred_batch_sizes if batching is not None else ()
    sizes = {*(preferred or _USUAL_BATCH_SIZES), config.max_batch_size}
    return sorted(size for size in sizes if size <= config.max_batch_size)


def _usual(io: PlanIO, batch_size: int, profile: int) -> GraphShapes:
    shapes = {t.name: io.bounds(t, profile).opt for t in io.inputs}
    if batch_size:
        shapes = {name: (batch_size, *shape[1:]) for name, shape in shapes.items()}
    return GraphShapes(shapes, batch_size, profile)


def _spec(
    config: ModelConfig, io: PlanIO, spec: Any, profiles: Sequence[int]
) -> GraphShapes | None:
    most = config.max_batch_size
    if most == 0 and spec.batch_size:
        raise _fault(config, "graph spec expects 'batch_size' to be 0 if 'max_batch_size' is 0")
    if most > 0 and not 1 <= spec.batch_size <= most:
        raise _fault(config, f"graph spec expects 'batch_size' to be >= 1 and <= {most}")
    for profile in profiles:
        shapes = _shapes(config, io, spec, profile)
        found = GraphShapes(shapes, _least_rows(config, io, spec, shapes), profile)
        if _fits(io, found):
            return found
    return None


def _shapes(config: ModelConfig, io: PlanIO, spec: Any, profile: int) -> Shapes:
    for name in spec.input:
        if name not in {t.name for t in io.inputs}:
            raise _fault(config, f"graph spec names input '{name}', which the model does not have")
    shapes: dict[str, Shape] = {}
    for tensor in io.inputs:
        best = io.bounds(tensor, profile).opt
        rest = best[1:] if spec.batch_size else best
        if tensor.name in spec.input:
            rest = tuple(spec.input[tensor.name].dim)
        shapes[tensor.name] = (spec.batch_size, *rest) if spec.batch_size else rest
    return shapes


def _least_rows(config: ModelConfig, io: PlanIO, spec: Any, shapes: Shapes) -> int:
    """Return the least batch, 0 without batches; the bounds of other sizes are checked only."""
    rows: int = spec.batch_size
    if not spec.HasField("graph_lower_bound"):
        return rows
    bound = spec.graph_lower_bound
    if bound.batch_size > rows:
        raise _fault(
            config,
            "graph lower bound spec expects 'batch_size' to be <= graph spec 'batch_size'",
        )
    for name in (tensor.name for tensor in io.inputs):
        rest = shapes[name][1:] if rows else shapes[name]
        if name in spec.input and name not in bound.input:
            raise _fault(config, f"graph lower bound spec expects shape for input '{name}'")
        if name not in bound.input:
            continue
        dims = tuple(bound.input[name].dim)
        if len(dims) != len(rest):
            # The unclosed quote is Triton's.
            raise _fault(
                config,
                f"graph lower bound spec expects to have '{len(rest)} dimensions, got {len(dims)}",
            )
        if high := next((high for low, high in zip(dims, rest, strict=True) if low > high), None):
            raise _fault(
                config,
                f"graph lower bound spec expects input '{name}' to have dimension <= {high}",
            )
    return max(1, bound.batch_size) if rows else 0


def _fits(io: PlanIO, graph: GraphShapes) -> bool:
    for tensor in io.inputs:
        shape, bounds = graph.shapes[tensor.name], io.bounds(tensor, graph.profile)
        if len(shape) != len(bounds.opt) or not all(
            low <= size <= high
            for low, size, high in zip(bounds.min, shape, bounds.max, strict=True)
        ):
            return False
    return True


def _fault(config: ModelConfig, text: str) -> ModelConfigError:
    return ModelConfigError(f"model '{config.name}': {text}")


class PlanInstance:
    """Runs batches, one after the other, on its own stream. All requests of a batch are one run.
    Responses on the device are sent as soon as the run is enqueued: only the next run and the
    readers wait for it then, and no duration of such a run is reported."""

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
        self.engine = engine
        self.is_closed = False
        self._device = engine.device
        self._name = name
        self._batched = options.batched
        self._owns_engine = owns_engine
        self._profiles = profiles
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
                if graphs:
                    self._graphs = record(
                        engine, self._context, self._stream, self._buffers, wanted=graphs, name=name
                    )
            except BaseException:
                # Closed before its engine, which the model closes.
                self._context.close()
                raise

    @property
    def without_graphs(self) -> str:
        """Why batches do not run as CUDA graphs, though they should; else empty."""
        return self._graphs.failure

    @property
    def buffer_bytes(self) -> int:
        return self._buffers.nbytes

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
        self.is_closed = True
        with self._device.current(f"close {self._name}"):
            try:
                self._stream.synchronize()
            finally:
                self._graphs.close()
                self._context.close()
                self._buffers.close()
                if self._owns_engine:
                    self.engine.close()

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
        for slot in self._buffers.inputs.values():
            run.read += slot.gather(run.requests, self._stream)
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
        host = self._buffers.host
        values = host.read(run.requests[0])
        for name, address in host.addresses.items():
            self._context.bind(name, address)
            run.shapes.pop(name)
        sizes = {**run.shapes, **values}
        profile = nearest_profile(self.engine.io, self._profiles, sizes, self._name)
        self._context.set_shapes(profile, run.shapes)
        for name, slot in self._buffers.inputs.items():
            array = slot.in_place(run.requests, self._stream)
            if array is None:
                run.read += slot.gather(run.requests, self._stream)
            else:
                run.read.append(array)
            self._context.bind(name, slot.pointer if array is None else array.pointer)
        for tensor in self.engine.io.outputs:
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
        on_device: all requests accept outputs on the device.
        read: device arrays that the run reads in place.
        output_shapes: output → shape; set when it is known.
        device_outputs, host_outputs: those that stay on the device, and those on the host."""

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
        """Return each request's part of the outputs; the `uncounted` ones reached the host without
        a copy."""
        made: dict[str, Any] = {**self.host_outputs, **self.device_outputs}
        if len(self.requests) == 1:
            split = {name: [array] for name, array in made.items()}
        else:
            split = {name: rows_of(name, array, self._rows) for name, array in made.items()}
        parts: list[Tensors] = [
            {name: Tensor(split[name][at]) for name in request.outputs}
            for at, request in enumerate(self.requests)
        ]
        for request, part in zip(self.requests, parts, strict=True):
            for name, tensor in part.items():
                if name in self.host_outputs and name not in uncounted:
                    request.copied("to_host", tensor.array.nbytes)
        return parts
