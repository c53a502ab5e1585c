"""TensorFlow: Keras files, SavedModels, frozen graphs and TensorFlow 1's checkpoints, written as
ONNX or as frozen graphs.

In ONNX files and in texts a graph's tensors have the names of their nodes, without `:0`, which is
what Triton calls them by.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from edge_server.errors import InvalidRequest

from .step import Arrays, StepJob, TensorInfo, info, run_command_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    Interface = dict[str, list[TensorInfo]]

_OPSET = "17"
_NO_OUTPUTS = ("NoOp", "Assert", "Assign", "Const", "Placeholder")


def keras_to_onnx(job: StepJob) -> dict[str, Any]:
    """Write a Keras model (.keras, .h5) as ONNX, by way of a SavedModel: tf2onnx does not know the
    loops of recurrent layers in a frozen graph."""
    model = _keras(job)
    saved = str(Path(job.samples) / "saved")
    job.progress("exporting a SavedModel")
    model.export(saved, verbose=False)
    names = _output_names(model, job.outputs)
    exported = {f"output_{index}": name for index, name in enumerate(names)}
    _saved_to_onnx(replace(job, source=saved, signature=""), exported)
    return {}


def keras_to_graphdef(job: StepJob) -> Interface:
    """Write a Keras model as a frozen graph."""
    model = _keras(job)
    specs = [
        tf.TensorSpec(tensor.shape, tensor.dtype, name=_node_name(tensor.name, f"input_{index}"))
        for index, tensor in enumerate(model.inputs)
    ]
    names = _output_names(model, job.outputs)

    def call(*tensors: Any) -> list[Any]:
        made = model(list(tensors) if len(tensors) > 1 else tensors[0], training=False)
        flat = tf.nest.flatten(made)
        return [tf.identity(tensor, name=name) for tensor, name in zip(flat, names, strict=True)]

    # The model must outlive the function, which holds its variables weakly.
    function = tf.function(call).get_concrete_function(*specs)
    return _freeze(job, function, [each.name for each in specs], names)


def saved_model_to_onnx(job: StepJob) -> dict[str, Any]:
    """Write a SavedModel as ONNX."""
    return _saved_to_onnx(job, {})


def _saved_to_onnx(job: StepJob, names: Mapping[str, str]) -> dict[str, Any]:
    """Write a SavedModel as ONNX; `names` are other names of its outputs."""
    name, function, loaded = _signature(job)
    inputs, _ = _signature_interface(function)

    def run(arrays: Arrays) -> Arrays:
        made = function(**{name: tf.constant(_fed(array)) for name, array in arrays.items()})
        return {names.get(name, name): tensor.numpy() for name, tensor in made.items()}

    job.run_source(inputs, run)
    del loaded
    # tf2onnx would write them in lower case; it has those of a signature in this order, too.
    renamed = ["--rename-inputs", ",".join(each["name"] for each in inputs)]
    if names:
        renamed += ["--rename-outputs", ",".join(names[each] for each in sorted(names))]
    return _tf2onnx(job, "--saved-model", "{source}", "--signature_def", name, *renamed)


def saved_model_to_graphdef(job: StepJob) -> Interface:
    """Write a SavedModel as a frozen graph."""
    _, function, loaded = _signature(job)
    if hasattr(loaded, "prune"):  # it is TensorFlow 1's, whose variables no function holds
        return _saved_by_tensorflow_1(job)
    given, made = ([each["name"] for each in infos] for infos in _signature_interface(function))
    of_signature = function.structured_input_signature[1]
    specs = [
        tf.TensorSpec(of_signature[name].shape, of_signature[name].dtype, name=name)
        for name in given
    ]

    def call(*tensors: Any) -> list[Any]:
        outputs = function(**dict(zip(given, tensors, strict=True)))
        return [tf.identity(outputs[name], name=name) for name in made]

    done = _freeze(job, tf.function(call).get_concrete_function(*specs), given, made)
    del loaded
    return done


def graphdef_to_onnx(job: StepJob) -> dict[str, Any]:
    """Write a frozen graph as ONNX; without names of `outputs`, those that no other node reads."""
    graph, interface = _graph(job.source, job.outputs)
    job.run_source(interface["inputs"], _runner(graph, interface))
    return _graph_to_onnx(job, interface)


def _graph_to_onnx(job: StepJob, interface: Interface) -> dict[str, Any]:
    command = ["--graphdef", "{source}"]
    for which, tensors in interface.items():
        names = [each["name"] for each in tensors]
        command += [f"--{which}", ",".join(f"{name}:0" for name in names)]
        command += [f"--rename-{which}", ",".join(names)]
    return _tf2onnx(job, *command)


def _saved_by_tensorflow_1(job: StepJob) -> Interface:
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], job.source)
        chosen = loaded.signature_def[job.signature or "serving_default"]
        inputs = {each.name: name for name, each in sorted(chosen.inputs.items())}
        outputs = {each.name: name for name, each in sorted(chosen.outputs.items())}
        return _freeze_session(job, session, inputs, outputs)


def checkpoint_to_onnx(job: StepJob) -> dict[str, Any]:
    """Write TensorFlow 1's checkpoint as ONNX, by way of a frozen graph."""
    frozen = str(Path(job.samples) / "frozen.graphdef")
    interface = checkpoint_to_graphdef(replace(job, target=frozen))
    _graph_to_onnx(replace(job, source=frozen), interface)
    return {}


