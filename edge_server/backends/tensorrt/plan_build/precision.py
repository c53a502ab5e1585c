"""The number formats in which layers may calculate, and INT8's calibration by samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorrt as trt

from edge_server.backends.tensorrt.plan_build.side_car import datatype_name
from edge_server.errors import InvalidRequest, Unsupported
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.backends.tensorrt.plan_build.build_options import BuildOptions, Shape
    from edge_server.backends.tensorrt.plan_build.profiles import Profile
    from edge_server.gpu.libcuda import BareGpu

Sample = Mapping[str, "NDArray[Any]"]

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
        wanted[tensor.name] = shape, _numpy_type(tensor)
    calibrator = make_calibrator(Samples(samples, wanted), gpu)
    if calibrator is not None and hasattr(config, "int8_calibrator"):
        gpu.enter()
        if ranges:
            config.set_calibration_profile(_fixed(builder, wanted))
        config.int8_calibrator = calibrator
    return calibrator


def _numpy_type(tensor: trt.ITensor) -> np.dtype[Any]:
    try:
        return DataType(datatype_name(tensor.dtype.name)).numpy
    except ValueError:
        raise Unsupported(
            f"input '{tensor.name}' of type {tensor.dtype.name} cannot be calibrated with samples"
        ) from None


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


class Samples:
    """Typical inputs of a network, one batch after the other.

    A network of one input has `DIR/*.npy`, one of several `DIR/<input>/*.npy`: the first files of
    all inputs form the first batch, then the second files. A file holds an input's array, batch
    dimension included; a batch of one may lack its batch dimension, which is then added.

    Args:
        wanted: input → its shape during calibration, and its numpy type.

    Raises:
        InvalidRequest: the directory has no files, or the inputs have different numbers of files.
    """

    def __init__(self, directory: Path, wanted: Mapping[str, tuple[Shape, np.dtype[Any]]]) -> None:
        self._wanted = wanted
        folders = {n: directory if len(wanted) == 1 else directory / n for n in wanted}
        self._paths = {name: sorted(folder.glob("*.npy")) for name, folder in folders.items()}
        for name, paths in self._paths.items():
            if not paths:
                raise InvalidRequest(
                    f"{folders[name]}: no .npy file to calibrate input '{name}' with; save some "
                    "hundred typical inputs there with numpy.save"
                )
        counts = {name: len(paths) for name, paths in self._paths.items()}
        if len(set(counts.values())) > 1:
            raise InvalidRequest(f"{directory}: of each input as many samples: {counts}")

    def __len__(self) -> int:
        return len(next(iter(self._paths.values())))

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples.

        Raises:
            InvalidRequest: a file's array does not have the input's shape.
        """
        for at in range(len(self)):
            yield {name: self._read(name, paths[at]) for name, paths in self._paths.items()}

    def _read(self, name: str, path: Path) -> NDArray[Any]:
        shape, dtype = self._wanted[name]
        try:
            array = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise InvalidRequest(f"{path}: no array can be read from it: {error}") from error
        if array.shape == shape[1:] and shape[:1] == (1,):
            array = array[np.newaxis]
        if array.shape != shape:
            raise InvalidRequest(
                f"{path}: has shape {list(array.shape)}, input '{name}' takes {list(shape)}"
            )
        return np.ascontiguousarray(array, dtype)


def make_calibrator(samples: Samples, gpu: BareGpu) -> Any:
    """Return the calibrator that feeds `samples` to TensorRT; None if TensorRT has no calibration.

    The builder configuration does not own the calibrator: hold it until the plan is built. Its
    `failure` is the exception that a sample raised, or None.
    """
    if not hasattr(trt, "IInt8EntropyCalibrator2"):
        return None

    class Calibrator(trt.IInt8EntropyCalibrator2):  # type: ignore[misc]
        """Never raises: TensorRT would print the exception and continue without a calibration."""

        def __init__(self) -> None:
            super().__init__()
            self._left = iter(samples)
            self.failure: Exception | None = None

        def get_batch_size(self) -> int:
            return 1

        def get_batch(self, names: Sequence[str]) -> list[int] | None:
            try:
                sample = next(self._left, None)
                if sample is None:
                    return None
                return [gpu.put(name, sample[name]) for name in names]
            except Exception as error:  # noqa: BLE001 - raised after the build
                self.failure = error
                return None

        def read_calibration_cache(self) -> None:
            """Return no cache: every build runs the samples."""

        def write_calibration_cache(self, cache: Any) -> None:
            """Discard the cache: every build runs the samples."""

    return Calibrator()
