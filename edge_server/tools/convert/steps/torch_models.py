"""PyTorch: TorchScript files, programs of torch.export, modules and checkpoints, written as ONNX.

torch.onnx's exporter over torch.export (dynamo) converts programs and modules. A saved TorchScript
file has no Python left for it: the exporter for TorchScript, which PyTorch keeps for that, does.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import pickle
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edge_server.errors import InvalidRequest

from .step import Arrays, StepJob, TensorInfo, info

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_OPSET = 18
# Where training scripts put the weights in a checkpoint, beside its other facts.
_STATE_KEYS = ("state_dict", "model_state_dict", "model")
# That a text names.
_MOST_KEYS = 5


def script_to_onnx(job: StepJob) -> dict[str, Any]:
    """Write a TorchScript file as ONNX."""
    job.progress("loading the TorchScript file")
    try:
        module = torch.jit.load(job.source, map_location="cpu").eval()
    except RuntimeError as error:
        raise InvalidRequest(f"{job.source}: PyTorch cannot load it: {_first(error)}") from None
    names = [each.name for each in module.forward.schema.arguments[1:]]
    return _to_onnx(job, module, names, dynamo=False)


def module_to_onnx(job: StepJob) -> dict[str, Any]:
    """Write a pickled module as ONNX. Loading it runs whatever code the pickle names."""
    source = job.source
    job.progress("loading the module")
    if job.module_path:
        sys.path.insert(0, job.module_path)
    try:
        module = torch.load(source, map_location="cpu", weights_only=False)
    except (AttributeError, ImportError) as error:
        raise InvalidRequest(
            f"{source}: its class cannot be imported: {_first(error)}; --module-path DIR names the "
            "directory that its module is imported from"
        ) from None
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise InvalidRequest(f"{source}: PyTorch cannot load it: {_first(error)}") from None
    if not isinstance(module, torch.nn.Module):
        raise InvalidRequest(
            f"{source}: holds {type(module).__name__}, not a module; of weights alone, --module "
            "FILE.py:CLASS names the class"
        )
    return _module(job, module)


def weights_to_onnx(job: StepJob) -> dict[str, Any]:
    """Write a checkpoint of the class `job.module` as ONNX.

    The checkpoint is read without running code from it: the state alone, or a dictionary that has
    it as `state_dict`, `model_state_dict` or `model`. A prefix that all its keys have, and none of
    the class's (`module.` of DataParallel), is taken off.
    """
    source, module = job.source, job.module
    job.progress("loading the weights")
    file, _, name = module.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if not file or spec is None or spec.loader is None or not Path(file).is_file():
        raise InvalidRequest(f"--module {module}: no such file; give it as FILE.py:CLASS")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    if not hasattr(loaded, name):
        raise InvalidRequest(f"--module {module}: {file} has no class {name}")
    try:
        state = torch.load(source, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise InvalidRequest(
            f"{source}: is no checkpoint of weights alone: {_first(error)}"
        ) from None
    key = next((k for k in _STATE_KEYS if isinstance(state.get(k), dict)), "")
    state = state[key] if key else state
    positional, named = _values(job.module_args)
    try:
        made = getattr(loaded, name)(*positional, **named)
    except TypeError as error:
        raise InvalidRequest(
            f"--module {module}: {_first(error)}; --module-args gives the class its arguments"
        ) from None
    wanted = made.state_dict()
    state, prefix = _without_prefix(state, wanted)
    if misfits := _misfits(state, wanted):
        raise InvalidRequest(f"{source}: its weights are not those of {name}: {misfits}")
    made.load_state_dict(state)
    _module(job, made)
    if not prefix:
        return {}
    return {"note": f"the keys of the checkpoint begin with '{prefix}', which was taken off"}


def _values(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments in `text`, by place and by name."""
    try:
        given = json.loads(text if text.lstrip().startswith(("[", "{")) else f"[{text}]")
    except ValueError as error:
        raise InvalidRequest(
            f"--module-args {text}: {error}; give values with commas, like 1,512,37, or JSON"
        ) from None
    return ([], given) if isinstance(given, dict) else (given, {})


def _without_prefix(
    state: Mapping[str, Any], wanted: Mapping[str, Any]
) -> tuple[Mapping[str, Any], str]:
    """Return the state without a prefix that is not the class's own, and that prefix."""
    prefix = f"{next(iter(state), '').partition('.')[0]}."
    if any(key.startswith(prefix) for key in wanted):
        return state, ""
    if not all(key.startswith(prefix) for key in state):
        return state, ""
    return {key.removeprefix(prefix): value for key, value in state.items()}, prefix


