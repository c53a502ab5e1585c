"""`pytorch`: TorchScript (`model.pt`), what `torch.export` saves, and AOTInductor packages
(`model.pt2`).

`runner` has the rules for the names of inputs and outputs; a `forward` of TorchScript with one
dict gets the inputs by name. A package is machine code for one kind of processor or GPU.

PyTorch is imported by the process of the model alone.
"""

from __future__ import annotations

import warnings
import zipfile
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edge_server.backends.frameworks.runner import (
    DATA_TYPES,
    BadInput,
    FileSignature,
    call_order,
    enabled,
    exported_call,
    is_texts,
    name_of,
    result_of,
)
from edge_server.tensors import DataType, TensorSpec

if TYPE_CHECKING:
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
        return ScriptModel(file, device)
    if _is_package(file.path):
        package = torch._inductor.aoti_load_package(str(file.path))  # noqa: SLF001 - documented so
        return ExportedModel(file, package, device)
    program = torch.export.load(file.path)
    model = ExportedModel(file, program.module().to(device), device)
    model.signature = _signature(program, file)
    return model


class PyTorchModel:
    """A function of PyTorch with the names that the configuration gives its tensors."""

    signature: FileSignature | None = None

    def __init__(self, file: ModelFile, device: str) -> None:
        self._file = file
        self._device = None if file.device == "MODEL" else device
        self._inference_mode = enabled(file.parameters.get("INFERENCE_MODE", "true"))
        self._scalars = {spec.name for spec in file.inputs if spec.shape == ()}

    def run(self, inputs: Arrays, outputs: frozenset[str]) -> Arrays:
        values = {name: self._value(name, array) for name, array in inputs.items()}
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode() if self._inference_mode else torch.no_grad())
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

    def _call(self, values: dict[str, Any]) -> Any:
        raise NotImplementedError


class ScriptModel(PyTorchModel):
    def __init__(self, file: ModelFile, device: str) -> None:
        super().__init__(file, device)
        for key, switch in (
            ("ENABLE_JIT_EXECUTOR", "_jit_set_profiling_executor"),
            ("ENABLE_JIT_PROFILING", "_jit_set_profiling_mode"),
            ("ENABLE_TENSOR_FUSER", "_jit_set_texpr_fuser_enabled"),
        ):
            if key in file.parameters:
                getattr(torch._C, switch)(enabled(file.parameters[key]))  # noqa: SLF001 - Triton's
        self._optimized = not enabled(file.parameters.get("DISABLE_OPTIMIZED_EXECUTION", ""))
        # The device that the file names stays where the kind is MODEL.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._module = torch.jit.load(str(file.path), map_location=self._device).eval()
        arguments = self._module.forward.schema.arguments[1:]
        self._takes_dict = len(arguments) == 1 and str(arguments[0].type).startswith("Dict[str,")
        names = [spec.name for spec in file.inputs]
        self._order = names if self._takes_dict else call_order(names, [a.name for a in arguments])

    def _call(self, values: dict[str, Any]) -> Any:
        with torch.jit.optimized_execution(self._optimized):
            if self._takes_dict:
                return self._module(values)
            return self._module(*(values[name] for name in self._order))


class ExportedModel(PyTorchModel):
    """A saved `torch.export`, or an AOTInductor package."""

    def __init__(self, file: ModelFile, module: Any, device: str) -> None:
        super().__init__(file, device)
        self._module = module
        # What was exported has no mode for training, and refuses inference tensors that it changes.
        self._inference_mode = False
        names = [spec.name for spec in file.inputs]
        self._order, self._by_name = exported_call(names)

    def _call(self, values: dict[str, Any]) -> Any:
        named = {key: values[name] for key, name in self._by_name.items()}
        return self._module(*(values[name] for name in self._order), **named)


def _signature(program: Any, file: ModelFile) -> FileSignature:
    inputs, outputs = ([spec.name for spec in specs] for specs in (file.inputs, file.outputs))
    made = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    ends = program.graph_signature
    return FileSignature(
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
