"""The class that a model's process runs for every framework, as it runs a user's model.py."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from edge_server.backends.frameworks.model_file import BadInput, model_file
from edge_server.backends.python.messages import Code
from edge_server.backends.python.pb_utils.responses import InferenceResponse
from edge_server.backends.python.pb_utils.tensor import PbTensor
from edge_server.backends.python.pb_utils.values import TritonError, printable
from edge_server.tensors import DataType, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from edge_server.backends.frameworks.model_file import Arrays, ModelFile, OpenModel
    from edge_server.backends.python.pb_utils.requests import InferenceRequest

# The first runs compile, choose kernels and allocate: they take ten times as long.
_WARM_UP_RUNS = 3


class TritonPythonModel:
    """A model of a framework; one batch at a time."""

    @staticmethod
    def auto_complete_config(arguments: Mapping[str, str]) -> str:
        """Return the `FileSignature` of the model's file as JSON."""
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
            made = self._model.run(_joined(batch), wanted)
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
        """Return the rows of each request in a batch."""
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
    """Return the model that the framework's module makes of its file, and the file."""
    config = json.loads(arguments["model_config"])
    directory = Path(arguments["model_repository"]) / arguments["model_version"]
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
    file = model_file(directory / config["default_model_filename"], config, device)
    framework = f"edge_server.backends.frameworks.{arguments['framework']}"
    model: OpenModel = importlib.import_module(framework).open_model(file)
    return model, file


def _joined(batch: Sequence[Arrays]) -> Arrays:
    if len(batch) == 1:
        return batch[0]
    return {name: np.concatenate([inputs[name] for inputs in batch]) for name in batch[0]}


def _zeros(spec: TensorSpec, *, batches: bool) -> NDArray[Any]:
    """Return the least input of zeros, or of empty texts."""
    shape = (*(1,) * batches, *(max(1, size) for size in spec.shape))
    if spec.datatype is DataType.BYTES:
        return np.full(shape, b"", np.object_)
    return np.zeros(shape, spec.datatype.numpy)
