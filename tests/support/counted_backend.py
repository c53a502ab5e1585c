"""A backend of the tests' own, which knows what it made, and holds a load at its gate."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.backends import BACKENDS
from edge_server.backends.contract import Model, TensorInstance, Tensors
from edge_server.errors import InternalError, Unavailable
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.backends.contract import LoadContext, ProgressCallback
    from edge_server.model_config.config import ModelConfig, Placement
    from edge_server.model_config.files import ModelFiles

TIMEOUT_S = 30.0


class Counted(Model):
    """A model that adds the number in its file (default `add`; none is 0) to `a`, giving `b`."""

    def __init__(self, name: str, number: float) -> None:
        self.name = name
        self.number = number
        self.closed = 0

    def make_instance(self, name: str, placement: Placement) -> TensorInstance:
        return TensorInstance(self._run)

    def close(self) -> None:
        self.closed += 1

    def _run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        if self.closed:
            raise InternalError(f"{self.name} is closed")
        array = inputs["a"].array
        added = (array + np.float32(self.number)).astype(array.dtype)
        return {name: Tensor(added) for name in outputs}


class Gate:
    """Where a load waits until it may go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self.reached.set()
        assert self._open.wait(TIMEOUT_S)


class CountedBackend:
    """Makes such models.

    Attributes:
        made: every model, in order.
        loads: model name → how many were begun.
        gates: model name → where its loads wait.
        fails: model name → what its loads raise.
        tell: model name → what its last load was given to tell by.
        to_prepare: files of models that must be prepared before they can be loaded.
        cannot_prepare: what preparing any raises.
    """

    def __init__(self) -> None:
        self.made: list[Counted] = []
        self.gates: dict[str, Gate] = {}
        self.fails: dict[str, Exception] = {}
        self.tell: dict[str, ProgressCallback] = {}
        self.loads: defaultdict[str, int] = defaultdict(int)
        self.to_prepare: set[str] = set()
        self.cannot_prepare: Exception | None = None

    def complete(self, files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
        return config

    def load(self, context: LoadContext) -> Counted:
        config = context.config
        self.loads[config.name] += 1
        self.tell[config.name] = context.progress
        if gate := self.gates.get(config.name):
            gate.pass_through()
        if error := self.fails.get(config.name):
            raise error
        file = config.default_model_filename or "add"
        if file in self.to_prepare:
            if not context.builds:
                raise Unavailable(f"{file} is not prepared")
            self.prepare(context)
        path = context.directory / file
        number = float(path.read_text()) if path.exists() else 0.0
        if number < 0:
            sys.exit("a model that ends the process")
        model = Counted(config.name, number)
        self.made.append(model)
        return model

    def prepare(self, context: LoadContext) -> None:
        file = context.config.default_model_filename
        if file not in self.to_prepare:
            return
        context.progress("half of it")
        if gate := self.gates.get(file):
            gate.pass_through()
        if self.cannot_prepare is not None:
            raise self.cannot_prepare
        self.to_prepare.discard(file)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> CountedBackend:
    backend = CountedBackend()
    monkeypatch.setitem(BACKENDS, "counted", "edge_server_counted_backend")
    monkeypatch.setitem(sys.modules, "edge_server_counted_backend", backend)
    return backend


@pytest.fixture
def gate(counted: CountedBackend) -> Iterator[Callable[[str], Gate]]:
    """From now on, loads of the model of that name wait at the gate that this gives."""

    def make(name: str) -> Gate:
        return counted.gates.setdefault(name, Gate())

    yield make
    # A test that failed must not keep its threads waiting.
    for each in counted.gates.values():
        each.open()
