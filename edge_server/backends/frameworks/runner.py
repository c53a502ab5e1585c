"""The class that a model's process runs for every framework, and what a framework's module gets.

Triton's names for the arguments and the results of a function:
inputs: all are arguments of the function, or all are `<text>__<index>`, or they are in order; of a
`model.pt2` also `ARGS[0]` and `KWARGS[name]`. Outputs: `<text>__<index>`, or in order; of a
`model.pt2` also `RESULT`, `RESULT[0]` and `RESULT[name]`.
"""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from edge_server.backends.python.messages import Code
from edge_server.backends.python.pb_utils.requests import InferenceResponse
from edge_server.backends.python.pb_utils.tensor import PbTensor, TritonError, printable
from edge_server.tensors import DataType, Signature, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.backends.python.pb_utils.requests import InferenceRequest

Arrays = Mapping[str, "NDArray[Any]"]
# By the names that PyTorch and TensorFlow share with numpy, and those of what numpy lacks.
DATA_TYPES = {
    **{datatype.numpy.name: datatype for datatype in DataType},
    "bfloat16": DataType.BF16,
    "string": DataType.BYTES,
}


class BadInput(ValueError):
    """A request's input is what the model cannot take; the text names it."""


@dataclass(frozen=True)
class ModelFile:
    """A model to open; the daemon sends it as JSON.

    Attributes:
        filename: of the file, or of the directory that its format is.
        inputs, outputs: those of the configuration, in order, with the model's own shapes, without
            the batch dimension; behind them what the sequence batcher adds.
        max_batch_size: 0 where the model's shapes have no batch dimension.
        accelerators: those of the configuration for the processor: name → parameters.
        threads: how many threads an inference uses where no parameter says it.
        device: `CPU`, `GPU` (the one that the process sees), or `MODEL`, where the file decides."""

    filename: str
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    parameters: Mapping[str, str]
    accelerators: Mapping[str, Mapping[str, str]]
    threads: int
    device: str = "CPU"

    @property
    def path(self) -> Path:
        return Path(self.filename)

    def full_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor as the configuration has it, batch dimension included."""
        shapes = {spec.name: spec.shape for spec in (*self.inputs, *self.outputs)}
        return (*(-1,) * (self.max_batch_size > 0), *shapes[name]) if name in shapes else None


class OpenModel(Protocol):
    """A model that can run; its signature is None where the file does not declare its tensors."""

    signature: Signature | None

    def run(self, inputs: Arrays, outputs: frozenset[str]) -> Arrays:
        """Return at least `outputs`; BYTES are object arrays of `bytes`, BF16 as in `DataType`.
        Raises BadInput, or any exception of the framework's."""
        ...


def enabled(text: str) -> bool:
    return text.lower() in ("true", "yes", "1")


_INDEXED = re.compile(r".*__(\d+)")
_ARGUMENT = re.compile(r"ARGS\[(\d+)\]|KWARGS\[(\w+)\]")
_RESULT = re.compile(r"RESULT(?:\[(\w+)\])?")


def call_order(names: Sequence[str], arguments: Sequence[str] = ()) -> list[str]:
    """Return the inputs, given in the order of the configuration, in the order of the call;
    `arguments` are the function's own names, empty where they are not known."""
    if arguments and len(names) > len(arguments):
        raise ValueError(
            f"{len(names)} inputs for a function of {len(arguments)}: {', '.join(arguments)}"
        )
    if arguments and set(names) <= set(arguments):
        return sorted(names, key=list(arguments).index)
    indexed = _indexed(names)
    if len(indexed) < len(names):
        return list(names)
    if [index for index, _ in indexed] != list(range(len(names))):
        raise ValueError(f"the inputs {', '.join(names)} are not numbered 0 to {len(names) - 1}")
    return [name for _, name in indexed]


