"""TensorFlow: Keras files, SavedModels, frozen graphs and TensorFlow 1's checkpoints, written as
ONNX or as frozen graphs.

In ONNX files and in texts a graph's tensors have the names of their nodes, without `:0`, which is
what Triton calls them by.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from .step import Sampling, StepError, TensorInfo, info, run_command_line, run_samples, write_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    Progress = Callable[[str], None]

_OPSET = "17"
_NO_OUTPUTS = ("NoOp", "Assert", "Assign", "Const", "Placeholder")


def keras_to_onnx(
    progress: Progress,
    *,
    source: str,
    target: str,
    sampling: Sampling,
    trust: bool,
    outputs: Sequence[str],
) -> dict[str, Any]:
    """Write the Keras model `source` (.keras, .h5) as ONNX, by way of a SavedModel.

    Args:
        trust: run the code of its layers.
        outputs: their names; if empty, those of the layers.
    """
    model = _keras(progress, source, trust=trust)
    saved = str(Path(sampling["folder"]) / "saved")
    progress("exporting a SavedModel")
    model.export(saved, verbose=False)
    names = dict(zip(_exported_names(model), _output_names(model, outputs), strict=True))
    done = saved_model_to_onnx(
        progress, source=saved, target=target, sampling=sampling, names=names
    )
    return {key: done[key] for key in ("inputs", "outputs")}


def keras_to_graphdef(
    progress: Progress,
    *,
    source: str,
    target: str,
    sampling: Sampling,
    trust: bool,
    outputs: Sequence[str],
) -> dict[str, Any]:
    """Write the Keras model `source` as a frozen graph. Args, Raises: see `keras_to_onnx`."""
    model = _keras(progress, source, trust=trust)
    specs = [
        tf.TensorSpec(tensor.shape, tensor.dtype, name=_node_name(tensor.name, f"input_{index}"))
        for index, tensor in enumerate(model.inputs)
    ]
    names = _output_names(model, outputs)

    def call(*tensors: Any) -> list[Any]:
        made = model(list(tensors) if len(tensors) > 1 else tensors[0], training=False)
        flat = tf.nest.flatten(made)
        return [tf.identity(tensor, name=name) for tensor, name in zip(flat, names, strict=True)]

    # The model must outlive the function, which holds its variables weakly.
    function = tf.function(call).get_concrete_function(*specs)
    return _freeze(
        progress, function, [each.name for each in specs], names, target=target, sampling=sampling
    )


def saved_model_to_onnx(
    progress: Progress,
    *,
    source: str,
    target: str,
    sampling: Sampling,
    signature: str = "",
    names: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write the SavedModel `source` as ONNX; an empty `signature` is the default one.

    Args:
        names: output of the signature → its name in the ONNX file.
    """
    progress("loading the SavedModel")
    name, function, loaded = _signature(source, signature)
    inputs, outputs = _signature_interface(function)
    write_inputs(inputs, sampling)
    progress("running the source")
    renamed = names or {each["name"]: each["name"] for each in outputs}

    def run(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        made = _call_signature(function, arrays)
        return {renamed[each]: array for each, array in made.items()}

    run_samples(sampling, "source", run)
    command = ["--saved-model", "{source}", "--signature_def", name]
    # tf2onnx would write them in lower case; it has the inputs of a signature in this order, too.
    command += ["--rename-inputs", ",".join(each["name"] for each in inputs)]
    if names:
        # tf2onnx has the outputs of a signature in this order.
        command += ["--rename-outputs", ",".join(names[each] for each in sorted(names))]
    command += ["--output", "{target}", "--opset", _OPSET]
    del loaded
    return _tf2onnx(
        progress, command=command, source=source, target=target, inputs=inputs, outputs=outputs
    )


def saved_model_to_graphdef(
    progress: Progress, *, source: str, target: str, sampling: Sampling, signature: str = ""
) -> dict[str, Any]:
    """Write the SavedModel `source` as a frozen graph. Raises: see `saved_model_to_onnx`."""
    progress("loading the SavedModel")
    _, function, loaded = _signature(source, signature)
    inputs, outputs = _signature_interface(function)
    if hasattr(loaded, "prune"):  # it is TensorFlow 1's, whose variables no function holds
        return _saved_by_tensorflow_1(progress, source, signature, target, sampling)
    specs = [
        tf.TensorSpec(
            function.structured_input_signature[1][each["name"]].shape,
            function.structured_input_signature[1][each["name"]].dtype,
            name=each["name"],
        )
        for each in inputs
    ]
    names = [each["name"] for each in outputs]

    def call(*tensors: Any) -> list[Any]:
        given = {each["name"]: tensor for each, tensor in zip(inputs, tensors, strict=True)}
        made = function(**given)
        return [tf.identity(made[each], name=each) for each in names]

    concrete = tf.function(call).get_concrete_function(*specs)
    wanted = [each["name"] for each in inputs]
    done = _freeze(progress, concrete, wanted, names, target=target, sampling=sampling)
    del loaded
    return done


def graphdef_to_onnx(
    progress: Progress, *, source: str, target: str, sampling: Sampling, outputs: Sequence[str]
) -> dict[str, Any]:
    """Write the frozen graph `source` as ONNX.

    Args:
        outputs: names of nodes; if empty, those that no other node reads.
    """
    graph, inputs, found = _graph(source, outputs)
    write_inputs(inputs, sampling)
    progress("running the source")
    _run_graph(graph, inputs, found, sampling, "source")
    command = ["--graphdef", "{source}"]
    for flag, tensors in (("input", inputs), ("output", found)):
        names = [each["name"] for each in tensors]
        command += [f"--{flag}s", ",".join(f"{name}:0" for name in names)]
        command += [f"--rename-{flag}s", ",".join(names)]
    command += ["--output", "{target}", "--opset", _OPSET]
    return _tf2onnx(
        progress, command=command, source=source, target=target, inputs=inputs, outputs=found
    )


def _saved_by_tensorflow_1(
    progress: Progress, source: str, signature: str, target: str, sampling: Sampling
) -> dict[str, Any]:
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], source)
        chosen = loaded.signature_def[signature or "serving_default"]
        inputs = {each.name: name for name, each in sorted(chosen.inputs.items())}
        outputs = {each.name: name for name, each in sorted(chosen.outputs.items())}
        return _freeze_session(progress, session, inputs, outputs, target=target, sampling=sampling)


