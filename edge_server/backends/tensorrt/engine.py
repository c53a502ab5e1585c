"""A plan loaded by TensorRT, on a GPU and optionally an NVDLA core."""

from __future__ import annotations

import threading
from collections import deque
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorrt as trt

from edge_server.backends.tensorrt.plan_config import PlanIO, free_over_profiles, no_such_core
from edge_server.backends.tensorrt.plan_options import (
    DeviceFacts,
    PlanTensor,
    Range,
    datatype_name,
    device_facts,
    version_of,
)
from edge_server.errors import InternalError, ModelConfigError, Unavailable
from edge_server.gpu.device import BareGpu, Devices
from edge_server.model_config.files import reading

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.gpu.device import Device

_KEPT = 64
_SHOWN = 3


def read_plan_io(plan: str, gpu: int, dla_core: int | None) -> PlanIO:
    """Return the inputs and outputs of a plan; for a separate process, because reading a plan that
    nobody vouches for may crash."""
    devices = Devices()
    path = Path(plan)
    engine = Engine(devices.gpu(gpu), path, dla_core, path.parent.parent.name)
    io = engine.io
    engine.close()
    devices.close()
    return io


def facts_of(device: Device) -> DeviceFacts:
    """Return the facts that a side-car is compared with; `device` is open, so a driver exists."""
    with device.current("count NVDLA cores"):
        cores = dla_cores()
    return device_facts(BareGpu(device.index), trt.__version__, cores, "")


class Engine:
    """One loaded plan with its own runtime, as a runtime belongs to one NVDLA core. Each GPU loads
    one plan at a time: the plan's bytes and the engine are in memory at once. `device` is open:
    without a driver, even the destructor of TensorRT's runtime fails. Raises ModelConfigError where
    TensorRT refuses the plan; Unavailable where it makes no runtime, or the NVDLA core does not
    exist."""

    def __init__(self, device: Device, plan: Path, dla_core: int | None, model: str) -> None:
        self.device = device
        self.dla_core = dla_core
        self._model = model
        self._closing = threading.Lock()
        with _one_load(device.index), device.current(f"load model '{model}'"):
            _register_plugins()
            self._runtime: trt.Runtime | None = open_runtime(dla_core)
            self.plan_bytes, self._engine = _deserialized(self._runtime, plan, model)
            self.io = _io(self._engine)

    @property
    def shares_profiles(self) -> bool:
        """Whether several contexts may use one profile: documented from TensorRT 10 on; before,
        a profile with free dimensions belongs to one context."""
        return self.io.is_fixed or version_here() >= (10, 0)

    @property
    def context_bytes(self) -> int:
        """The device memory of one context, as TensorRT reports it; 0 once the engine is closed."""
        with self._closing:
            engine: trt.ICudaEngine | None = self._engine
            if engine is None:
                return 0
            # From TensorRT 10.1 on the other one is deprecated.
            if hasattr(engine, "device_memory_size_v2"):
                return int(engine.device_memory_size_v2)
            return int(engine.device_memory_size)

    def context(self) -> Any:
        engine: trt.ICudaEngine | None = self._engine
        if engine is None:
            raise InternalError(f"model '{self._model}': its engine is closed")
        mark = trt_log().mark
        context: trt.IExecutionContext | None = engine.create_execution_context()
        if context is None:
            raise Unavailable(
                f"model '{self._model}': no execution context on {self.device}: "
                f"{trt_log().since(mark)}; fewer instances, models or smaller batches fit"
            )
        return context

    def close(self) -> None:
        """Release the engine; every context of it must be closed."""
        with self._closing, self.device.current(f"close model '{self._model}'"):
            # The engine lives in memory of the runtime, so the engine goes first.
            self._engine = None
            self._runtime = None


@cache
def _register_plugins() -> None:
    # The lean bindings lack this function.
    if hasattr(trt, "init_libnvinfer_plugins"):
        trt.init_libnvinfer_plugins(trt_log(), "")


@cache
def _one_load(gpu: int) -> threading.Lock:
    del gpu
    return threading.Lock()


def open_runtime(dla_core: int | None) -> Any:
    """Raises: Unavailable: TensorRT makes no runtime, or the NVDLA core does not exist."""
    mark = trt_log().mark
    try:
        runtime: trt.Runtime = trt.Runtime(trt_log())
    except TypeError as error:
        # pybind11 reports only that a factory returned nothing.
        raise Unavailable(f"unable to create TensorRT runtime: {trt_log().since(mark)}") from error
    if dla_core is not None:
        if dla_core >= runtime.num_DLA_cores:
            raise Unavailable(no_such_core(dla_core, runtime.num_DLA_cores, trt.__version__))
        # Set before the plan is read: deserialization binds the plan to the runtime's core.
        runtime.DLA_core = dla_core
    return runtime


