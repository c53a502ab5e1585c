"""A simulation of TensorRT's builder, of the version in SIMULATED_TENSORRT (8.6 to 11.4).

It builds nothing: a "plan" is a JSON list of what was asked for. What a version's classes do not
have, by `tests/support/tensorrt_api/names.json`, they do not have here either, to read or to set.
Some names of ONNX files make it fail as the real one does. With SIMULATED_DLA cores, and with
SIMULATED_LEAN no builder; a Runtime without a CUDA driver crashes, as the real one does.
"""
# ruff: noqa: F821 - which enums there are says names.json

from __future__ import annotations

import ctypes
import enum
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_VERSION = os.environ.get("SIMULATED_TENSORRT", "10.3")
_DLA_CORES = int(os.environ.get("SIMULATED_DLA", "2"))
__version__ = f"{_VERSION}.0.30" if _VERSION.count(".") == 1 else _VERSION


def _names() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    said = json.loads((_HERE.parent / "support" / "tensorrt_api" / "names.json").read_text())
    for name, groups in said.items():
        for versions, members in groups.items():
            if _VERSION in versions.split():
                found.setdefault(name, []).extend(m.partition(":")[0] for m in members.split())
    return found


_NAMES = _names()
for _name in [
    "BuilderFlag",
    "DataType",
    "DeviceType",
    "LayerInformationFormat",
    "LayerType",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "OnnxParserFlag",
    "ProfilingVerbosity",
]:
    if _name in _NAMES[""]:
        _members = [m for m in sorted(_NAMES[_name]) if m.isupper()]
        globals()[_name] = enum.IntEnum(_name, _members, start=0)