def checkpoint_to_graphdef(
    progress: Progress, *, source: str, target: str, sampling: Sampling, outputs: Sequence[str]
) -> dict[str, Any]:
    """Write TensorFlow 1's checkpoint `source` (.meta, its data beside it) as a frozen graph.

    Args:
        outputs: names of nodes; if empty, those that no other node reads.
    """
    progress("restoring the checkpoint")
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        try:
            saver = tf.compat.v1.train.import_meta_graph(source, clear_devices=True)
            saver.restore(session, source.removesuffix(".meta"))
        except Exception as error:  # noqa: BLE001 - TensorFlow's share no base class
            first = str(error).strip().splitlines()[0]
            raise StepError(f"{source}: TensorFlow cannot restore it: {first}") from None
        nodes = session.graph.as_graph_def().node
        names = _outputs(source, nodes, outputs)
        graph = tf.compat.v1.graph_util.extract_sub_graph(session.graph.as_graph_def(), names)
        inputs = [node.name for node in graph.node if node.op == "Placeholder"]
        return _freeze_session(
            progress,
            session,
            {f"{name}:0": name for name in inputs},
            {f"{name}:0": name for name in names},
            target=target,
            sampling=sampling,
        )


def checkpoint_to_onnx(
    progress: Progress, *, source: str, target: str, sampling: Sampling, outputs: Sequence[str]
) -> dict[str, Any]:
    """Write TensorFlow 1's checkpoint `source` as ONNX, by way of a frozen graph. Args, Raises: see
    `checkpoint_to_graphdef`."""
    frozen = str(Path(sampling["folder"]) / "frozen.graphdef")
    made = checkpoint_to_graphdef(
        progress, source=source, target=frozen, sampling=sampling, outputs=outputs
    )
    names = [each["name"] for each in made["outputs"]]
    done = graphdef_to_onnx(
        progress, source=frozen, target=target, sampling=sampling, outputs=names
    )
    return {key: done[key] for key in ("inputs", "outputs")}


