"""`pytorch`: TorchScript (`model.pt`), what `torch.export` saves, and AOTInductor packages
(`model.pt2`).

`runner` has the rules for the names of inputs and outputs; a `forward` of TorchScript with one
dict gets the inputs by name. A package is machine code for one kind of processor or GPU.
"""

from __future__ import annotations

import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edge_server.backends.frameworks.runner import (
    DATA_TYPES,
    BadInput,
    call_order,
    enabled,
    exported_call,
    is_texts,
    name_of,
    result_of,
)
from edge_server.tensors import DataType, Signature, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.backends.frameworks.runner import Arrays, ModelFile


def open_model(file: ModelFile) -> PyTorchModel:
    given = file.parameters
    threads = given.get("INTRA_OP_THREAD_COUNT") or given.get("NUM_THREADS") or file.threads
    torch.set_num_threads(int(threads))
    between = given.get("INTER_OP_THREAD_COUNT") or given.get("NUM_INTEROP_THREADS") or 1
    torch.set_num_interop_threads(int(between))
    torch.backends.cudnn.enabled = not enabled(given.get("DISABLE_CUDNN", ""))
    device = "cuda" if file.device == "GPU" else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"PyTorch {torch.__version__} of this Python reaches no GPU; install the build for "
            "this machine's CUDA (on a Jetson, NVIDIA's for its JetPack), or give KIND_CPU"
        )
    if file.path.suffix != ".pt2":
        return PyTorchModel(file, device, _script(file, device))
    if _is_package(file.path):
        package = torch._inductor.aoti_load_package(str(file.path))  # noqa: SLF001 - documented so
        return PyTorchModel(file, device, _exported(file, package))
    program = torch.export.load(file.path)
    call = _exported(file, program.module().to(device))
    return PyTorchModel(file, device, call, _signature(program, file))


class PyTorchModel:
    """A function of PyTorch with the names that the configuration gives its tensors; `call` takes
    the inputs by those names."""

    def __init__(
        self,
        file: ModelFile,
        device: str,
        call: Callable[[dict[str, Any]], Any],
        signature: Signature | None = None,
    ) -> None:
        self.signature = signature
        self._file = file
        # The device that the file names stays where the kind is MODEL.
        self._device = None if file.device == "MODEL" else device
        self._call = call
        # What was exported has no mode for training, and refuses inference tensors that it changes.
        self._inference_mode = file.path.suffix != ".pt2" and enabled(
            file.parameters.get("INFERENCE_MODE", "true")
        )

    def run(self, inputs: Arrays, outputs: frozenset[str]) -> Arrays:
        values = {name: self._value(name, array) for name, array in inputs.items()}
        with torch.inference_mode() if self._inference_mode else torch.no_grad():
            made = self._call(values)
            return {
                spec.name: _array(result_of(made, index, spec.name))
                for index, spec in enumerate(self._file.outputs)
                if spec.name in outputs
            }

    def _value(self, name: str, array: NDArray[Any]) -> Any:
        if array.dtype == np.object_:
            return _texts(name, array)
        if array.dtype == DataType.BF16.numpy:
            return torch.from_numpy(array.view("<i2")).view(torch.bfloat16).to(self._device)
        return torch.from_numpy(array).to(self._device)


def _script(file: ModelFile, device: str) -> Callable[[dict[str, Any]], Any]:
    """Return the call of a TorchScript module: in order, or with one dict."""
    optimized = not enabled(file.parameters.get("DISABLE_OPTIMIZED_EXECUTION", ""))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        location = None if file.device == "MODEL" else device
        module = torch.jit.load(str(file.path), map_location=location).eval()
    arguments = module.forward.schema.arguments[1:]
    takes_dict = len(arguments) == 1 and str(arguments[0].type).startswith("Dict[str,")
    names = [spec.name for spec in file.inputs]
    order = names if takes_dict else call_order(names, [each.name for each in arguments])

    def call(values: dict[str, Any]) -> Any:
        with torch.jit.optimized_execution(optimized):
            return module(values) if takes_dict else module(*(values[name] for name in order))

    return call


def _exported(file: ModelFile, module: Any) -> Callable[[dict[str, Any]], Any]:
    """Return the call of a saved `torch.export`, or of an AOTInductor package."""
    order, by_name = exported_call([spec.name for spec in file.inputs])

    def call(values: dict[str, Any]) -> Any:
        named = {key: values[name] for key, name in by_name.items()}
        return module(*(values[name] for name in order), **named)

    return call


def _signature(program: Any, file: ModelFile) -> Signature:
    inputs, outputs = ([spec.name for spec in specs] for specs in (file.inputs, file.outputs))
    made = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    ends = program.graph_signature
    return Signature(
        tuple(_spec(name_of(inputs, i, "INPUT"), made[n]) for i, n in enumerate(ends.user_inputs)),
        tuple(
            _spec(name_of(outputs, i, "OUTPUT"), made[n]) for i, n in enumerate(ends.user_outputs)
        ),
    )


def _is_package(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any("/aotinductor/" in f"/{name}" for name in archive.namelist())
    except zipfile.BadZipFile as error:
        raise ValueError(f"it is no .pt2 file: {error}; save it with torch.export.save") from error


def _spec(name: str, value: Any) -> TensorSpec:
    datatype = DATA_TYPES.get(str(getattr(value, "dtype", "")).removeprefix("torch."))
    if datatype is None:
        raise ValueError(f"'{name}' is {type(value).__name__}, not a tensor that can be passed on")
    shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    return TensorSpec(name, datatype, shape or (1,))


def _texts(name: str, array: NDArray[Any]) -> list[str]:
    try:
        return [element.decode() for element in array.flat]
    except UnicodeDecodeError as error:
        raise BadInput(
            f"input '{name}': a text of TorchScript is UTF-8, which {error.object[:32]!r} is not"
        ) from error


def _array(value: Any) -> NDArray[Any]:
    if is_texts(value):
        return np.array([text.encode() for text in value], np.object_)
    value = value.detach().cpu().contiguous()
    if value.dtype is torch.bfloat16:
        bits: NDArray[Any] = value.view(torch.int16).numpy()
        return bits.view(DataType.BF16.numpy)
    found: NDArray[Any] = value.numpy()
    return found
