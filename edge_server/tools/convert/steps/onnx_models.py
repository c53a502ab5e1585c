"""ONNX files: read, run, checked, simplified, in half precision, quantised."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

# Read at import: without it usage telemetry is recorded in HOME and sent to the vendor.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime as ort

from edge_server.errors import InvalidRequest

from .step import Arrays, StepJob, TensorInfo, info, recorded_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

_TYPES = {
    "tensor(bool)": np.bool_,
    "tensor(uint8)": np.uint8,
    "tensor(uint16)": np.uint16,
    "tensor(uint32)": np.uint32,
    "tensor(uint64)": np.uint64,
    "tensor(int8)": np.int8,
    "tensor(int16)": np.int16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(float16)": np.float16,
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(string)": None,
}
# A protobuf message, which an ONNX file is, ends here; larger weights lie in files beside it.
_LARGEST_BYTES = (1 << 31) - 1
# TensorRT takes symmetric INT8 only, and no bias in INT32.
_INT8_OPTIONS = {"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False}


def take(job: StepJob) -> dict[str, Any]:
    """Check the ONNX file, copy it, and run it on the samples."""
    job.progress("checking the ONNX file")
    _check(job.source)
    _save(onnx.load(job.source), job.target)
    session = _session(job.source)
    job.run_source(_interface(session)[0], _runner(session))
    return {}


def run(job: StepJob) -> dict[str, Any]:
    """Check the ONNX file and run it on the samples; return its interface."""
    _check(job.source)
    session = _session(job.source)
    job.run_result("ONNX Runtime", _runner(session))
    inputs, outputs = _interface(session)
    return {"inputs": inputs, "outputs": outputs}


def simplify(job: StepJob) -> dict[str, Any]:
    import onnxsim  # noqa: PLC0415 - the other steps do without it

    job.progress("simplifying")
    before = onnx.load(job.source)
    after, same = onnxsim.simplify(before)
    if not same:
        raise InvalidRequest(f"{job.source}: the simplified network differs; leave out --simplify")
    _save(after, job.target)
    counts = len(before.graph.node), len(after.graph.node)
    return {
        "command": ["onnxsim", "{source}", "{target}"],
        "note": f"simplified: {counts[0]} nodes before, {counts[1]} after",
    }


def to_fp16(job: StepJob, *, keep: Sequence[str] = ()) -> dict[str, Any]:
    """Write the network in half precision; its inputs and outputs keep their types.

    Args:
        keep: names of nodes that calculate as before.
    """
    from onnxruntime.transformers.float16 import (  # noqa: PLC0415 - the other steps do without it
        convert_float_to_float16,
    )
    from onnxruntime.transformers.onnx_model import OnnxModel  # noqa: PLC0415 - as above

    job.progress("converting to FP16")
    half = convert_float_to_float16(
        onnx.load(job.source), keep_io_types=True, node_block_list=list(keep)
    )
    model = OnnxModel(half)
    # The converter puts casts at the end, behind the nodes that read them.
    model.topological_sort()
    _save(model.model, job.target)
    return {}


def to_int8(
    job: StepJob,
    *,
    operators: Sequence[str],
    calibration: Sequence[str],
    per_channel: bool,
    optimized: bool = False,
) -> dict[str, Any]:
    """Write the network with Q/DQ nodes around `operators`.

    Args:
        operators: ONNX operators; those of other kinds stay as they are.
        calibration: files of recorded samples, whose ranges the scales are of.
        per_channel: a scale for each channel of the weights, not one for all.
        optimized: the network needs no preparation, which writes out what follows of constants.

    Raises:
        InvalidRequest: a recorded sample does not fit the network, or it has none of `operators`.
    """
    from onnxruntime.quantization import (  # noqa: PLC0415 - the other steps do without it
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import (  # noqa: PLC0415 - as above
        quant_pre_process,
    )

    present = {node.op_type for node in onnx.load(job.source, load_external_data=False).graph.node}
    if not present & set(operators):
        raise InvalidRequest(
            f"{job.source}: has no {' or '.join(operators)}; give others of its operators with "
            f"--int8-operators: {', '.join(sorted(present))}"
        )
    inputs, _ = _interface(_session(job.source))

    class RecordedSamples(CalibrationDataReader):  # type: ignore[misc]  # ONNX Runtime has no types
        def __init__(self) -> None:
            self._left = recorded_samples(calibration, inputs)
            self._read = 0

        def get_next(self) -> dict[str, NDArray[Any]] | None:
            sample = next(self._left, None)
            if sample is not None:
                self._read += 1
                job.progress(f"calibrating: sample {self._read} of {len(calibration)}")
                sample = {name: _fed(array) for name, array in sample.items()}
            return sample

    job.progress("preparing the network for INT8")
    # Without symbolic shapes, which need sympy.
    prepared = f"{job.target}.prepared"
    quant_pre_process(job.source, prepared, skip_symbolic_shape=True, skip_optimization=optimized)
    quantize_static(
        prepared,
        job.target,
        RecordedSamples(),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=list(operators),
        per_channel=per_channel,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        extra_options=_INT8_OPTIONS,
    )
    Path(prepared).unlink()
    nodes = onnx.load(job.target, load_external_data=False).graph.node
    quantized = sum(node.op_type == "QuantizeLinear" for node in nodes)
    return {"note": f"quantised: {quantized} tensors, with {len(calibration)} recorded samples"}


def _check(path: str) -> None:
    try:
        onnx.checker.check_model(path, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise InvalidRequest(f"{path}: is no valid ONNX file: {str(error).strip()}") from None


def _save(model: Any, target: str) -> None:
    """Write one file, or with the weights beside it where one file cannot hold them."""
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    large = model.ByteSize() > _LARGEST_BYTES
    onnx.save(model, target, save_as_external_data=large, location=f"{Path(target).name}.data")


def _session(path: str) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    try:
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's exceptions share no base class
        first = str(error).strip().splitlines()[0]
        raise InvalidRequest(f"{path}: ONNX Runtime cannot load it: {first}") from None


def _interface(session: Any) -> tuple[list[TensorInfo], list[TensorInfo]]:
    def of(node: Any) -> TensorInfo:
        if node.type not in _TYPES:
            raise InvalidRequest(
                f"tensor '{node.name}' has type {node.type}, which cannot be compared"
            )
        return info(node.name, _TYPES[node.type], node.shape)

    return [of(node) for node in session.get_inputs()], [of(node) for node in session.get_outputs()]


def _runner(session: Any) -> Callable[[Arrays], Arrays]:
    names = [node.name for node in session.get_outputs()]

    def run_once(inputs: Arrays) -> Arrays:
        fed = {name: _fed(array) for name, array in inputs.items()}
        return dict(zip(names, session.run(names, fed), strict=True))

    return run_once


def _fed(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(object) if array.dtype.kind == "U" else array
