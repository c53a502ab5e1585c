"""`openvino`: OpenVINO's own format (`model.xml` with `model.bin`), and ONNX, SavedModel and Paddle
files through `default_model_filename`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.frameworks.runner import BadInput, enabled
from edge_server.tensors import DataType, Signature, TensorSpec

# As soon as it is imported, OpenVINO sends usage data to its vendor and writes to HOME, unless this
# is missing; None hides a module.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
import openvino as ov  # noqa: E402

if TYPE_CHECKING:
    from edge_server.backends.frameworks.runner import Arrays, ModelFile

# `f32`: numpy's kind, and the bits.
_TYPES = {
    "boolean": DataType.BOOL,
    **{f"{each.numpy.kind}{8 * each.numpy.itemsize}": each for each in DataType},
}
# Parameters that are properties of the compiled model under the same name.
_PROPERTIES = ("PERFORMANCE_HINT", "NUM_STREAMS", "COMPILATION_NUM_THREADS")


class OpenVinoModel:
    """A compiled model and its one inference request, which reads inputs in place."""

    def __init__(self, file: ModelFile) -> None:
        given = file.parameters
        properties: dict[str, Any] = {key: given[key] for key in _PROPERTIES if key in given}
        properties["INFERENCE_NUM_THREADS"] = int(given.get("INFERENCE_NUM_THREADS", file.threads))
        # The processor computes in the model's own precision unless bfloat16 is asked for.
        bf16 = enabled(given.get("HINT_BF16", ""))
        properties["INFERENCE_PRECISION_HINT"] = "bf16" if bf16 else "f32"
        device = given.get("TARGET_DEVICE", "CPU")
        compiled = ov.Core().compile_model(_read(file), device, properties)
        self.signature = Signature(
            tuple(_spec(port, file) for port in compiled.inputs),
            tuple(_spec(port, file) for port in compiled.outputs),
        )
        self._inputs = {name: port for port in compiled.inputs for name in _names(port)}
        self._outputs = {name: port for port in compiled.outputs for name in _names(port)}
        self._request = compiled.create_infer_request()

    def run(self, inputs: Arrays, outputs: frozenset[str]) -> Arrays:
        for name, array in inputs.items():
            port = self._inputs[name]
            shape = port.partial_shape
            if shape.rank.is_static and len(shape) == 0:
                array = array.reshape(())  # noqa: PLW2901 - the protocol has no such shape
            elif not shape.compatible(ov.PartialShape(list(array.shape))):
                raise BadInput(
                    f"input '{name}' has shape {list(array.shape)}, the model's is {shape}"
                )
            self._request.set_tensor(
                port, ov.Tensor(np.ascontiguousarray(array), shared_memory=True)
            )
        self._request.infer()
        return {name: self._request.get_tensor(self._outputs[name]).data for name in outputs}


def _read(file: ModelFile) -> Any:
    model = ov.Core().read_model(file.path)
    fixed = {
        port: ov.PartialShape([-1, *list(port.partial_shape)[1:]])
        for port in model.inputs
        if file.max_batch_size > 1 and port.partial_shape.rank.is_static and len(port.partial_shape)
    }
    if fixed and not enabled(file.parameters.get("SKIP_OV_DYNAMIC_BATCHSIZE", "")):
        model.reshape(fixed)
    return model


def _spec(port: Any, file: ModelFile) -> TensorSpec:
    names = _names(port)
    name = next((name for name in names if file.full_shape(name) is not None), names[0])
    element = port.element_type.get_type_name()
    if element not in _TYPES:
        raise ValueError(f"tensor '{name}' is {element}, which the backend cannot pass on")
    shape = port.partial_shape
    if shape.rank.is_static:
        dims = tuple(size.get_length() if size.is_static else -1 for size in shape)
    elif (configured := file.full_shape(name)) is not None:
        dims = configured
    else:
        raise ValueError(f"the file does not say how many dimensions '{name}' has; give its dims")
    return TensorSpec(name, _TYPES[element], dims or (1,))


def _names(port: Any) -> list[str]:
    """Return the names of a tensor as Triton has them; TensorFlow's models call `x` `x:0`."""
    names = sorted({name.removesuffix(":0") for name in port.get_names()})
    if not names:
        raise ValueError(f"tensor {port} has no name; export the model with names")
    return names


open_model = OpenVinoModel