class _Limited:
    """Has what the version's class has, and what starts with an underscore."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in _NAMES[type(self).__name__]:
            raise AttributeError(f"{type(self).__name__} of {_VERSION} has no {name}")
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in _NAMES[type(self).__name__]:
            raise AttributeError(f"{type(self).__name__} of {_VERSION} has no {name}")
        object.__setattr__(self, name, value)


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def __init__(self) -> None:
        """The real one is to be called too."""


if "IProgressMonitor" in _NAMES[""]:

    class IProgressMonitor:
        pass


if "IInt8EntropyCalibrator2" in _NAMES[""]:

    class IInt8EntropyCalibrator2:
        pass


class IOptimizationProfile(_Limited):
    def __init__(self) -> None:
        self._said: dict[str, Any] = {}

    def set_shape(self, name: str, *ranges: tuple[int, ...]) -> None:
        self._said[name] = ranges

    def set_shape_input(self, name: str, *ranges: tuple[int, ...]) -> None:
        self._said[f"values of {name}"] = ranges


class ITensor(_Limited):
    def __init__(self, name: str, shape: tuple[int, ...], *, holds_shape: bool = False) -> None:
        self.name, self.shape, self.is_shape_tensor = name, shape, holds_shape
        self.dtype = DataType.INT32 if holds_shape else DataType.FLOAT


class ILayer(_Limited):
    def __init__(self, kind: Any) -> None:
        self.type = kind


class INetworkDefinition(_Limited):
    def __init__(self, flags: int) -> None:
        self._flags = flags
        self._inputs: list[ITensor] = []
        self._outputs: list[ITensor] = []
        self._layers: list[ILayer] = []

    num_inputs = property(lambda self: len(self._inputs))
    num_outputs = property(lambda self: len(self._outputs))
    num_layers = property(lambda self: len(self._layers))

    def get_input(self, index: int) -> ITensor:
        return self._inputs[index]

    def get_output(self, index: int) -> ITensor:
        return self._outputs[index]

    def get_layer(self, index: int) -> ILayer:
        return self._layers[index]


class ITimingCache(_Limited):
    def __init__(self, data: bytes) -> None:
        self._data = data

    def serialize(self) -> bytes:
        return self._data + b"+"


class IBuilderConfig(_Limited):
    def __init__(self) -> None:
        self._said: list[Any] = []
        self._profiles: list[Any] = []
        self._cache = ITimingCache(b"")
        self._monitor: Any = None
        self._calibrator: Any = None
        self._dla: int | None = None

    def set_memory_pool_limit(self, pool: Any, size: int) -> None:
        self._said.append(["limit", pool.name, size])

    def set_flag(self, flag: Any) -> None:
        self._said.append(["flag", flag.name])

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self._profiles.append(profile._said)
        return len(self._profiles) - 1

    def set_calibration_profile(self, profile: IOptimizationProfile) -> bool:
        self._said.append(["calibration profile", profile._said])
        return True

    def create_timing_cache(self, data: bytes) -> ITimingCache | None:
        return None if data.startswith(b"damaged") else ITimingCache(data)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self._cache = cache
        return not ignore_mismatch

    def get_timing_cache(self) -> ITimingCache:
        return self._cache

    profiling_verbosity = property(lambda _: None, lambda self, v: self._say("verbosity", v.name))
    default_device_type = property(lambda _: None, lambda self, v: self._say("device", v.name))
    DLA_core = property(lambda _: None, lambda self, core: self._on_dla(core))
    int8_calibrator = property(lambda _: None, lambda self, v: setattr(self, "_calibrator", v))
    progress_monitor = property(lambda _: None, lambda self, v: setattr(self, "_monitor", v))

    def _say(self, *what: Any) -> None:
        self._said.append(list(what))

    def _on_dla(self, core: int) -> None:
        self._dla = core
        self._say("core", core)


class Builder(_Limited):
    def __init__(self, logger: Any) -> None:
        if not _driver():
            logger.log(ILogger.ERROR, "CUDA initialization failure with error: 35")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._logger = logger

    num_DLA_cores = property(lambda _: _DLA_CORES)  # noqa: N815

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        return INetworkDefinition(flags)

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(
        self, network: INetworkDefinition, config: IBuilderConfig
    ) -> bytes | None:
        name = network._name
        self._logger.log(ILogger.WARNING, "this is a simulation")
        if "crash" in name:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "hang" in name:
            time.sleep(600)
        if "hungry" in name:
            bytearray(1 << 30)
        if "impossible" in name:
            self._logger.log(ILogger.ERROR, "Could not find any implementation for node conv1")
            return None
        major = int(_VERSION.split(".")[0])
        is_typed = major >= 11 or (major == 10 and network._flags)
        if "half" in name and not is_typed and ["flag", "FP16"] not in config._said:
            return None
        if (monitor := config._monitor) is not None:
            monitor.phase_start("Building engine", None, 2)
            monitor.step_complete("Building engine", 0)
            monitor.step_complete("Building engine", 1)
            monitor.phase_finish("Building engine")
        samples = 0
        if config._calibrator is not None:
            while config._calibrator.get_batch([i.name for i in network._inputs]) is not None:
                samples += 1
        said = {
            "flags": network._flags,
            "said": config._said,
            "profiles": config._profiles,
            "samples": samples,
            "dla": config._dla,
            "tensors": [t.name for t in (*network._inputs, *network._outputs)],
            "parser": network._parser_flags,
            "shapes": {
                t.name: _engine_shape(t, config._profiles)
                for t in (*network._inputs, *network._outputs)
            },
        }
        return json.dumps(said).encode()


class ParserError(_Limited):
    def __init__(self, node: int, desc: str) -> None:
        self._node, self._desc = node, desc

    def node(self) -> int:
        return self._node

    def desc(self) -> str:
        return self._desc

    def node_name(self) -> str:
        return "conv1"

    def node_operator(self) -> str:
        return "Conv"


class OnnxParser(_Limited):
    def __init__(self, network: INetworkDefinition, logger: Any) -> None:
        self._network = network
        self._errors: list[ParserError] = []
        network._parser_flags = []
        assert logger is not None

    num_errors = property(lambda self: len(self._errors))

    def set_flag(self, flag: Any) -> None:
        self._network._parser_flags.append(flag.name)

    def get_error(self, index: int) -> ParserError:
        return self._errors[index]

    def parse_from_file(self, path: str) -> bool:
        name = Path(path).name
        network = self._network
        network._name = name
        if "unreadable" in name:
            self._errors = [ParserError(-1, "no such operator: Wish"), ParserError(7, "bad axis")]
            return False
        shape = (1, 3, 4) if "fixed" in name else (-1, 3, 4)
        network._inputs = [ITensor("x", shape)]
        if "sized" in name:
            network._inputs.append(ITensor("size", (2,), holds_shape=True))
        network._outputs = [ITensor("y", shape)]
        if "quantised" in name:
            network._layers = [ILayer(LayerType.DEQUANTIZE)]
        return True


class EngineInspector(_Limited):
    def __init__(self, said: dict[str, Any]) -> None:
        self._said = said

    def get_engine_information(self, form: Any) -> str:
        assert form.name == "JSON"
        layers = [{"Name": "conv1", "LayerType": "CaskConvolution"}]
        if self._said["dla"] is not None:
            layers = [
                {"Name": "Reformatting CopyNode for x", "LayerType": "Reformat"},
                {"Name": "{ForeignNode[conv1...conv9]}", "LayerType": "DLA"},
                {"Name": "resize", "LayerType": "Resize"},
                {"Name": "softmax", "LayerType": "SoftMax"},
            ]
        key = "I/O Tensors" if _VERSION.startswith("11") else "Bindings"
        return json.dumps({"Layers": layers, key: self._said["tensors"]})


class ICudaEngine(_Limited):
    def __init__(self, said: dict[str, Any]) -> None:
        self._said = said

    num_io_tensors = property(lambda self: len(self._said["tensors"]))

    def get_tensor_name(self, index: int) -> str:
        return str(self._said["tensors"][index])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._said["shapes"][name])

    def get_tensor_format_desc(self, name: str) -> str:
        return f"Row major linear FP32 format of {name}"

    def create_engine_inspector(self) -> EngineInspector:
        return EngineInspector(self._said)


def _engine_shape(tensor: ITensor, profiles: list[dict[str, Any]]) -> list[int]:
    """With a size where every profile says the same one, as the real engine has it; an output's
    batch is the inputs'."""
    ranges = [p.get(tensor.name) or next(iter(p.values()), None) for p in profiles]
    fixed = {r[0][0] if r and r[0][0] == r[2][0] else -1 for r in ranges}
    batch = fixed.pop() if len(fixed) == 1 else -1
    return [batch if not at and size == -1 else size for at, size in enumerate(tensor.shape)]


