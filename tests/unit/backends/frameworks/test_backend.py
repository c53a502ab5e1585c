"""What is refused of a framework's model before any process runs."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.frameworks.backend import complete
from edge_server.errors import ModelConfigError
from edge_server.model_config import completion
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.files import ModelFiles

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = (
    'input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 3, -1 ] } '
    'output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: 5 } '
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The modules that this Python is taken to have beside its own."""
    modules = {"torch", "tensorflow", "openvino", "paddle"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if name in modules else None
    )
    return modules


def completed(directory: Path, text: str, *files: str) -> ModelConfig:
    (directory / "1").mkdir(exist_ok=True)
    for file in files:
        (directory / "1" / file).touch()
    message = text_format.Parse(text, pb.ModelConfig())
    found = ModelFiles("m", directory, {1: directory / "1"})
    completion.complete(message, found)
    return complete(found, 1, ModelConfig.of(message))


def test_a_whole_configuration_is_completed_without_the_framework(
    tmp_path: Path, installed: set[str]
) -> None:
    config = completed(tmp_path, 'backend: "openvino" max_batch_size: 4 ' + TENSORS, "model.xml")
    assert [(spec.name, spec.shape) for spec in config.inputs] == [("INPUT__0", (3, -1))]
    assert config.dynamic_batching is not None


def test_a_torchscript_model_is_served_as_it_is_configured(
    tmp_path: Path, installed: set[str]
) -> None:
    config = completed(tmp_path, 'platform: "pytorch_libtorch"' + TENSORS, "model.pt")
    assert config.max_batch_size == 0
    assert config.dynamic_batching is None


@pytest.mark.parametrize(
    ("backend", "module", "file"),
    [
        ("pytorch", "torch", "model.pt"),
        ("tensorflow", "tensorflow", "model.graphdef"),
        ("openvino", "openvino", "model.xml"),
    ],
)
def test_a_missing_framework_is_named_with_the_command_that_installs_it(
    tmp_path: Path, installed: set[str], backend: str, module: str, file: str
) -> None:
    installed.remove(module)
    with pytest.raises(ModelConfigError) as caught:
        completed(tmp_path, f'backend: "{backend}" {TENSORS}', file)
    assert f"pip install 'edge-server[{backend}]'" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "files", "fault"),
    [
        ('backend: "openvino"', (), "model.xml: missing; model 'm' is loaded from it"),
        ('backend: "paddle"' + TENSORS, ("model.pdmodel",), "model.pdiparams: missing"),
        ('backend: "pytorch"', ("model.pt",), "has no inputs, and model.pt does not declare them"),
        (
            'backend: "pytorch" input { name: "x" } output { name: "y" }',
            ("model.pt",),
            "model input 'x' must specify 'data_type' for m",
        ),
        (
            'backend: "pytorch" parameters { key: "INFERENCE_MODE" value { string_value: "?" } }'
            + TENSORS,
            ("model.pt",),
            "INFERENCE_MODE",
        ),
        (
            'backend: "openvino" parameters { key: "INFERENCE_NUM_THREADS" value { '
            'string_value: "0" } }' + TENSORS,
            ("model.xml",),
            "INFERENCE_NUM_THREADS",
        ),
        (
            'backend: "openvino" parameters { key: "execution_timeout_s" value { '
            'string_value: "-1" } }' + TENSORS,
            ("model.xml",),
            'execution_timeout_s: expected a number > 0.0; got "-1"',
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_place(
    tmp_path: Path, installed: set[str], text: str, files: tuple[str, ...], fault: str
) -> None:
    with pytest.raises(ModelConfigError) as caught:
        completed(tmp_path, text, *files)
    assert fault in str(caught.value)


def test_a_parameter_without_effect_is_logged(
    tmp_path: Path, installed: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        completed(
            tmp_path,
            'backend: "pytorch" parameters { key: "ENABLE_WEIGHT_SHARING" value { '
            'string_value: "true" } }' + TENSORS,
            "model.pt",
        )
    assert "parameter 'ENABLE_WEIGHT_SHARING' has no effect here" in caplog.text