def _misfits(state: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return how the keys and shapes differ; "" where they do not."""
    shared = state.keys() & wanted.keys()
    shapes = {key: (list(state[key].shape), list(wanted[key].shape)) for key in sorted(shared)}
    found = {
        "it lacks": [key for key in wanted if key not in state],
        "too many are": [key for key in state if key not in wanted],
        "of another shape are": [
            f"{key} {has} (the class has {wants})"
            for key, (has, wants) in shapes.items()
            if has != wants
        ],
    }
    return "; ".join(
        f"{text} {', '.join(keys[:_MOST_KEYS])}"
        + (f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else "")
        for text, keys in found.items()
        if keys
    )


def program_to_onnx(job: StepJob) -> dict[str, Any]:
    """Write what torch.export.save has written as ONNX."""
    job.progress("loading the program")
    try:
        program = torch.export.load(job.source)
    except (RuntimeError, ValueError, OSError) as error:
        raise InvalidRequest(f"{job.source}: PyTorch cannot load it: {_first(error)}") from None
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    user = list(program.graph_signature.user_inputs)
    given = [each[0] or name for each, name in zip(job.inputs, user, strict=False)]
    names = given if len(given) == len(user) else user
    infos = [_tensor_info(n, placeholders[u].meta["val"]) for n, u in zip(names, user, strict=True)]
    made = _run(job, program.module(), infos)
    job.progress("converting with torch.onnx")
    torch.onnx.export(
        program,
        (),
        job.target,
        input_names=names,
        output_names=made,
        external_data=False,
        verbose=False,
    )
    return {}


def _module(job: StepJob, module: Any) -> dict[str, Any]:
    parameters = inspect.signature(module.forward).parameters.values()
    names = [each.name for each in parameters if each.default is each.empty]
    return _to_onnx(job, module.eval(), names, dynamo=True)


def _to_onnx(
    job: StepJob, module: Any, parameters: Sequence[str], *, dynamo: bool
) -> dict[str, Any]:
    """Write `module`, whose inputs are `parameters`."""
    inputs = _inputs(job.source, parameters, job.inputs)
    names = [each["name"] for each in inputs]
    made = _run(job, module, inputs)
    # Of at least two: an exporter may take a size of one for a constant.
    example = tuple(
        torch.zeros([2 if d < 0 else d for d in each["shape"]], dtype=_dtype(each["datatype"]))
        for each in inputs
    )
    how: dict[str, Any] = {"dynamo": dynamo, "opset_version": _OPSET if dynamo else 17}
    open_sizes = [[i for i, d in enumerate(each["shape"]) if d < 0] for each in inputs]
    if dynamo:
        dim = torch.export.Dim.DYNAMIC
        how["dynamic_shapes"] = tuple(dict.fromkeys(places, dim) for places in open_sizes)
        how["external_data"] = False
    else:
        axes = {n: {i: f"{n}_{i}" for i in p} for n, p in zip(names, open_sizes, strict=True) if p}
        # What the network makes of an open batch has one, too.
        first = any(0 in places for places in open_sizes)
        axes.update({name: {0: f"{name}_0"} for name in made if first})
        how["dynamic_axes"] = axes
    job.progress("converting with torch.onnx")
    with warnings.catch_warnings():
        # The exporter for TorchScript is the only one for a saved file, and says it is deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(
            *(module, example, job.target),
            input_names=names,
            output_names=made,
            verbose=False,
            **how,
        )
    return {}


def _run(job: StepJob, module: Any, inputs: Sequence[TensorInfo]) -> list[str]:
    """Run the source on the samples; return the names of its outputs."""
    names = list(job.outputs)

    def run(arrays: Arrays) -> Arrays:
        with torch.no_grad():
            made = module(*(torch.from_numpy(arrays[each["name"]]) for each in inputs))
        tensors = _flat(made)
        if not names:
            names.extend(f"output_{index}" for index in range(len(tensors)))
        if len(names) != len(tensors):
            raise InvalidRequest(
                f"the model has {len(tensors)} outputs, and --outputs {len(names)} names"
            )
        return dict(zip(names, (tensor.numpy() for tensor in tensors), strict=True))

    try:
        job.run_source(inputs, run)
    except (RuntimeError, TypeError, IndexError) as error:
        raise InvalidRequest(
            f"the model fails on an input of that shape: {_first(error)}; give the right ones with "
            "--input NAME:SHAPE"
        ) from None
    return names


def _flat(made: Any) -> list[Any]:
    if isinstance(made, torch.Tensor):
        return [made]
    values = made.values() if isinstance(made, dict) else made
    return [tensor for value in values for tensor in _flat(value)]


def _inputs(
    source: str, names: Sequence[str], given: Sequence[tuple[str, str, list[int]]]
) -> list[TensorInfo]:
    if len(given) != len(names):
        example = f"{names[0] if names else 'x'}:-1x3x360x640"
        raise InvalidRequest(
            f"{source}: takes {len(names)} inputs ({', '.join(names)}), whose shapes are not in "
            f"the file; give each with --input, like --input {example}"
        )
    known = {name: (name, datatype, shape) for name, datatype, shape in given if name in names}
    ordered = [known[name] for name in names] if len(known) == len(names) else given
    return [
        info(given_name or name, datatype, shape)
        for name, (given_name, datatype, shape) in zip(names, ordered, strict=True)
    ]


def _tensor_info(name: str, value: Any) -> TensorInfo:
    shape = [size if isinstance(size, int) else -1 for size in value.shape]
    return info(name, str(value.dtype).removeprefix("torch."), shape)


def _dtype(name: str) -> Any:
    return torch.from_numpy(np.zeros(0, name)).dtype


def _first(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
