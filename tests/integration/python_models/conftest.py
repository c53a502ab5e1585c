"""Python models, loaded as the daemon loads them, in processes of their own."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.waiting import TIMEOUT_S, wait_until

from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelRegistry
from edge_server.lifecycle.lifecycle import ModelLifecycle
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.records import ModelTable
from edge_server.model_config.config import Completion
from edge_server.repository.scan import Repositories
from edge_server.requests import InferRequest, InferResponse
from edge_server.settings import Python
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from edge_server.backends.python.backend import PythonModel
    from edge_server.inference.registry import ModelEntry
    from edge_server.requests import ResponseCallback

IO = (
    'input { name: "x" data_type: TYPE_INT32 dims: -1 } '
    'output { name: "y" data_type: TYPE_INT32 dims: -1 } '
)


class Served:
    """A loaded repository, and short ways to ask its models."""

    def __init__(self, directory: Path, python: Python) -> None:
        self.registry = ModelRegistry()
        self.loader = RepositoryLoader(
            ModelLifecycle(ModelTable(self.registry)),
            Repositories([directory]),
            completion=Completion(python=python),
        )
        self.failed = self.loader.load_all()
        self.plane = DataPlane(self.registry)

    def infer(self, model: str, *values: int, **request: object) -> InferResponse:
        return self.plane.infer(request_of(model, *values, **request))

    def values(self, model: str, *values: int, **request: object) -> list[int]:
        """`y` for `x`."""
        return y_of(self.infer(model, *values, **request))

    def submit(self, model: str, *values: int, **request: object) -> Answers:
        answers = Answers()
        self.plane.submit(request_of(model, *values, **request), answers)
        return answers

    def entry(self, name: str) -> ModelEntry:
        return self.registry.snapshot.entries[(name, 1)]

    def model(self, name: str) -> PythonModel:
        loaded = self.entry(name).loaded
        assert loaded is not None
        return loaded.model

    def wait_until_ready(self, name: str) -> None:
        wait_until(
            lambda: self.plane.model_ready(name, ""),
            TIMEOUT_S,
            otherwise=lambda: self.model(name).not_ready_reason(),
        )


def request_of(model: str, *values: int, **request: object) -> InferRequest:
    tensor = Tensor(np.array(values, np.int32))
    return InferRequest(model, {"x": tensor}, **request)


def y_of(answer: ResponseCallback) -> list[int]:
    assert isinstance(answer, InferResponse), answer
    made: list[int] = answer.outputs["y"].array.tolist()
    return made


class Answers:
    """A `Respond` that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[ResponseCallback, bool]] = []
        self._change = threading.Condition()

    def __call__(self, answer: ResponseCallback, final: bool) -> None:
        with self._change:
            self.heard.append((answer, final))
            self._change.notify_all()

    def wait_for(self, count: int) -> None:
        with self._change:
            assert self._change.wait_for(lambda: len(self.heard) >= count, TIMEOUT_S), self.heard

    def last(self) -> ResponseCallback:
        """The last answer, once it has come."""
        return self.all()[-1]

    def values(self) -> list[list[int]]:
        """`y` of each answer that has one, once the last has come."""
        return [y_of(answer) for answer in self.all() if answer is not None]

    def all(self) -> list[ResponseCallback]:
        with self._change:
            assert self._change.wait_for(lambda: self.heard and self.heard[-1][1], TIMEOUT_S)
        return [answer for answer, _ in self.heard]


@pytest.fixture
def serve_with(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """As `serve`; the settings come before the models."""
    made: list[Served] = []

    def load(python: Python, **models: str | tuple[str, str]) -> Served:
        write_models(tmp_path / "models", models)
        made.append(Served(tmp_path / "models", python))
        return made[-1]

    yield load
    for served in made:
        served.registry.clear()


@pytest.fixture
def serve(serve_with: Callable[..., Served]) -> Callable[..., Served]:
    """Loads models of `x` and `y`: name = body of the class, or (more of config.pbtxt, body)."""
    return partial(serve_with, Python())


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes such models, and gives their repository."""

    def write(**models: str | tuple[str, str]) -> Path:
        write_models(tmp_path / "models", models)
        return tmp_path / "models"

    return write


@pytest.fixture
def source() -> Callable[[str], bytes]:
    """A model.py around the methods of its class, as a model sends it along."""
    return lambda body: model_source(body).encode()


def write_models(repository: Path, models: Mapping[str, str | tuple[str, str]]) -> None:
    for name, model in models.items():
        config, source = ("", model) if isinstance(model, str) else model
        directory = repository / name
        (directory / "1").mkdir(parents=True, exist_ok=True)
        (directory / "config.pbtxt").write_text(f'backend: "python" {IO} {config}')
        (directory / "1" / "model.py").write_text(model_source(source))


def model_source(body: str) -> str:
    """A model.py around the methods of its class, with what most of them need."""
    head = (
        "import json, os, signal, sys, threading, time\n"
        "import numpy as np\n"
        "import triton_python_backend_utils as pb_utils\n\n"
        "def x(request):\n"
        "    return pb_utils.get_input_tensor_by_name(request, 'x').as_numpy()\n\n"
        "def y(values, **more):\n"
        "    tensor = pb_utils.Tensor('y', np.array(values, np.int32))\n"
        "    return pb_utils.InferenceResponse([tensor], **more)\n\n"
        "class TritonPythonModel:\n"
    )
    lines = body.strip("\n").split("\n")
    indent = len(lines[0]) - len(lines[0].lstrip())
    return head + "".join(f"    {line[indent:]}\n" for line in lines)
