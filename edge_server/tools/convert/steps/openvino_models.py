"""OpenVINO: written from ONNX, and run on the CPU."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from .step import Sampling, TensorInfo, info, run_samples

# As soon as it is imported, OpenVINO sends usage data to its vendor and writes to HOME, unless this
# is missing; None hides a module.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
import openvino as ov  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    Progress = Callable[[str], None]


def from_onnx(
    progress: Progress, *, source: str, target: str, half: bool = False
) -> dict[str, Any]:
    """Write the ONNX file `source` as `target`, .xml, with the weights beside it, .bin.

    Args:
        half: keep the weights in half precision, as OpenVINO does unless it is told otherwise.
    """
    progress("converting with OpenVINO")
    ov.save_model(ov.convert_model(source), target, compress_to_fp16=half)
    command = ["ovc", "{source}", "--output_model", "{target}", f"--compress_to_fp16={half}"]
    return {"command": command}


def run(progress: Progress, *, path: str, sampling: Sampling) -> dict[str, Any]:
    """Run the model at `path` on the samples; return its interface."""
    progress("running the result in OpenVINO")
    compiled = ov.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    inputs = [_info(port) for port in compiled.inputs]
    outputs = [_info(port) for port in compiled.outputs]
    request = compiled.create_infer_request()

    def run_once(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        made = request.infer(dict(arrays))
        return {
            each["name"]: np.array(made[port])
            for each, port in zip(outputs, compiled.outputs, strict=True)
        }

    run_samples(sampling, "result", run_once)
    return {"inputs": inputs, "outputs": outputs}


def _info(port: Any) -> TensorInfo:
    shape = [d.get_length() if d.is_static else -1 for d in port.partial_shape]
    return info(port.any_name, port.element_type.to_dtype(), shape)