def checkpoint_to_graphdef(job: StepJob) -> Interface:
    """Write TensorFlow 1's checkpoint (.meta, its data beside it) as a frozen graph; without names
    of `outputs`, those that no other node reads."""
    source = job.source
    job.progress("restoring the checkpoint")
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        try:
            saver = tf.compat.v1.train.import_meta_graph(source, clear_devices=True)
            saver.restore(session, source.removesuffix(".meta"))
        except Exception as error:  # noqa: BLE001 - TensorFlow's share no base class
            first = str(error).strip().splitlines()[0]
            raise InvalidRequest(f"{source}: TensorFlow cannot restore it: {first}") from None
        nodes = session.graph.as_graph_def().node
        names = _outputs(source, nodes, job.outputs)
        graph = tf.compat.v1.graph_util.extract_sub_graph(session.graph.as_graph_def(), names)
        inputs = [node.name for node in graph.node if node.op == "Placeholder"]
        ports, ends = ({f"{name}:0": name for name in each} for each in (inputs, names))
        return _freeze_session(job, session, ports, ends)


def _freeze_session(
    job: StepJob, session: Any, inputs: Mapping[str, str], outputs: Mapping[str, str]
) -> Interface:
    """Write the graph of a session as a frozen graph.

    Args:
        session: its variables have their values.
        inputs, outputs: tensor of the graph → its name in the frozen graph.
    """
    graph = session.graph
    interface = {
        which: [_info(name, graph.get_tensor_by_name(tensor)) for tensor, name in tensors.items()]
        for which, tensors in (("inputs", inputs), ("outputs", outputs))
    }

    def run(arrays: Arrays) -> Arrays:
        fed = {tensor: _fed(arrays[name]) for tensor, name in inputs.items()}
        return dict(zip(outputs.values(), session.run(list(outputs), fed), strict=True))

    job.run_source(interface["inputs"], run)
    job.progress("freezing the graph")
    names = {tensor.partition(":")[0]: name for tensor, name in inputs.items()}
    with graph.as_default():
        ends = {
            tf.identity(graph.get_tensor_by_name(tensor)).op.name: name
            for tensor, name in outputs.items()
        }
    frozen = tf.compat.v1.graph_util.convert_variables_to_constants(
        session, graph.as_graph_def(), list(ends)
    )
    Path(job.target).write_bytes(_with_names(frozen, names | ends).SerializeToString())
    return interface


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


def run_graphdef(job: StepJob) -> Interface:
    """Run the frozen graph on the samples; return its interface."""
    first = np.load(Path(job.samples) / "source-0.npz").files
    graph, interface = _graph(job.source, [name.partition(".")[2] for name in first])
    job.run_result("TensorFlow", _runner(graph, interface))
    return interface


def _keras(job: StepJob) -> Any:
    import keras  # noqa: PLC0415 - takes seconds, and a frozen graph needs none

    source = job.source
    job.progress("loading the Keras model")
    try:
        model = keras.saving.load_model(source, compile=False, safe_mode=not job.trust)
    except (ValueError, TypeError, OSError) as error:
        first = str(error).strip().splitlines()[0].rstrip(".;")
        remedy = ""
        if "safe_mode" in str(error) or "Lambda" in str(error):
            remedy = "; it has layers that run Python code: --trust, if you know who wrote it"
        raise InvalidRequest(f"{source}: Keras cannot load it: {first}{remedy}") from None
    if not getattr(model, "inputs", None):
        raise InvalidRequest(
            f"{source}: the model has no inputs yet; call it once before it is saved"
        )
    return model


