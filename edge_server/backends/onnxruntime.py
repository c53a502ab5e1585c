"""`onnxruntime`: ONNX models on the CPU.

Parameters in config.pbtxt: `intra_op_thread_count` (default 0: one per core),
`inter_op_thread_count` (default 1) and `allow_spinning` (default false: waiting threads sleep, so
that an idle daemon is idle).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from edge_server.backends.contract import Placement, TensorInstance, Tensors
from edge_server.backends.parameters import Parameters, check_parameters, read_parameters
from edge_server.errors import InternalError, InvalidRequest, ModelConfigError
from edge_server.model_config.files import require_path
from edge_server.model_config.shapes import unified
from edge_server.tensors import DataType, Tensor, TensorSpec, shape_text

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.files import ModelFiles

_ONNX_TYPES = {
    "tensor(bool)": DataType.BOOL,
    "tensor(uint8)": DataType.UINT8,
    "tensor(uint16)": DataType.UINT16,
    "tensor(uint32)": DataType.UINT32,
    "tensor(uint64)": DataType.UINT64,
    "tensor(int8)": DataType.INT8,
    "tensor(int16)": DataType.INT16,
    "tensor(int32)": DataType.INT32,
    "tensor(int64)": DataType.INT64,
    "tensor(float16)": DataType.FP16,
    "tensor(float)": DataType.FP32,
    "tensor(double)": DataType.FP64,
    "tensor(string)": DataType.BYTES,
}


class OnnxRuntimeParameters(Parameters, frozen=True):
    """See the module."""

    intra_op_thread_count: int = 0
    inter_op_thread_count: int = 1
    allow_spinning: bool = False


def complete(files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
    """Names, types and shapes from the ONNX file; what the configuration says must agree.

    A model batches when its first dimension is free, or 1 with `max_batch_size: 1`.
    """
    check_parameters(files, config, OnnxRuntimeParameters)
    path = files.versions[version] / config.default_model_filename
    require_path(path, config.name)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = _open_session(path, options)
    batched = config.max_batch_size > 0
    inputs = tuple(_spec(path, node, batched, config) for node in session.get_inputs())
    outputs = tuple(_spec(path, node, batched, config) for node in session.get_outputs())
    where = f"{files.config_path}: model '{config.name}'"
    return config.with_io(
        _agreed(where, "input", config.inputs, inputs),
        _agreed(where, "output", config.outputs, outputs),
    )


def load(directory: Path, config: ModelConfig, placement: Placement) -> OnnxModel:
    del placement
    options = ort.SessionOptions()
    options.log_severity_level = 3
    parameters = read_parameters(config, OnnxRuntimeParameters)
    options.intra_op_num_threads = parameters.intra_op_thread_count
    options.inter_op_num_threads = parameters.inter_op_thread_count
    options.add_session_config_entry(
        "session.intra_op.allow_spinning", str(int(parameters.allow_spinning))
    )
    path = directory / config.default_model_filename
    return OnnxModel(config, _open_session(path, options))


class OnnxModel:
    """One ONNX Runtime session; its `run` may be called by several instances at once."""

    def __init__(self, config: ModelConfig, session: Any) -> None:
        self._name = config.name
        self._session = session

    def make_instance(self, name: str) -> TensorInstance:  # noqa: ARG002 - the contract names it
        return TensorInstance(self._run)

    def close(self) -> None:
        self._session = None

    def _run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        names = sorted(outputs)
        arrays = {name: _for_runtime(name, tensor.array) for name, tensor in inputs.items()}
        try:
            made = self._session.run(names, arrays)
        except Exception as error:  # ONNX Runtime's exceptions have no common root of their own
            raise InternalError(f"onnxruntime: model '{self._name}' failed: {error}") from error
        return {name: _from_runtime(array) for name, array in zip(names, made, strict=True)}


def _for_runtime(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """ONNX Runtime's strings are `str`; of `bytes` it would take the printed form."""
    if array.dtype != np.object_:
        return array
    try:
        texts = [element.decode() for element in array.flat]
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"input '{name}': an ONNX string is UTF-8 text, which {error.object[:32]!r} is not"
        ) from error
    return np.array(texts, np.object_).reshape(array.shape)


def _from_runtime(array: NDArray[Any]) -> Tensor:
    if array.dtype != np.object_:
        return Tensor.of(array)
    return Tensor(np.array([text.encode() for text in array.flat], np.object_).reshape(array.shape))


def _open_session(path: Path, options: Any) -> Any:
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # as above
        first_line = str(error).strip().splitlines()[0]
        raise ModelConfigError(
            f"{path}: ONNX Runtime cannot load it: {first_line}; export it again, or copy it "
            f"again if the file is cut short ({path.stat().st_size} bytes)"
        ) from error


def _spec(path: Path, node: Any, batched: bool, config: ModelConfig) -> TensorSpec:
    datatype = _ONNX_TYPES.get(node.type)
    if datatype is None:
        raise ModelConfigError(
            f"{path}: tensor '{node.name}' has type {node.type}, which no protocol type carries"
        )
    shape = tuple(d if isinstance(d, int) and d > 0 else -1 for d in node.shape)
    if not batched:
        return TensorSpec(node.name, datatype, shape)
    if not shape or not (shape[0] == -1 or (shape[0] == 1 and config.max_batch_size == 1)):
        raise ModelConfigError(
            f"{path}: autofill failed for model '{config.name}': model does not support batching "
            f"while non-zero max_batch_size is specified; tensor '{node.name}' has shape "
            f"{shape_text(shape)}: set max_batch_size to 0, or export with a free first dimension"
        )
    return TensorSpec(node.name, datatype, shape[1:])


def _agreed(
    where: str, kind: str, said: tuple[TensorSpec, ...], real: tuple[TensorSpec, ...]
) -> list[TensorSpec]:
    """The model's tensors in its order; a size that one side leaves free is the other's."""
    agreed = {spec.name: spec for spec in real}
    if len(said) > len(real):
        raise ModelConfigError(
            f"{where}: configuration expects {len(said)} {kind}s, model provides {len(real)}"
        )
    for spec in said:
        if spec.name not in agreed:
            raise ModelConfigError(
                f"{where}: unexpected inference {kind} '{spec.name}', allowed {kind}s are: "
                f"{', '.join(agreed)}"
            )
        model = agreed[spec.name]
        if model.datatype != spec.datatype:
            raise ModelConfigError(
                f"{where}: configuration expects datatype {spec.datatype.config_name} for {kind} "
                f"'{spec.name}', model provides {model.datatype.config_name}"
            )
        shape = unified(spec.shape, model.shape)
        if shape is None:
            raise ModelConfigError(
                f"{where}, tensor '{spec.name}': the model expects {len(model.shape)} dimensions "
                f"(shape {shape_text(model.shape)}) but the model configuration specifies "
                f"{len(spec.shape)} dimensions (shape {shape_text(spec.shape)})"
            )
        agreed[spec.name] = TensorSpec(spec.name, spec.datatype, shape)
    return list(agreed.values())
