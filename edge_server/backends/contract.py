"""What a backend is: Backend → Model → Instance.

A backend that only knows tensors writes `run` and wraps it with `TensorInstance`; one that
answers requests in its own order (Python models, decoupled models) implements `Instance`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from edge_server.errors import EdgeServerError
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.files import ModelFiles

Tensors = Mapping[str, Tensor]
Run = Callable[[Tensors, frozenset[str]], Tensors]


@dataclass(frozen=True)
class Placement:
    """Where a model shall run; `CPU` is the only kind until a GPU can be driven."""

    kind: str = "CPU"


@dataclass(frozen=True, eq=False)
class ExecuteRequest:
    """One request as an instance sees it: checked inputs, and a way to answer.

    Attributes:
        inputs: full shapes, batch dimension included.
        outputs: the names that are wanted.
        respond: called with the outputs or an error, and whether that was the last response.
    """

    inputs: Tensors
    outputs: frozenset[str]
    respond: Callable[[Tensors | EdgeServerError, bool], None]


class Instance(Protocol):
    """Runs requests, one `execute` at a time."""

    def execute(self, requests: Sequence[ExecuteRequest]) -> None:
        """Answer each request through its own `respond`, the last time with `final=True`."""
        ...

    def close(self) -> None: ...


class Model(Protocol):
    """One loaded version; it makes instances and is closed once, after the last of them."""

    def make_instance(self, name: str) -> Instance: ...

    def close(self) -> None: ...


class Backend(Protocol):
    """How one kind of model is completed and loaded. A module is a fine backend."""

    def complete(self, files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
        """The configuration with what the model's own files say of its inputs and outputs.

        Raises:
            ModelConfigError: files and configuration disagree, or the file cannot be read.
        """
        ...

    def load(self, directory: Path, config: ModelConfig, placement: Placement) -> Model:
        """The model in the version directory, ready to make instances.

        Raises:
            ModelConfigError: the model cannot be loaded; the text names the file and the remedy.
        """
        ...


class TensorInstance:
    """An `Instance` over a function from tensors to tensors."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def execute(self, requests: Sequence[ExecuteRequest]) -> None:
        for request in requests:
            answer: Tensors | EdgeServerError
            try:
                answer = self._run(request.inputs, request.outputs)
            except EdgeServerError as error:
                answer = error
            request.respond(answer, True)

    def close(self) -> None:
        """Nothing of its own to release."""


class TensorModel:
    """A `Model` whose instances share one function and hold nothing else."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def make_instance(self, name: str) -> TensorInstance:  # noqa: ARG002 - the contract names it
        return TensorInstance(self._run)

    def close(self) -> None:
        """Nothing to release."""
