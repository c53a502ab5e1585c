"""Recorded runs that launch in one call: CUDA graphs."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.backends.tensorrt.context import Context
from edge_server.errors import DeviceLost, EdgeServerError, Unsupported
from edge_server.gpu.graph import record_graph

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.backends.tensorrt.engine import Engine
    from edge_server.backends.tensorrt.graph_spec import GraphShapes
    from edge_server.backends.tensorrt.io_buffers import IoBuffers
    from edge_server.backends.tensorrt.plan_io import Shape, Shapes
    from edge_server.gpu.graph import Graph
    from edge_server.gpu.stream import Stream

log = logging.getLogger(__name__)


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
    graphs = Graphs()
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
        return graphs
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