def exported_call(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the inputs of an exported program: those in order, and argument → input for the
    rest."""
    matches = {name: _ARGUMENT.fullmatch(name) for name in names}
    by_name = {m[2]: name for name, m in matches.items() if m and m[2]}
    placed = {int(m[1]): name for name, m in matches.items() if m and m[1]}
    unplaced = [name for name in names if not matches[name]]
    return [placed[place] for place in sorted(placed)] or call_order(unplaced), by_name


def name_of(names: Sequence[str], index: int, word: str) -> str:
    """Return the name of tensor `index`: the configuration's, `<word>__<index>` where it has
    none."""
    indexed = _indexed(names)
    if names and len(indexed) == len(names):
        return dict(indexed).get(index, f"{word}__{index}")
    return names[index] if index < len(names) else f"{word}__{index}"


def result_of(made: Any, index: int, name: str) -> Any:
    """Return the result of a call that is output `index` of the configuration."""
    place = _RESULT.fullmatch(name)
    key = place[1] if place else None
    if isinstance(made, dict):
        if key in made:
            return made[key]
        raise TypeError(
            f"output '{name}': the model returns a dict, whose tensors have no order: of a "
            "model.pt2 RESULT[key] names one; TorchScript has to return a tuple"
        )
    # A list of texts is one tensor.
    several = isinstance(made, (tuple, list)) and not is_texts(made)
    results = made if several else (made,)
    if place:
        index = int(key) if key and key.isdigit() else 0 if key is None else len(results)
    elif indexed := _INDEXED.fullmatch(name):
        index = int(indexed[1])
    if index >= len(results):
        raise IndexError(f"output '{name}': the model has {len(results)} results")
    return results[index]


def is_texts(made: object) -> bool:
    return isinstance(made, list) and all(isinstance(each, str) for each in made)


def _indexed(names: Sequence[str]) -> list[tuple[int, str]]:
    return sorted((int(m[1]), name) for name in names if (m := _INDEXED.fullmatch(name)))


# The first runs compile, choose kernels and allocate: they take ten times as long.
_WARM_UP_RUNS = 3


class TritonPythonModel:
    """A model of a framework; one batch at a time."""

    @staticmethod
    def auto_complete_config(arguments: Mapping[str, str]) -> str:
        model, _ = _opened(arguments)
        return msgspec.json.encode(model.signature).decode()

    def initialize(self, arguments: Mapping[str, str]) -> None:
        self._model, file = _opened(arguments)
        self.signature = msgspec.json.encode(self._model.signature).decode()
        self._name = arguments["model_name"]
        self._backend = arguments["framework"]
        self._batches = file.max_batch_size > 0
        self._types = {spec.name: spec.datatype for spec in file.outputs}
        inputs = {spec.name: _zeros(spec, batches=self._batches) for spec in file.inputs}
        for _ in range(_WARM_UP_RUNS):
            # Zeros may mean nothing to the model: then its first requests warm it up.
            with suppress(Exception):
                self._model.run(inputs, frozenset(self._types))

    def execute(self, requests: list[InferenceRequest]) -> list[InferenceResponse]:
        wanted = frozenset(name for each in requests for name in each.requested_output_names())
        batch = [{t.name(): t.content[1] for t in each.inputs()} for each in requests]
        try:
            joined = batch[0]
            if len(batch) > 1:
                joined = {name: np.concatenate([each[name] for each in batch]) for name in joined}
            made = self._model.run(joined, wanted)
            outputs = {name: self._checked(name, made[name]) for name in wanted}
            return [self._response(rows, outputs) for rows in self._rows(batch, outputs)]
        except BadInput as error:
            failure = TritonError(str(error), Code.INVALID_ARG)
        except Exception as error:  # noqa: BLE001 - a framework may raise any exception
            text = f"{type(error).__name__}: {printable(error)}"
            failure = TritonError(f"{self._backend}: model '{self._name}' failed: {text}")
        return [InferenceResponse(error=failure) for _ in requests]

    def _checked(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        # The protocol has no tensors without dimensions: they are [1] outside.
        array = np.atleast_1d(array)
        if DataType.from_numpy(array.dtype) is not self._types.get(name):
            raise ValueError(
                f"output '{name}' is {array.dtype}, configured as {self._types[name].value}"
            )
        return array

    def _rows(self, batch: Sequence[Arrays], outputs: Arrays) -> list[slice]:
        if not self._batches:
            return [slice(None)]
        ends = np.cumsum([next(iter(inputs.values())).shape[0] for inputs in batch]).tolist()
        for name, array in outputs.items():
            if array.shape[0] != ends[-1]:
                raise ValueError(
                    f"output '{name}' has shape {list(array.shape)} for a batch of {ends[-1]}"
                )
        return [slice(*each) for each in zip([0, *ends], ends, strict=False)]

    def _response(self, rows: slice, outputs: Arrays) -> InferenceResponse:
        tensors = [PbTensor.over(n, self._types[n], a[rows]) for n, a in outputs.items()]
        return InferenceResponse(tensors)


def _opened(arguments: Mapping[str, str]) -> tuple[OpenModel, ModelFile]:
    # Threads of OpenMP sleep while they wait: a third of the processor time of an inference, where
    # other processes want the processors too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    device = arguments["model_instance_kind"]
    # Before the framework is imported. Some write to the user's home, which the sandbox closes; and
    # a framework takes the memory of every GPU that it sees.
    os.environ["HOME"] = tempfile.gettempdir()
    if device != "MODEL":
        on_gpu = device == "GPU"
        os.environ["CUDA_VISIBLE_DEVICES"] = arguments["model_instance_device_id"] * on_gpu
    file = replace(msgspec.json.decode(arguments["file"], type=ModelFile), device=device)
    framework = f"edge_server.backends.frameworks.{arguments['framework']}"
    model: OpenModel = importlib.import_module(framework).open_model(file)
    return model, file


def _zeros(spec: TensorSpec, *, batches: bool) -> NDArray[Any]:
    shape = (*(1,) * batches, *(max(1, size) for size in spec.shape))
    if spec.datatype is DataType.BYTES:
        return np.full(shape, b"", np.object_)
    return np.zeros(shape, spec.datatype.numpy)
