"""Plans opened for a look at them; only a process that may crash imports this: see `child`.

Nothing here may be called where there is no CUDA driver: a Runtime that was made without one
crashes at whatever is asked of it, and even when it is let go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorrt as trt

from edge_server.errors import InternalError, Unsupported

if TYPE_CHECKING:
    from edge_server.backends.tensorrt.build.logger import BuildLog


def dla_cores(log: BuildLog) -> int:
    """How many NVDLA cores TensorRT can use here: what decides, not the name of the board."""
    runtime: trt.Runtime = trt.Runtime(log.logger)
    return int(runtime.num_DLA_cores)


def open_engine(plan: Any, dla_core: int | None, log: BuildLog) -> Any:
    """The engine of a plan.

    Raises:
        Unsupported: there is no such NVDLA core.
        InternalError: TensorRT does not take the plan; the text is its own.
    """
    runtime: trt.Runtime = trt.Runtime(log.logger)
    if dla_core is not None:
        if dla_core >= runtime.num_DLA_cores:
            raise Unsupported(f"no NVDLA core {dla_core} here: {runtime.num_DLA_cores} seen")
        # Before the plan is read: from then on it is on the core that was set.
        runtime.DLA_core = dla_core
    engine: trt.ICudaEngine | None = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise InternalError(f"TensorRT {trt.__version__} does not load the plan: {log.errors()}")
    return engine


def information(plan: Any, dla_core: int | None, log: BuildLog) -> str:
    """The inspector's description of a plan, as JSON.

    Raises:
        Unsupported, InternalError: it cannot be opened.
    """
    engine: trt.ICudaEngine = open_engine(plan, dla_core, log)
    inspector: trt.EngineInspector = engine.create_engine_inspector()
    return str(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
