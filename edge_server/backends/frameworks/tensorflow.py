"""`tensorflow`: SavedModels (directory `model.savedmodel`) and frozen graphs (`model.graphdef`).

The tensors of a SavedModel are those of one of its signatures. The tensors of a graph are its nodes
without the `:0`, as in Triton: the first result of a node.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

# Before the import: only warnings and errors, no list of the processor's features.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
import tensorflow as tf

from edge_server.backends.frameworks.runner import DATA_TYPES
from edge_server.tensors import DataType, Signature, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from edge_server.backends.frameworks.runner import Arrays, ModelFile

# Smaller arrays are copied sooner than shared.
_SHARED_BYTES = 1 << 16
# Nodes that a graph has beside its outputs, and whose result nothing reads.
_NO_OUTPUTS = frozenset({"Const", "NoOp", "Assert", "Placeholder", "SaveV2", "RestoreV2"})


class _Graph(NamedTuple):
    """A function of a file, which takes its arguments by name, or in order where the file is a
    graph; `arguments` and `results` are name → a tensor, or what describes one."""

    call: Any
    arguments: Mapping[str, Any]
    results: Mapping[str, Any]
    loaded: Any


def open_model(file: ModelFile) -> TensorFlowModel:
    given = file.parameters
    within = int(given.get("TF_NUM_INTRA_THREADS", file.threads))
    tf.config.threading.set_intra_op_parallelism_threads(within)
    tf.config.threading.set_inter_op_parallelism_threads(int(given.get("TF_NUM_INTER_THREADS", 1)))
    gpus = tf.config.list_physical_devices("GPU")
    if file.device == "GPU" and not gpus:
        raise ValueError(
            f"TensorFlow {tf.__version__} of this Python reaches no GPU; install a build with CUDA "
            "for this machine, or give KIND_CPU"
        )
    for gpu in gpus:
        # TensorFlow takes the whole memory of a GPU at once, which a Jetson shares with the rest.
        tf.config.experimental.set_memory_growth(gpu, True)
    return TensorFlowModel(file)


class TensorFlowModel:
    """A function of TensorFlow, called with the names of its signature."""

    def __init__(self, file: ModelFile) -> None:
        self._graph = graph = _read(file)
        inputs, outputs = (
            tuple(_spec(name, each, file.full_shape(name)) for name, each in tensors.items())
            for tensors in (graph.arguments, graph.results)
        )
        self.signature = Signature(inputs, outputs)
        self._is_graph = file.platform == "tensorflow_graphdef"

    def run(self, inputs: Arrays, outputs: frozenset[str]) -> Arrays:
        graph = self._graph
        values = {name: _tensor(inputs[name], like) for name, like in graph.arguments.items()}
        if self._is_graph:
            made = dict(zip(graph.results, graph.call(*values.values()), strict=True))
        else:
            made = graph.call(**values)
        return {name: _array(made[name]) for name in outputs}


def _read(file: ModelFile) -> _Graph:
    if file.platform == "tensorflow_graphdef":
        return _read_graph(file)
    tag = file.parameters.get("TF_GRAPH_TAG", "serve")
    name = file.parameters.get("TF_SIGNATURE_DEF", "serving_default")
    loaded = tf.saved_model.load(str(file.path), tags=[tag])
    if name not in loaded.signatures:
        raise ValueError(
            f"no signature '{name}'; the SavedModel has {', '.join(loaded.signatures) or 'none'}: "
            "parameter TF_SIGNATURE_DEF names one"
        )
    call = loaded.signatures[name]
    return _Graph(call, call.structured_input_signature[1], call.structured_outputs, loaded)


def _read_graph(file: ModelFile) -> _Graph:
    definition = tf.compat.v1.GraphDef()
    definition.ParseFromString(file.path.read_bytes())
    nodes = {node.name: node.op for node in definition.node}
    used = {each.split(":")[0].lstrip("^") for node in definition.node for each in node.input}
    ends = [name for name, op in nodes.items() if name not in used and op not in _NO_OUTPUTS]
    results = [spec.name for spec in file.outputs] or ends
    if absent := [name for name in results if name not in nodes]:
        raise ValueError(
            f"the graph has no node '{', '.join(absent)}'; its last ones are {', '.join(ends)}"
        )
    whole = tf.compat.v1.wrap_function(
        lambda: tf.compat.v1.import_graph_def(definition, name=""), []
    )
    tensor = whole.graph.get_tensor_by_name
    arguments = {name: tensor(f"{name}:0") for name, op in nodes.items() if op == "Placeholder"}
    made = {name: tensor(f"{name}:0") for name in results}
    call = whole.prune(list(arguments.values()), list(made.values()))
    return _Graph(call, arguments, made, whole)


def _spec(name: str, tensor: Any, configured: tuple[int, ...] | None) -> TensorSpec:
    if tensor.dtype.name not in DATA_TYPES:
        raise ValueError(f"tensor '{name}' is {tensor.dtype.name}, which cannot be passed on")
    if tensor.shape.rank is not None:
        shape = tuple(-1 if size is None else size for size in tensor.shape)
    elif configured is not None:
        shape = configured
    else:
        raise ValueError(f"the file does not say how many dimensions '{name}' has; give its dims")
    return TensorSpec(name, DATA_TYPES[tensor.dtype.name], shape or (1,))


def _tensor(array: NDArray[Any], like: Any) -> Any:
    if like.shape.rank == 0:
        array = array.reshape(())
    if array.dtype == DataType.BF16.numpy:
        array = array.view(tf.bfloat16.as_numpy_dtype)
    elif array.nbytes >= _SHARED_BYTES and array.dtype.kind == "f" and not array.ctypes.data % 64:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array, like.dtype)


def _array(tensor: Any) -> NDArray[Any]:
    if tensor.dtype == tf.bfloat16:
        bits: NDArray[Any] = tensor.numpy().view(np.uint16)
        return bits.view(DataType.BF16.numpy)
    if tensor.dtype == tf.string or "GPU" in tensor.device:
        return np.asarray(tensor.numpy(), np.object_ if tensor.dtype == tf.string else None)
    # Its memory, not a copy.
    return np.asarray(memoryview(tensor))