class Runtime(_Limited):
    def __init__(self, logger: Any) -> None:
        if not _driver():
            os.kill(os.getpid(), signal.SIGSEGV)
        self._logger = logger

    num_DLA_cores = property(lambda _: _DLA_CORES)  # noqa: N815
    DLA_core = property(lambda self: self._core, lambda self, core: setattr(self, "_core", core))

    def deserialize_cuda_engine(self, data: bytes) -> ICudaEngine | None:
        said = json.loads(data) if bytes(data).startswith(b"{") else None
        if said is None:
            self._logger.log(ILogger.ERROR, "The engine plan file is not compatible")
            return None
        if said["dla"] is not None and said["dla"] != self._core:
            self._logger.log(ILogger.ERROR, "the core was not set before the plan was read")
            return None
        return ICudaEngine(said)


def _driver() -> bool:
    try:
        return bool(ctypes.CDLL("libcuda.so.1").cuInit(0) == 0)
    except OSError:
        return False


# What the version does not have at all.
for _name in [n for n in list(globals()) if n[0].isupper() and n[0] != "_"]:
    if isinstance(globals()[_name], type) and _name not in _NAMES[""] and _name != "Path":
        del globals()[_name]
print("TensorRT may print where it likes", file=sys.stdout, flush=True)


if os.environ.get("SIMULATED_LEAN"):
    del Builder
