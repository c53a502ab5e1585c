"""Runtime, engine and execution context."""

from __future__ import annotations

import os

import onnxruntime as ort

from tensorrt.simulated_driver import driver
from tensorrt.simulated_plan import SimulatedPlan
from tensorrt.simulated_settings import Versioned, settings
from tensorrt.simulated_types import (
    NUMPY,
    OF_ONNX,
    DataType,
    Dims,
    ILogger,
    TensorFormat,
    TensorIOMode,
    TensorLocation,
)


def init_libnvinfer_plugins(logger: object, namespace: str) -> bool:
    return True


class Runtime(Versioned):
    _real_name = "Runtime"

    def __init__(self, logger: ILogger) -> None:
        if not getattr(logger, "_is_made", False):
            raise TypeError("tensorrt.ILogger.__init__() must be called when overriding __init__")
        if not driver().is_here():
            os._exit(139)
        self._logger = logger
        self._dla_core = -1

    @property
    def num_DLA_cores(self) -> int:  # noqa: N802 - TensorRT's name
        return settings.dla_cores

    @property
    def DLA_core(self) -> int:  # noqa: N802 - TensorRT's name
        return self._dla_core

    @DLA_core.setter
    def DLA_core(self, core: int) -> None:  # noqa: N802 - TensorRT's name
        self._dla_core = core

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        if settings.crash == "deserialize":
            os.abort()
        driver().enter()
        found = SimulatedPlan.read(memoryview(serialized_engine).tobytes())
        if found is not None and found[0].crashes:
            os.abort()
        trouble = self._trouble(found[0] if found else None)
        session = None
        if not trouble and found is not None:
            session = _session(found[1])
            trouble = (
                "" if session else "Serialization (Serialization assertion failed. data is cut)"
            )
        if trouble or found is None:
            self._logger.log(
                ILogger.ERROR, f"IRuntime::deserializeCudaEngine: Error Code 1: {trouble}"
            )
            return None
        return ICudaEngine(self, found[0], session)

    def _trouble(self, plan: SimulatedPlan | None) -> str:
        if plan is None:
            return (
                "Serialization (Serialization assertion magicTagRead == kMAGIC_TAG failed.Magic "
                "tag does not match)"
            )
        if plan.version != settings.version:
            return (
                "Serialization (Serialization assertion stdVersionRead == kSERIALIZATION_VERSION "
                f"failed.Version tag does not match. Note: Current Version: {settings.version}, "
                f"Serialized Engine Version: {plan.version})"
            )
        if settings.failing("deserialize"):
            return "Cuda Runtime (out of memory)"
        if plan.dla and not 0 <= self._dla_core < settings.dla_cores:
            return "Cudla (no NVDLA core is set for a plan with parts for one)"
        return ""


def _session(onnx: bytes) -> ort.InferenceSession | None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        return ort.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001 - whatever is wrong with it
        return None


class ICudaEngine(Versioned):
    _real_name = "ICudaEngine"

    def __init__(
        self, runtime: Runtime, plan: SimulatedPlan, session: ort.InferenceSession
    ) -> None:
        # As pybind11 keeps it alive.
        self._runtime = runtime
        self._logger = runtime._logger
        self._plan = plan
        self._session = session
        self._ins = {node.name: node for node in session.get_inputs()}
        self._outs = {node.name: node for node in session.get_outputs()}
        self._used_profiles: set[int] = set()

    @property
    def num_io_tensors(self) -> int:
        return len(self._ins) + len(self._outs)

    @property
    def device_memory_size(self) -> int:
        return self._plan.context_bytes

    @property
    def device_memory_size_v2(self) -> int:
        return self._plan.context_bytes

    def get_tensor_name(self, index: int) -> str:
        return [*self._ins, *self._outs][index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self._ins else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        if name in self._plan.types:
            return DataType[self._plan.types[name]]
        return OF_ONNX[self._node(name).type]

    def get_tensor_shape(self, name: str) -> Dims:
        shape = tuple(d if isinstance(d, int) else -1 for d in self._node(name).shape)
        return Dims(shape)

    def get_tensor_location(self, name: str) -> TensorLocation:
        on_host = name in self._plan.holding_shapes
        return TensorLocation.HOST if on_host else TensorLocation.DEVICE

    def get_tensor_format(self, name: str) -> TensorFormat:
        return TensorFormat[self._plan.formats.get(name, "LINEAR")]

    def get_tensor_format_desc(self, name: str) -> str:
        layout = self._plan.formats.get(name)
        return (
            f"Channel vectorized row major {layout} format" if layout else "Row major linear format"
        )

    @property
    def num_optimization_profiles(self) -> int:
        return max(1, len(self._plan.profiles))

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        profiles = self._plan.profiles
        shape = tuple(self.get_tensor_shape(name))
        known = profiles[profile_index].get(name) if profiles else None
        return [Dims(sizes) for sizes in known or (shape, shape, shape)]

    def get_tensor_profile_values(self, name: int, profile_index: str) -> list[list[int]]:
        # The real signature has these two names for what are a number and a name.
        if not isinstance(name, int) or not isinstance(profile_index, str):
            raise TypeError("get_tensor_profile_values(): incompatible function arguments")
        return [list(sizes) for sizes in self._plan.profiles[name][profile_index]]

    def create_engine_inspector(self) -> object:
        from tensorrt.simulated_builder import EngineInspector

        return EngineInspector(self._plan.dla)

    def create_execution_context(self) -> object | None:
        from tensorrt.simulated_context import IExecutionContext

        room = None if settings.failing("context") else driver().allocate(self._plan.context_bytes)
        if room is None:
            self._logger.log(
                ILogger.ERROR,
                "IExecutionContext::IExecutionContext: Error Code 2: OutOfMemory (Requested size "
                f"was {self._plan.context_bytes} bytes.)",
            )
            return None
        return IExecutionContext(self, room)

    def _node(self, name: str) -> object:
        return self._ins[name] if name in self._ins else self._outs[name]

    def _numpy(self, name: str) -> object:
        return NUMPY[self.get_tensor_dtype(name)]
