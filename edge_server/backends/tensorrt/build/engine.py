"""Open plans for inspection; only a process that may crash imports this: see `child`.

No function here may be called without a CUDA driver: a Runtime made without one crashes at every
call, even in its destructor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorrt as trt

from edge_server.errors import InternalError, Unsupported

if TYPE_CHECKING:
    from edge_server.backends.tensorrt.build.logger import BuildLog


def dla_cores(log: BuildLog) -> int:
    """Return the number of NVDLA cores that TensorRT can use here, which decides rather than the
    board's name."""
    runtime: trt.Runtime = trt.Runtime(log.logger)
    return int(runtime.num_DLA_cores)


def open_engine(plan: Any, dla_core: int | None, log: BuildLog) -> Any:
    """Return the engine of a plan.

    Raises:
        Unsupported: the NVDLA core does not exist.
        InternalError: TensorRT refuses the plan; the text is TensorRT's.
    """
    runtime: trt.Runtime = trt.Runtime(log.logger)
    if dla_core is not None:
        if dla_core >= runtime.num_DLA_cores:
            raise Unsupported(f"no NVDLA core {dla_core} here: {runtime.num_DLA_cores} seen")
        # Set before the plan is read: deserialization binds the plan to the runtime's core.
        runtime.DLA_core = dla_core
    engine: trt.ICudaEngine | None = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise InternalError(f"TensorRT {trt.__version__} does not load the plan: {log.errors()}")
    return engine


def information(plan: Any, dla_core: int | None, log: BuildLog) -> str:
    """Return the inspector's description of a plan, as JSON.

    Raises:
        Unsupported, InternalError: the plan cannot be opened.
    """
    engine: trt.ICudaEngine = open_engine(plan, dla_core, log)
    inspector: trt.EngineInspector = engine.create_engine_inspector()
    return str(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
