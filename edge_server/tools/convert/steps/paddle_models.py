"""Paddle: inference models, written as ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
from paddle import inference

from edge_server.errors import InvalidRequest

from .step import Arrays, StepJob, TensorInfo, info, run_command_line

_OPSET = "17"


def to_onnx(job: StepJob) -> dict[str, Any]:
    """Write a Paddle program (.json or .pdmodel, beside its .pdiparams) as ONNX."""
    job.progress("loading the Paddle model")
    program = Path(job.source)
    parameters = program.with_suffix(".pdiparams")
    config = inference.Config(str(program), str(parameters))
    config.disable_gpu()
    config.disable_glog_info()
    try:
        predictor = inference.create_predictor(config)
    except (RuntimeError, OSError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise InvalidRequest(
            f"{program}: Paddle cannot load it: {lines[-1] if lines else ''}"
        ) from None
    command = ["--model_dir", "{folder}", "--model_filename", program.name]
    command += ["--params_filename", parameters.name, "--save_file", "{target}"]
    # Its optimiser would install packages by itself.
    command += ["--opset_version", _OPSET, "--optimize_tool", "None"]
    job.progress("converting with paddle2onnx")
    _paddle2onnx(command, str(program.parent), job.target)
    # The predictor does not know the shapes of its inputs.
    inputs = _inputs(job.target)
    job.run_source(inputs, lambda arrays: _run(predictor, inputs, arrays))
    return {"command": ["paddle2onnx", *command]}


def _paddle2onnx(command: list[str], folder: str, target: str) -> None:
    """Run paddle2onnx's own command line in this process."""
    from paddle2onnx.command import main  # noqa: PLC0415 - after the predictor, which needs none

    places = {"{folder}": folder, "{target}": target}
    run_command_line(main, ["paddle2onnx", *command], places)
    if not Path(target).is_file():
        raise InvalidRequest("paddle2onnx has written nothing")


def _run(predictor: Any, inputs: list[TensorInfo], arrays: Arrays) -> Arrays:
    for each in inputs:
        handle = predictor.get_input_handle(each["name"])
        handle.reshape(arrays[each["name"]].shape)
        handle.copy_from_cpu(arrays[each["name"]])
    predictor.run()
    names = predictor.get_output_names()
    return {name: predictor.get_output_handle(name).copy_to_cpu() for name in names}


def _inputs(path: str) -> list[TensorInfo]:
    """Return the inputs of the ONNX file at `path`."""
    found = []
    for value in onnx.load(path).graph.input:
        tensor = value.type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        shape = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
        found.append(info(value.name, dtype, shape))
    return found