def _output_names(model: Any, wanted: Sequence[str]) -> list[str]:
    tensors = tf.nest.flatten(model.outputs)
    if wanted:
        if len(wanted) != len(tensors):
            raise InvalidRequest(
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


def _signature(job: StepJob) -> tuple[str, Any, Any]:
    """Return the name of the chosen signature, its function, and what must outlive that."""
    job.progress("loading the SavedModel")
    loaded = tf.saved_model.load(job.source)
    names = list(loaded.signatures)
    usual = "serving_default" if "serving_default" in names else "".join(names[:1])
    name = job.signature or usual
    if name not in names:
        there = ", ".join(names) or "none"
        raise InvalidRequest(f"{job.source}: no signature '{name}'; it has {there}")
    return name, loaded.signatures[name], loaded


def _signature_interface(function: Any) -> tuple[list[TensorInfo], list[TensorInfo]]:
    inputs = function.structured_input_signature[1]
    outputs = function.structured_outputs
    return (
        [_info(name, spec) for name, spec in sorted(inputs.items())],
        [_info(name, spec) for name, spec in sorted(outputs.items())],
    )


def _freeze(job: StepJob, function: Any, wanted: Sequence[str], names: Sequence[str]) -> Interface:
    """Write a function as a frozen graph, whose inputs are `wanted` and whose outputs `names`."""
    from tensorflow.python.framework.convert_to_constants import (  # noqa: PLC0415 - other steps do without it
        convert_variables_to_constants_v2,
    )

    given = [each for each in function.inputs if each.dtype != tf.resource]
    inputs = [_info(name, each) for name, each in zip(wanted, given, strict=True)]
    outputs = [_info(name, t) for name, t in zip(names, function.outputs, strict=True)]

    def run(arrays: Arrays) -> Arrays:
        made = function(*(tf.constant(_fed(arrays[each["name"]])) for each in inputs))
        return {name: tensor.numpy() for name, tensor in zip(names, made, strict=True)}

    job.run_source(inputs, run)
    job.progress("freezing the graph")
    # A function writes the names of its inputs in lower case.
    nodes = dict(zip((each.op.name for each in given), wanted, strict=True))
    frozen = convert_variables_to_constants_v2(function).graph.as_graph_def()
    Path(job.target).write_bytes(_with_names(frozen, nodes).SerializeToString())
    return {"inputs": inputs, "outputs": outputs}


def _graph(path: str, names: Sequence[str]) -> tuple[Any, Interface]:
    """Return the imported graph, and its interface; the outputs are `names`, or what no node
    reads."""
    definition = tf.compat.v1.GraphDef()
    try:
        definition.ParseFromString(Path(path).read_bytes())
        graph = tf.Graph()
        with graph.as_default():
            tf.import_graph_def(definition, name="")
    except Exception as error:  # noqa: BLE001 - protobuf's and TensorFlow's share no base class
        first = str(error).strip().splitlines()[0]
        raise InvalidRequest(f"{path}: is no frozen graph: {first}") from None
    inputs = [node.name for node in definition.node if node.op == "Placeholder"]
    outputs = _outputs(path, definition.node, names)
    return graph, {"inputs": _infos(graph, inputs), "outputs": _infos(graph, outputs)}


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
        raise InvalidRequest(
            f"{path}: has no node {', '.join(missing)}; give others with --outputs"
        )
    return outputs


def _infos(graph: Any, names: Iterable[str]) -> list[TensorInfo]:
    return [_info(name, graph.get_tensor_by_name(f"{name}:0")) for name in names]


def _runner(graph: Any, interface: Interface) -> Callable[[Arrays], Arrays]:
    names = [each["name"] for each in interface["outputs"]]
    session = tf.compat.v1.Session(graph=graph)

    def run(arrays: Arrays) -> Arrays:
        fed = {f"{each['name']}:0": _fed(arrays[each["name"]]) for each in interface["inputs"]}
        return dict(zip(names, session.run([f"{name}:0" for name in names], fed), strict=True))

    return run


def _info(name: str, spec: Any) -> TensorInfo:
    rank = spec.shape.rank
    shape = [] if rank is None else spec.shape.as_list()
    return info(name, None if spec.dtype == tf.string else spec.dtype.as_numpy_dtype, shape)


def _fed(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.kind != "U":
        return array
    texts = [text.encode("utf-8", "surrogateescape") for text in array.flat]
    return np.array([*texts, None], object)[:-1].reshape(array.shape)


def _tf2onnx(job: StepJob, *words: str) -> dict[str, Any]:
    """Run tf2onnx's own command line in this process."""
    from tf2onnx.convert import main  # noqa: PLC0415 - loads TensorFlow's own converters

    job.progress("converting with tf2onnx")
    command = [*words, "--output", "{target}", "--opset", _OPSET]
    places = {"{source}": job.source, "{target}": job.target}
    run_command_line(main, ["tf2onnx.convert", *command], places)
    return {"command": ["python", "-m", "tf2onnx.convert", *command]}
