"""CUDA graphs: recorded runs that launch in one call, and the shapes that they are recorded for."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge_server.backends.tensorrt.context import Context
from edge_server.errors import DeviceLost, EdgeServerError, ModelConfigError, Unsupported
from edge_server.gpu.graph import record_graph

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from edge_server.backends.tensorrt.engine import Engine
    from edge_server.backends.tensorrt.io_buffers import IoBuffers
    from edge_server.backends.tensorrt.plan_build.build_options import Shape, Shapes
    from edge_server.backends.tensorrt.plan_io import PlanIO
    from edge_server.gpu.graph import Graph
    from edge_server.gpu.stream import Stream
    from edge_server.model_config.config import ModelConfig

log = logging.getLogger(__name__)

# Triton's default.
_USUAL_BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class GraphShapes:
    """The shapes that one graph is captured for, and the smallest that it may serve.

    Attributes:
        shapes: every input, batch dimension included.
        least: the lower bounds, likewise; `shapes` without a lower bound.
        profile: the optimisation profile of the capture.
    """

    shapes: Shapes
    least: Shapes
    profile: int

    def serves(self, shapes: Shapes) -> bool:
        """Return whether the graph can run a batch of these shapes."""
        return shapes == self.shapes or all(
            len(shape) == len(self.shapes[name])
            and all(
                low <= size <= high
                for low, size, high in zip(self.least[name], shape, self.shapes[name], strict=True)
            )
            for name, shape in shapes.items()
        )


@dataclass(frozen=True)
class RecordedRun:
    """A recorded run of fixed shapes on fixed memory.

    Attributes:
        output_shapes: of the outputs that the run writes.
        context: the run's own context, if it has one.
    """

    wanted: GraphShapes
    graph: Graph
    output_shapes: Mapping[str, Shape]
    context: Context | None


class Graphs:
    """The recorded runs of one instance."""

    def __init__(self, runs: Sequence[RecordedRun] = ()) -> None:
        self._runs = list(runs)

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
    """Record all of `wanted`; if one cannot be recorded, record none and log one line.

    A context must stay unchanged once a run of it is recorded, so each run has its own context; a
    plan of fixed shapes never changes its context and uses `context`.

    Raises:
        DeviceLost: the attempt broke the device.
    """
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
        log.warning("instance %s: runs without CUDA graphs: %s", name, error)
        with suppress(EdgeServerError):
            stream.synchronize()
        Graphs(runs).close()
        return Graphs()
    return Graphs(runs)


def _recorded(
    context: Context, stream: Stream, buffers: IoBuffers, wanted: GraphShapes
) -> tuple[dict[str, Shape], Graph]:
    """Return the shapes of the outputs, and the graph that writes them."""
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
    """Return the graphs to capture, smaller batches first.

    Without a `graph_spec` the batch sizes are the preferred ones, or Triton's default, in each of
    `profiles`; other free dimensions have the profile's optimal sizes. Shapes that no profile
    accepts are left out.

    Raises:
        ModelConfigError: a `graph_spec` is invalid; with Triton's text.
    """
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
    return GraphShapes(shapes, shapes, profile)


def _spec(
    config: ModelConfig, io: PlanIO, spec: Any, profiles: Sequence[int]
) -> GraphShapes | None:
    """Return the shapes of one `graph_spec`.

    Raises:
        ModelConfigError: the specification is invalid.
    """
    most = config.max_batch_size
    if most == 0 and spec.batch_size:
        raise _fault(config, "graph spec expects 'batch_size' to be 0 if 'max_batch_size' is 0")
    if most > 0 and not 1 <= spec.batch_size <= most:
        raise _fault(config, f"graph spec expects 'batch_size' to be >= 1 and <= {most}")
    for profile in profiles:
        shapes = _shapes(config, io, spec, profile)
        found = GraphShapes(shapes, _least(config, io, spec, shapes), profile)
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


def _least(config: ModelConfig, io: PlanIO, spec: Any, shapes: Shapes) -> Shapes:
    if not spec.HasField("graph_lower_bound"):
        return shapes
    bound = spec.graph_lower_bound
    if bound.batch_size > spec.batch_size:
        raise _fault(
            config,
            "graph lower bound spec expects 'batch_size' to be <= graph spec 'batch_size'",
        )
    least: dict[str, Shape] = {}
    for tensor in io.inputs:
        name, whole = tensor.name, shapes[tensor.name]
        rest = whole[1:] if spec.batch_size else whole
        if name in spec.input and name not in bound.input:
            raise _fault(config, f"graph lower bound spec expects shape for input '{name}'")
        if name in bound.input:
            dims = tuple(bound.input[name].dim)
            if len(dims) != len(rest):
                # The unclosed quote is Triton's.
                raise _fault(
                    config,
                    f"graph lower bound spec expects to have '{len(rest)} dimensions, got "
                    f"{len(dims)}",
                )
            for low, high in zip(dims, rest, strict=True):
                if low > high:
                    raise _fault(
                        config,
                        f"graph lower bound spec expects input '{name}' to have dimension <= "
                        f"{high}",
                    )
            rest = dims
        least[name] = (max(1, bound.batch_size), *rest) if spec.batch_size else rest
    return least


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