def _freeze_session(
    progress: Progress,
    session: Any,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    *,
    target: str,
    sampling: Sampling,
) -> dict[str, Any]:
    """Write the graph of a session as a frozen graph.

    Args:
        session: its variables have their values.
        inputs, outputs: tensor of the graph → its name in the frozen graph.
    """
    graph = session.graph
    infos = [
        [_info(name, graph.get_tensor_by_name(tensor)) for tensor, name in tensors.items()]
        for tensors in (inputs, outputs)
    ]
    write_inputs(infos[0], sampling)
    progress("running the source")

    def run(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        fed = {tensor: _fed(arrays[name]) for tensor, name in inputs.items()}
        return dict(zip(outputs.values(), session.run(list(outputs), fed), strict=True))

    run_samples(sampling, "source", run)
    progress("freezing the graph")
    names = {tensor.partition(":")[0]: name for tensor, name in inputs.items()}
    with graph.as_default():
        ends = {
            tf.identity(graph.get_tensor_by_name(tensor)).op.name: name
            for tensor, name in outputs.items()
        }
    frozen = tf.compat.v1.graph_util.convert_variables_to_constants(
        session, graph.as_graph_def(), list(ends)
    )
    Path(target).write_bytes(_with_names(frozen, names | ends).SerializeToString())
    return {"inputs": infos[0], "outputs": infos[1]}


def _with_names(graph: Any, names: Mapping[str, str]) -> Any:
    """Return the graph with other names of nodes; a node whose name is taken away gets another."""
    taken = {
        node.name: f"{node.name}_inner"
        for node in graph.node
        if node.name in names.values() and node.name not in names
    }
    names = {**names, **taken}
    for node in graph.node:
        node.name = names.get(node.name, node.name)
        node.attr.pop("_class", None)  # nodes that should be beside it, by their former names
        for index, given in enumerate(node.input):
            name, colon, number = given.removeprefix("^").partition(":")
            mark = "^" if given.startswith("^") else ""
            node.input[index] = f"{mark}{names.get(name, name)}{colon}{number}"
    return graph


def run_graphdef(progress: Progress, *, path: str, sampling: Sampling) -> dict[str, Any]:
    """Run the frozen graph at `path` on the samples; return its interface."""
    progress("running the result in TensorFlow")
    first = np.load(Path(sampling["folder"]) / "source-0.npz").files
    graph, inputs, outputs = _graph(path, [name.partition(".")[2] for name in first])
    _run_graph(graph, inputs, outputs, sampling, "result")
    return {"inputs": inputs, "outputs": outputs}


def _keras(progress: Progress, source: str, *, trust: bool) -> Any:
    import keras  # noqa: PLC0415 - takes seconds, and a frozen graph needs none

    progress("loading the Keras model")
    try:
        model = keras.saving.load_model(source, compile=False, safe_mode=not trust)
    except (ValueError, TypeError, OSError) as error:
        first = str(error).strip().splitlines()[0].rstrip(".;")
        remedy = ""
        if "safe_mode" in str(error) or "Lambda" in str(error):
            remedy = "; it has layers that run Python code: --trust, if you know who wrote it"
        raise StepError(f"{source}: Keras cannot load it: {first}{remedy}") from None
    if not getattr(model, "inputs", None):
        raise StepError(f"{source}: the model has no inputs yet; call it once before it is saved")
    return model


def _exported_names(model: Any) -> list[str]:
    """Return the names that the outputs of a SavedModel of `model.export` have, in order."""
    count = len(tf.nest.flatten(model.outputs))
    return [f"output_{index}" for index in range(count)]


def _output_names(model: Any, wanted: Sequence[str]) -> list[str]:
    tensors = tf.nest.flatten(model.outputs)
    if wanted:
        if len(wanted) != len(tensors):
            raise StepError(
                f"the model has {len(tensors)} outputs, and --outputs names {len(wanted)}"
            )
        return list(wanted)
    names = list(getattr(model, "output_names", None) or ())
    if len(names) != len(tensors) or len(set(names)) != len(names):
        names = [f"output_{index}" for index in range(len(tensors))]
    return [_node_name(name, f"output_{index}") for index, name in enumerate(names)]


def _node_name(name: str, otherwise: str) -> str:
    """Return a name that a node of a graph may have, as Triton calls it."""
    plain = name.partition(":")[0].replace("/", "_")
    return plain if plain and all(c.isalnum() or c in "_.-" for c in plain) else otherwise


def _signature(source: str, name: str) -> tuple[str, Any, Any]:
    loaded = tf.saved_model.load(source)
    names = list(loaded.signatures)
    chosen = name or ("serving_default" if "serving_default" in names else "".join(names[:1]))
    if chosen not in names:
        raise StepError(f"{source}: no signature '{chosen}'; it has {', '.join(names) or 'none'}")
    return chosen, loaded.signatures[chosen], loaded


def _signature_interface(function: Any) -> tuple[list[TensorInfo], list[TensorInfo]]:
    inputs = function.structured_input_signature[1]
    outputs = function.structured_outputs
    return (
        [_info(name, spec) for name, spec in sorted(inputs.items())],
        [_info(name, spec) for name, spec in sorted(outputs.items())],
    )


def _call_signature(function: Any, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    made = function(**{name: tf.constant(_fed(array)) for name, array in arrays.items()})
    return {name: tensor.numpy() for name, tensor in made.items()}


def _freeze(
    progress: Progress,
    function: Any,
    wanted: Sequence[str],
    names: Sequence[str],
    *,
    target: str,
    sampling: Sampling,
) -> dict[str, Any]:
    """Write a function as a frozen graph, whose inputs are `wanted` and whose outputs `names`."""
    from tensorflow.python.framework.convert_to_constants import (  # noqa: PLC0415 - other steps do without it
        convert_variables_to_constants_v2,
    )

    given = [each for each in function.inputs if each.dtype != tf.resource]
    inputs = [_info(name, each) for name, each in zip(wanted, given, strict=True)]
    outputs = [_info(name, t) for name, t in zip(names, function.outputs, strict=True)]
    write_inputs(inputs, sampling)
    progress("running the source")

    def run(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        made = function(*(tf.constant(_fed(arrays[each["name"]])) for each in inputs))
        return {name: tensor.numpy() for name, tensor in zip(names, made, strict=True)}

    run_samples(sampling, "source", run)
    progress("freezing the graph")
    # A function writes the names of its inputs in lower case.
    nodes = dict(zip((each.op.name for each in given), wanted, strict=True))
    frozen = convert_variables_to_constants_v2(function).graph.as_graph_def()
    Path(target).write_bytes(_with_names(frozen, nodes).SerializeToString())
    return {"inputs": inputs, "outputs": outputs}


def _graph(path: str, names: Sequence[str]) -> tuple[Any, list[TensorInfo], list[TensorInfo]]:
    """Return the imported graph, its inputs, and the outputs: `names`, or what nobody reads."""
    definition = tf.compat.v1.GraphDef()
    try:
        definition.ParseFromString(Path(path).read_bytes())
        graph = tf.Graph()
        with graph.as_default():
            tf.import_graph_def(definition, name="")
    except Exception as error:  # noqa: BLE001 - protobuf's and TensorFlow's share no base class
        first = str(error).strip().splitlines()[0]
        raise StepError(f"{path}: is no frozen graph: {first}") from None
    inputs = [node.name for node in definition.node if node.op == "Placeholder"]
    outputs = _outputs(path, definition.node, names)
    return graph, _infos(graph, inputs), _infos(graph, outputs)


def _outputs(path: str, nodes: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Return `names`, or what no node reads, of a graph that may be saved in training."""
    read = {name.lstrip("^").partition(":")[0] for node in nodes for name in node.input}
    outputs = list(names) or [
        node.name
        for node in nodes
        if node.name not in read
        and not node.op.startswith(_NO_OUTPUTS)
        and not node.name.startswith("save/")
    ]
    present = {node.name for node in nodes}
    if missing := [name for name in outputs if name not in present]:
        raise StepError(f"{path}: has no node {', '.join(missing)}; give others with --outputs")
    return outputs


def _infos(graph: Any, names: Iterable[str]) -> list[TensorInfo]:
    return [_info(name, graph.get_tensor_by_name(f"{name}:0")) for name in names]


def _run_graph(
    graph: Any,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    sampling: Sampling,
    which: str,
) -> None:
    names = [each["name"] for each in outputs]
    with tf.compat.v1.Session(graph=graph) as session:

        def run(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            fed = {f"{each['name']}:0": _fed(arrays[each["name"]]) for each in inputs}
            made = session.run([f"{name}:0" for name in names], fed)
            return dict(zip(names, made, strict=True))

        run_samples(sampling, which, run)


def _info(name: str, spec: Any) -> TensorInfo:
    rank = spec.shape.rank
    shape = [] if rank is None else spec.shape.as_list()
    return info(name, None if spec.dtype == tf.string else spec.dtype.as_numpy_dtype, shape)


def _fed(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.kind != "U":
        return array
    texts = [text.encode("utf-8", "surrogateescape") for text in array.flat]
    return np.array([*texts, None], object)[:-1].reshape(array.shape)


def _tf2onnx(
    progress: Progress,
    *,
    command: Sequence[str],
    source: str,
    target: str,
    inputs: list[TensorInfo],
    outputs: list[TensorInfo],
) -> dict[str, Any]:
    """Run tf2onnx's own command line in this process."""
    from tf2onnx.convert import main  # noqa: PLC0415 - loads TensorFlow's own converters

    progress("converting with tf2onnx")
    places = {"{source}": source, "{target}": target}
    run_command_line(main, ["tf2onnx.convert", *command], places)
    return {
        "inputs": inputs,
        "outputs": outputs,
        "command": ["python", "-m", "tf2onnx.convert", *command],
    }
