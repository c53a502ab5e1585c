"""The number formats in which layers may calculate, on every version of TensorRT."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorrt as trt

from edge_server.errors import InvalidRequest, Unsupported
from edge_server.backends.tensorrt.build.calibration import Samples
from edge_server.backends.tensorrt.build.calibrator import make_calibrator
from edge_server.backends.tensorrt.build.datatypes import numpy_type

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from edge_server.gpu.bare_gpu import BareGpu
    from edge_server.backends.tensorrt.build.profiles import Profile
    from edge_server.backends.tensorrt.build.build_options import BuildOptions, Shape

_TYPED_HINT = (
    "give an ONNX file that is FP16-typed, or quantised with Q/DQ nodes (NVIDIA ModelOpt: AutoCast "
    "and ONNX quantisation), and leave the precision out"
)


def is_typed(options: BuildOptions, version: tuple[int, int]) -> bool:
    """Return whether every tensor has the type that the ONNX file gives it."""
    return version >= (11, 0) or options.strongly_typed


def check_precision(options: BuildOptions, version: tuple[int, int]) -> None:
    """Check that this version of TensorRT supports the precision.

    Raises:
        InvalidRequest, Unsupported: it does not; the text gives the alternatives.
    """
    number = ".".join(map(str, version))
    if options.strongly_typed and version < (10, 0):
        raise Unsupported(f"TensorRT {number} has no strongly typed networks, 10 is the first")
    if options.precision == "fp16" and is_typed(options, version):
        which = "a strongly typed network" if version < (11, 0) else f"TensorRT {number}"
        raise Unsupported(f"{which} takes no --fp16: {_TYPED_HINT}")
    if options.calibration and is_typed(options, version):
        which = "a strongly typed network" if version < (11, 0) else f"TensorRT {number}"
        raise Unsupported(f"{which} is not calibrated: {_TYPED_HINT}")
    if options.calibration and options.precision != "int8":
        raise InvalidRequest("calibration is for INT8 only; add --int8")
    if (
        options.dla_core is not None
        and options.precision == "fp32"
        and not is_typed(options, version)
    ):
        raise InvalidRequest("NVDLA calculates in FP16 and INT8 only; add --fp16 or --int8")


def check_types(
    network: trt.INetworkDefinition, onnx: Path, options: BuildOptions, version: tuple[int, int]
) -> None:
    """Check that the options allow the network's types.

    Raises:
        InvalidRequest: `onnx` is FP16-typed, and no option allows FP16; the text names the remedy.
    """
    if is_typed(options, version) or options.precision != "fp32":
        return
    found = _of_fp16(network)
    if not found:
        return
    remedy = "--fp16 (plan_precision: fp16)"
    if version >= (10, 0):
        remedy = f"--strongly-typed (plan_strongly_typed: true) to keep its types, or {remedy}"
    raise InvalidRequest(
        f"{onnx}: is typed FP16 ({found}), which TensorRT {'.'.join(map(str, version))} takes only "
        f"where FP16 is allowed; add {remedy}"
    )


def set_precision(
    network: trt.INetworkDefinition,
    config: trt.IBuilderConfig,
    options: BuildOptions,
    *,
    typed: bool,
) -> None:
    """Let the layers calculate in the formats that `options` allow.

    Raises:
        InvalidRequest: INT8 is requested, and neither samples nor the network give the tensors'
            ranges.
    """
    if options.precision == "int8" and not options.calibration and not _is_quantised(network):
        remedy = "" if typed else ", or samples with --calibration DIR"
        raise InvalidRequest(
            "INT8 needs the range of every tensor: give an ONNX file with Q/DQ nodes (NVIDIA "
            f"ModelOpt){remedy}"
        )
    # A typed network takes no flags; from TensorRT 11 on the flags do not even exist.
    if not typed and hasattr(trt.BuilderFlag, "FP16"):
        if options.precision in ("fp16", "int8"):
            config.set_flag(trt.BuilderFlag.FP16)
        if options.precision == "int8":
            config.set_flag(trt.BuilderFlag.INT8)


def set_calibrator(
    builder: trt.Builder,
    network: trt.INetworkDefinition,
    config: trt.IBuilderConfig,
    samples: Path,
    ranges: Profile,
    *,
    gpu: BareGpu | None,
) -> Any:
    """Let TensorRT derive the ranges from `samples`; hold the returned object until the plan is
    built.

    Raises:
        InvalidRequest: no GPU is available to run the samples, or they do not fit the network.
    """
    if gpu is None:
        raise InvalidRequest("calibration runs the network, which needs a GPU; there is none here")
    wanted = {}
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        # The minimum, whose batch size is 1: one sample per file.
        shape = ranges[tensor.name].min if tensor.name in ranges else tuple(tensor.shape)
        wanted[tensor.name] = shape, np.dtype(numpy_type(tensor.dtype.name))
    calibrator = make_calibrator(Samples(samples, wanted), gpu)
    if calibrator is not None and hasattr(config, "int8_calibrator"):
        gpu.enter()
        if ranges:
            config.set_calibration_profile(_fixed(builder, wanted))
        config.int8_calibrator = calibrator
    return calibrator


def _fixed(builder: trt.Builder, wanted: Mapping[str, tuple[Shape, object]]) -> Any:
    profile: trt.IOptimizationProfile = builder.create_optimization_profile()
    for name, (shape, _) in wanted.items():
        profile.set_shape(name, shape, shape, shape)
    return profile


def _of_fp16(network: trt.INetworkDefinition) -> str:
    """Return one tensor that the ONNX file types as FP16; empty if it has none."""
    for index in range(network.num_inputs):
        given: trt.ITensor = network.get_input(index)
        if given.dtype == trt.DataType.HALF:
            return f"input '{given.name}'"
    for index in range(network.num_layers):
        layer: trt.ILayer = network.get_layer(index)
        # Weights may be FP16 in a network that is otherwise not.
        if layer.type == trt.LayerType.CONSTANT:
            continue
        made = [layer.get_output(at) for at in range(layer.num_outputs)]
        if any(tensor.dtype == trt.DataType.HALF for tensor in made if tensor is not None):
            return f"layer '{layer.name}'"
    return ""


def _is_quantised(network: trt.INetworkDefinition) -> bool:
    return any(
        network.get_layer(index).type == trt.LayerType.DEQUANTIZE
        for index in range(network.num_layers)
    )