def _deserialized(runtime: trt.Runtime, plan: Path, model: str) -> tuple[int, Any]:
    """Return the size of the plan in bytes, and its engine."""
    with reading(plan):
        data = plan.read_bytes()
    mark = trt_log().mark
    engine: trt.ICudaEngine | None = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise ModelConfigError(
            f"{plan}: unable to create TensorRT engine: {trt_log().since(mark)}; TensorRT "
            f"{trt.__version__} is here: run `edge-server plan build {model}`, or copy the plan "
            f"again if it is cut short ({len(data)} bytes)"
        )
    return len(data), engine


def _io(engine: trt.ICudaEngine) -> PlanIO:
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    tensors = tuple(_tensor(engine, name) for name in names)
    count = engine.num_optimization_profiles
    if version_here() < (10, 0) and count > 1:
        inputs = [t for t in tensors if t.is_input and not t.holds_shape]
        told = [{t.name: _shapes(engine, t.name, index) for t in inputs} for index in range(count)]
        tensors = free_over_profiles(tensors, told)
    free = [t for t in tensors if t.is_input and (t.holds_shape or -1 in t.shape)]
    profiles = [
        {t.name: found for t in free if (found := _range(engine, t, index)) is not None}
        for index in range(count)
    ]
    return PlanIO(tensors, tuple(profiles) if free else ())


def _tensor(engine: trt.ICudaEngine, name: str) -> PlanTensor:
    # A shape tensor that TensorRT expects on the device is an ordinary tensor.
    on_host = engine.get_tensor_location(name) == trt.TensorLocation.HOST
    format_name = engine.get_tensor_format(name).name
    return PlanTensor(
        name,
        engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT,
        datatype_name(engine.get_tensor_dtype(name).name),
        tuple(engine.get_tensor_shape(name)),
        "" if format_name == "LINEAR" else engine.get_tensor_format_desc(name) or format_name,
        bool(on_host),
    )


def _range(engine: trt.ICudaEngine, tensor: PlanTensor, profile: int) -> Range | None:
    """Return the range; None where this version of TensorRT has no function for it."""
    if not tensor.holds_shape:
        return _shapes(engine, tensor.name, profile)
    if not hasattr(engine, "get_tensor_profile_values"):
        # Before 10.3; TensorRT itself refuses values outside the range.
        return None
    least, best, most = engine.get_tensor_profile_values(profile, tensor.name)
    return Range(tuple(least), tuple(best), tuple(most))


def _shapes(engine: trt.ICudaEngine, name: str, profile: int) -> Range:
    least, best, most = engine.get_tensor_profile_shape(name, profile)
    return Range(tuple(least), tuple(best), tuple(most))


class TrtLog(trt.ILogger):  # type: ignore[misc]
    """The last errors that TensorRT logged in this process. `on_message` is called with the level
    (ERROR, WARNING or INFO) and the text of each message, on any thread, also within TensorRT's own
    calls."""

    def __init__(self) -> None:
        super().__init__()
        self._errors: deque[tuple[int, str]] = deque(maxlen=_KEPT)
        self._number = 0
        self.on_message: Callable[[str, str], None] | None = None
        self._levels = {
            trt.ILogger.INTERNAL_ERROR: "ERROR",
            trt.ILogger.ERROR: "ERROR",
            trt.ILogger.WARNING: "WARNING",
            trt.ILogger.INFO: "INFO",
        }

    @property
    def mark(self) -> int:
        return self._errors[-1][0] + 1 if self._errors else 0

    def since(self, mark: int, shown: int = _SHOWN) -> str:
        """Return the errors since `mark` as one text; errors of other threads may be among them."""
        texts = [text for number, text in list(self._errors) if number >= mark]
        return "; ".join(texts[-shown:]) or "TensorRT gave no reason"

    def log(self, severity: Any, msg: str) -> None:
        level = self._levels.get(severity)
        if level == "ERROR":
            self._errors.append((self._number, msg))
            self._number += 1
        if level is not None and self.on_message is not None:
            self.on_message(level, msg)


@cache
def trt_log() -> TrtLog:
    """Return the log of this process: TensorRT keeps its first logger."""
    return TrtLog()


def version_here() -> tuple[int, int]:
    return version_of(trt.__version__)


def dla_cores() -> int:
    """Return the number of NVDLA cores that TensorRT can use here, which decides rather than the
    board's name; a CUDA driver must be there: a Runtime made without one crashes."""
    runtime: trt.Runtime = trt.Runtime(trt_log())
    return int(runtime.num_DLA_cores)
