"""Builder, network, configuration and parser, as far as this project asks for them.

What is built is the ONNX file with a head; it takes as long as the settings say.
"""

from __future__ import annotations

import enum
import json
import time

from tensorrt.simulated_plan import SimulatedPlan
from tensorrt.simulated_runtime import _session
from tensorrt.simulated_settings import Versioned, has_name, settings
from tensorrt.simulated_types import OF_ONNX, Dims, ILogger


def _enumeration(name: str, members: str) -> type[enum.IntEnum]:
    return enum.IntEnum(name, members, start=0)


BuilderFlag = _enumeration("BuilderFlag", "FP16 INT8 GPU_FALLBACK")
DeviceType = _enumeration("DeviceType", "GPU DLA")
LayerInformationFormat = _enumeration("LayerInformationFormat", "ONELINE JSON")
LayerType = _enumeration("LayerType", "CONVOLUTION DEQUANTIZE")
MemoryPoolType = _enumeration("MemoryPoolType", "WORKSPACE DLA_MANAGED_SRAM")
NetworkDefinitionCreationFlag = _enumeration(
    "NetworkDefinitionCreationFlag", "EXPLICIT_BATCH STRONGLY_TYPED"
)
ProfilingVerbosity = _enumeration("ProfilingVerbosity", "LAYER_NAMES_ONLY NONE DETAILED")


class Builder(Versioned):
    _real_name = "Builder"

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    @property
    def num_DLA_cores(self) -> int:  # noqa: N802 - TensorRT's name
        return settings.dla_cores

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        return INetworkDefinition()

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(
        self, network: INetworkDefinition, config: IBuilderConfig
    ) -> bytes | None:
        _take_time(vars(config).get("progress_monitor"))
        if settings.failing("build"):
            self._logger.log(ILogger.ERROR, "Error Code 10: Internal Error (no implementation)")
            return None
        plan = SimulatedPlan(
            version=settings.version,
            dla=config.default_device_type == DeviceType.DLA,
            profiles=config._profiles,
        )
        return plan.file(network._onnx)


def _take_time(monitor: IProgressMonitor | None) -> None:
    steps, phase = 20, "timing kernels"
    if monitor is not None:
        monitor.phase_start(phase, None, steps)
    for step in range(steps):
        time.sleep(settings.build_s / steps)
        if monitor is not None:
            monitor.step_complete(phase, step)
    if monitor is not None:
        monitor.phase_finish(phase)


class IProgressMonitor:
    """Its methods are the subclass's."""


class INetworkDefinition(Versioned):
    _real_name = "INetworkDefinition"

    def __init__(self) -> None:
        self._onnx = b""
        self._ins: list[ITensor] = []
        self._outs: list[ITensor] = []

    num_inputs = property(lambda self: len(self._ins))
    num_outputs = property(lambda self: len(self._outs))
    # All that is asked of layers is whether one is of Q/DQ nodes.
    num_layers = property(lambda self: int(b"DequantizeLinear" in self._onnx))

    def get_layer(self, index: int) -> ILayer:
        return ILayer()

    def get_input(self, index: int) -> ITensor:
        return self._ins[index]

    def get_output(self, index: int) -> ITensor:
        return self._outs[index]


class ILayer(Versioned):
    _real_name = "ILayer"
    type = LayerType.DEQUANTIZE


class ITensor(Versioned):
    _real_name = "ITensor"

    def __init__(self, node: object) -> None:
        self._node = node

    name = property(lambda self: self._node.name)
    dtype = property(lambda self: OF_ONNX[self._node.type])
    is_shape_tensor = property(lambda self: False)

    @property
    def shape(self) -> Dims:
        return Dims(d if isinstance(d, int) else -1 for d in self._node.shape)


class IOptimizationProfile(Versioned):
    _real_name = "IOptimizationProfile"

    def __init__(self) -> None:
        self._ranges: dict[str, tuple] = {}

    def set_shape(self, input: str, min: tuple, opt: tuple, max: tuple) -> None:  # noqa: A002
        self._ranges[input] = (tuple(min), tuple(opt), tuple(max))


class IBuilderConfig(Versioned):
    _real_name = "IBuilderConfig"

    def __init__(self) -> None:
        self._profiles: list[dict] = []
        self.default_device_type = DeviceType.GPU
        self.DLA_core = -1
        self.profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY

    def set_memory_pool_limit(self, pool: MemoryPoolType, pool_size: int) -> None:
        self._pool_bytes = pool_size

    def set_flag(self, flag: BuilderFlag) -> None:
        if not has_name("BuilderFlag", flag.name):
            raise AttributeError(flag.name)

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self._profiles.append(profile._ranges)
        return len(self._profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache:
        return ITimingCache()

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        return True

    def get_timing_cache(self) -> ITimingCache:
        return ITimingCache()


class ITimingCache(Versioned):
    _real_name = "ITimingCache"

    def serialize(self) -> bytes:
        return b"measured"


class ParserError(Versioned):
    _real_name = "ParserError"

    def node(self) -> int:
        return -1

    def desc(self) -> str:
        return "the file is no ONNX model"


class OnnxParser(Versioned):
    _real_name = "OnnxParser"

    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self._network = network
        self._errors: list[ParserError] = []

    num_errors = property(lambda self: len(self._errors))

    def get_error(self, index: int) -> ParserError:
        return self._errors[index]

    def parse_from_file(self, model: str) -> bool:
        with open(model, "rb") as file:  # noqa: PTH123 - as C++ does
            self._network._onnx = file.read()
        session = _session(self._network._onnx)
        if session is None:
            self._errors.append(ParserError())
            return False
        self._network._ins = [ITensor(node) for node in session.get_inputs()]
        self._network._outs = [ITensor(node) for node in session.get_outputs()]
        return True


class EngineInspector(Versioned):
    _real_name = "EngineInspector"

    def __init__(self, dla: bool) -> None:
        self._dla = dla

    def get_engine_information(self, format: LayerInformationFormat) -> str:  # noqa: A002
        kind = "DLA" if self._dla else "CaskConvolution"
        return json.dumps({"Layers": [{"Name": "all of it", "LayerType": kind}]})
