"""A model that hangs while it is checked is refused, and left alone; the others load."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.endless_onnx import write_endless_onnx
from support.waiting import wait_until

from edge_server.backends import BACKENDS
from edge_server.backends.contract import TensorModel
from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.inference import scheduling
from edge_server.inference.scheduling import Scheduling
from edge_server.lifecycle.build import Build, ModelLoad
from edge_server.lifecycle.model_spec import LoadedVersions, LoadFailure, ModelSpec
from edge_server.process.threads import GivenUp, while_wanted
from edge_server.repository.scan import files_in
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.model_folders import WriteModel

    from edge_server.backends.contract import LoadContext, Tensors
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.files import ModelFiles

TIMEOUT_S = 30.0
CONFIG = (
    'backend: "hanging" input { name: "a" data_type: TYPE_FP32 dims: 1 } '
    'output { name: "b" data_type: TYPE_FP32 dims: 1 } '
)
QUEUED = "max_batch_size: 4 dynamic_batching { }"


class HangingBackend:
    """Its models answer when `goes_on` is set; the one that was made last is told of."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.closed = threading.Event()

    def complete(self, files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
        return config

    def load(self, context: LoadContext) -> TensorModel:
        model = TensorModel(self._run)
        model.close = self.closed.set
        return model

    def _run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        assert self.goes_on.wait(TIMEOUT_S)
        assert not self.closed.is_set(), "it was closed while it ran"
        return {"b": Tensor(inputs["a"].array)}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> HangingBackend:
    made = HangingBackend()
    monkeypatch.setitem(BACKENDS, "hanging", "edge_server_hanging_backend")
    monkeypatch.setitem(sys.modules, "edge_server_hanging_backend", made)
    return made


@pytest.fixture
def build(write_model: WriteModel) -> Callable[..., LoadedVersions | LoadFailure]:
    def build(timeout_s: float, extra: str = "") -> LoadedVersions | LoadFailure:
        directory = write_model("m", CONFIG + extra)
        (directory / "golden").mkdir(exist_ok=True)
        one = np.zeros((1, 1) if extra else 1, "<f4")
        np.savez(directory / "golden" / "x.npz", **{"input.a": one, "output.b": one})
        return Build(Scheduling(), timeout_s=timeout_s).model(
            ModelLoad(ModelSpec.read(files_in(directory)))
        )

    return build


@pytest.mark.parametrize("extra", ["", QUEUED])
def test_a_validation_that_hangs_fails_its_load_and_the_model_is_closed_when_it_comes_back(
    extra: str, backend: HangingBackend, build: Callable[..., LoadedVersions | LoadFailure]
) -> None:
    failure = build(0.05, extra)
    assert isinstance(failure, LoadFailure)
    assert isinstance(failure.error, ModelConfigError)
    assert str(failure.error) == (
        "model 'm': its check before it serves: it hangs: no progress for 0.05 s; fix the "
        "model, or record a golden pair that it responds to"
    )
    assert not backend.closed.is_set()
    backend.goes_on.set()
    assert backend.closed.wait(TIMEOUT_S)


def test_a_validation_that_does_not_hang_is_what_it_was(
    backend: HangingBackend, build: Callable[..., LoadedVersions | LoadFailure]
) -> None:
    backend.goes_on.set()
    built = build(TIMEOUT_S)
    assert isinstance(built, LoadedVersions)
    assert not backend.closed.is_set()
    built.close()
    assert backend.closed.is_set()


WARMED = """backend: "onnxruntime" model_warmup { name: "w" inputs {
    key: "times" value { data_type: TYPE_INT64 dims: 1 zero_data: true } } }"""


def runs() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name in ("validate-m", "warm-up-m")]


@pytest.mark.parametrize("config", ['backend: "onnxruntime"', WARMED])
def test_a_run_of_onnxruntime_that_hangs_before_its_model_serves_is_ended(
    config: str, write_model: WriteModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "RUN_TIMEOUT_S", 0.2)
    directory = write_model("m", config)
    write_endless_onnx(directory / "1" / "model.onnx", always=True)
    failure = Build(Scheduling(), timeout_s=0.2).model(
        ModelLoad(ModelSpec.read(files_in(directory)))
    )
    assert isinstance(failure, LoadFailure)
    assert isinstance(failure.error, ModelLoadError)
    assert "it hangs: no progress for 0.2 s" in failure.reason
    wait_until(lambda: not runs())


@pytest.mark.parametrize("config", ['backend: "onnxruntime"', WARMED])
def test_a_load_that_is_given_up_while_onnxruntime_runs_leaves_no_run(
    config: str, write_model: WriteModel
) -> None:
    directory = write_model("m", config)
    write_endless_onnx(directory / "1" / "model.onnx", always=True)
    with while_wanted(lambda: "the server ends" if runs() else ""):
        failure = Build(Scheduling()).model(ModelLoad(ModelSpec.read(files_in(directory))))
    assert isinstance(failure, LoadFailure)
    assert isinstance(failure.error, GivenUp)
    wait_until(lambda: not runs())
