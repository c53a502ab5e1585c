"""OpenVINO: written from ONNX, and run on the CPU."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .step import Arrays, StepJob, TensorInfo, info

# As soon as it is imported, OpenVINO sends usage data to its vendor and writes to HOME, unless this
# is missing; None hides a module.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
import openvino as ov  # noqa: E402


def from_onnx(job: StepJob, *, half: bool) -> dict[str, Any]:
    """Write the ONNX file as .xml, with the weights beside it, .bin.

    Args:
        half: keep the weights in half precision, as OpenVINO does unless it is told otherwise.
    """
    job.progress("converting with OpenVINO")
    ov.save_model(ov.convert_model(job.source), job.target, compress_to_fp16=half)
    command = ["ovc", "{source}", "--output_model", "{target}", f"--compress_to_fp16={half}"]
    return {"command": command}


def run(job: StepJob) -> dict[str, Any]:
    """Run the model on the samples; return its interface."""
    compiled = ov.Core().compile_model(job.source, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    inputs = [_info(port) for port in compiled.inputs]
    outputs = [_info(port) for port in compiled.outputs]
    request = compiled.create_infer_request()

    def run_once(arrays: Arrays) -> Arrays:
        made = request.infer(dict(arrays))
        return {
            each["name"]: np.array(made[port])
            for each, port in zip(outputs, compiled.outputs, strict=True)
        }

    job.run_result("OpenVINO", run_once)
    return {"inputs": inputs, "outputs": outputs}


def _info(port: Any) -> TensorInfo:
    shape = [d.get_length() if d.is_static else -1 for d in port.partial_shape]
    return info(port.any_name, port.element_type.to_dtype(), shape)
