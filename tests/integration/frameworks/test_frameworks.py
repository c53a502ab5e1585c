"""Models of each framework, made by it, over gRPC: their answers, batches, crashes and reloads."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from google.protobuf import text_format
from integration.frameworks import networks
from integration.frameworks.daemon import params
from support.waiting import wait_until
from tritonclient.grpc import model_config_pb2 as pb
from tritonclient.utils import InferenceServerException

from edge_server.backends.frameworks.backend import complete
from edge_server.errors import ModelConfigError
from edge_server.model_config import completion
from edge_server.model_config.config import Completion, ModelConfig
from edge_server.model_config.files import ModelFiles
from edge_server.settings import Python

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from integration.frameworks.daemon import Served


def of(*backends: str) -> Any:
    """The test is for these frameworks: the others have no such models."""
    return pytest.mark.parametrize("served", params(*backends), indirect=True, scope="module")


CLIENTS, REQUESTS = 4, 30


def picture(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape, np.float32)


def close(made: np.ndarray, expected: np.ndarray) -> bool:
    return made.shape == expected.shape and bool(
        np.abs(made - expected).max() <= networks.TOLERANCE * max(1.0, np.abs(expected).max())
    )


@pytest.fixture
def net(served: Served) -> Any:
    """`net`, loaded for one test; its configuration."""
    yield served.load("net")
    served.client.unload_model("net")
    served.wait_for_children("net_", 0)


def test_any_size_of_picture_and_batch_gives_what_onnx_runtime_gives(
    served: Served, net: Any, onnx_says: Callable[..., np.ndarray]
) -> None:
    for shape in ((1, 3, 24, 32), (1, 3, 17, 9), (8, 3, 24, 32), (3, 3, 40, 40)):
        x = picture(*shape)
        assert close(served.only("net", x), onnx_says("net", x)), shape


def test_the_lane_models_twin_gives_what_onnx_runtime_gives(
    served: Served, onnx_says: Callable[..., np.ndarray]
) -> None:
    served.load("lane")
    x = picture(2, *networks.LANE_SHAPE)
    assert close(served.only("lane", x), onnx_says("lane", x))
    served.client.unload_model("lane")


def load(served: Served, errors: list[str], answered: list[int], expected: np.ndarray) -> None:
    """Ask `REQUESTS` times; keep what went wrong."""
    x = picture(1, *networks.NET_SHAPE)
    for _ in range(REQUESTS):
        try:
            if not close(served.only("net", x), expected):
                errors.append("another answer")
        except InferenceServerException as error:
            errors.append(str(error))
        answered.append(1)


def under_load(served: Served, expected: np.ndarray, meanwhile: Callable[[], None]) -> list[str]:
    """What went wrong in requests of `CLIENTS` clients, while `meanwhile` ran in their midst."""
    errors: list[str] = []
    answered: list[int] = []
    threads = [
        threading.Thread(target=load, args=(served, errors, answered, expected))
        for _ in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(answered) >= CLIENTS * REQUESTS // 3)
    meanwhile()
    for thread in threads:
        thread.join()
    return errors


def test_requests_side_by_side_run_as_batches(
    served: Served, net: Any, onnx_says: Callable[..., np.ndarray]
) -> None:
    expected = onnx_says("net", picture(1, *networks.NET_SHAPE))
    assert under_load(served, expected, lambda: None) == []
    (found,) = served.client.get_inference_statistics("net").model_stats
    assert found.inference_count == CLIENTS * REQUESTS
    assert found.execution_count < found.inference_count
    assert max(each.batch_size for each in found.batch_stats) > 1


def test_a_process_that_is_killed_costs_the_requests_in_it_only(
    served: Served, net: Any, onnx_says: Callable[..., np.ndarray]
) -> None:
    victim, _ = served.wait_for_children("net_", 2)
    expected = onnx_says("net", picture(1, *networks.NET_SHAPE))
    errors = under_load(served, expected, lambda: os.kill(victim, signal.SIGKILL))
    # One batch of it, of at most one request of each client.
    assert len(errors) <= CLIENTS
    assert all("is not healthy. Reason: it died of SIGKILL" in each for each in errors), errors
    assert victim not in served.wait_for_children("net_", 2)
    assert close(served.only("net", picture(1, *networks.NET_SHAPE)), expected)


@pytest.mark.long
def test_a_reload_under_load_fails_no_request(
    served: Served, net: Any, onnx_says: Callable[..., np.ndarray]
) -> None:
    before = set(served.wait_for_children("net_", 2))
    expected = onnx_says("net", picture(1, *networks.NET_SHAPE))
    path = served.repository / "net" / "config.pbtxt"

    def reload() -> None:
        more = ' parameters { key: "initialize_timeout_s" value { string_value: "200" } }'
        path.write_text(path.read_text() + more)
        served.load("net")

    assert under_load(served, expected, reload) == []
    assert before.isdisjoint(served.wait_for_children("net_", 2))


@of("openvino", "pytorch", "tensorflow")
def test_a_file_that_declares_its_tensors_completes_the_configuration(served: Served) -> None:
    model = "lane" if served.backend == "tensorflow" else "completed"
    config = served.load(model)
    assert config.max_batch_size == 4
    assert config.HasField("dynamic_batching")
    found = {t.name: list(t.dims) for t in (*config.input, *config.output)}
    assert (
        found
        == {
            "openvino": {"x": [3, -1, -1], "y": [4, -1, -1]},
            "pytorch": {"INPUT__0": [3, 24, 32], "OUTPUT__0": [4, 24, 32]},
            "tensorflow": {"x": [3, 360, 640], "y": [networks.LANE_ROWS, networks.LANE_COLUMNS]},
        }[served.backend]
    )
    served.client.unload_model(model)


@of("openvino", "tensorflow")
def test_a_configuration_that_the_file_does_not_agree_with_is_refused(served: Served) -> None:
    path = served.repository / "net" / "config.pbtxt"
    good = path.read_text()
    path.write_text(good.replace('name: "x"', 'name: "other"'))
    try:
        with pytest.raises(InferenceServerException, match="unexpected inference input 'other'"):
            served.load("net")
    finally:
        path.write_text(good)


@of("pytorch", "tensorflow")
def test_texts_pass_as_they_are(served: Served) -> None:
    texts = np.array(["Straße".encode(), b"", b"x" * 1000], np.object_)
    if served.backend == "pytorch":
        served.load("texts")
        made = served.infer("texts", texts=texts).as_numpy("y").tolist()
        assert made == [text + b"!" for text in texts]
        with pytest.raises(InferenceServerException, match="a text of TorchScript is UTF-8"):
            served.infer("texts", texts=np.array([b"\xff"], np.object_))
        served.client.unload_model("texts")
        return
    served.load("simple_identity")
    texts = np.array([[b"\xff\x00", *texts]], np.object_)
    made = served.infer("simple_identity", INPUT0=texts).as_numpy("OUTPUT0").tolist()
    assert made == texts.tolist()
    served.client.unload_model("simple_identity")


@of("pytorch", "tensorflow")
def test_tritons_documented_repositories_load_unchanged(served: Served) -> None:
    if served.backend == "pytorch":
        x = np.full((3, 224, 224), 0.5, np.float32)
        served.load("resnet50")
        found = served.infer("resnet50", input__0=x).as_numpy("output__0")
        assert found.shape == (1, 1000, 1, 1)
        assert np.allclose(found, 1.5)
        served.load("resnet_torchscript")
        assert np.allclose(served.only("resnet_torchscript", x[None]), 1.5)
        return
    served.load("resnet50")
    found = served.only("resnet50", np.full((2, 224, 224, 3), 0.5, np.float32))
    assert found.shape == (2, 1000)
    assert np.allclose(found, 1.5)
    served.client.unload_model("resnet50")
    served.load("simple_string")
    numbers = np.arange(16)
    texts = np.array([[str(n).encode() for n in numbers]], np.object_)
    made = served.infer("simple_string", INPUT0=texts, INPUT1=texts)
    assert made.as_numpy("OUTPUT0").tolist() == [[str(2 * n).encode() for n in numbers]]
    assert made.as_numpy("OUTPUT1").tolist() == [[b"0"] * 16]
    served.client.unload_model("simple_string")
    served.load("inception_graphdef")
    made = served.only("inception_graphdef", np.zeros((1, 299, 299, 3), np.float32))
    assert np.allclose(made.sum(), 1, atol=1e-3)
    served.client.unload_model("inception_graphdef")


@pytest.mark.parametrize(
    ("interpreter", "fault"),
    [
        (sys.executable, f"{sys.executable} -m pip install paddlepaddle"),
        ("/bin/false", "/bin/false is no Python that runs"),
        ("/nowhere/python", "/nowhere/python is no Python that runs"),
    ],
)
def test_a_python_without_the_framework_is_named_with_what_mends_it(
    tmp_path: Path, interpreter: str, fault: str
) -> None:
    (tmp_path / "1").mkdir()
    for name in ("model.pdmodel", "model.pdiparams"):
        (tmp_path / "1" / name).touch()
    files = ModelFiles("m", tmp_path, {1: tmp_path / "1"})
    message = text_format.Parse('backend: "paddle" ' + networks.config("x", "y"), pb.ModelConfig())
    chosen = Completion(python=Python(interpreters={"paddle": interpreter}))
    completion.complete(message, files, chosen)
    with pytest.raises(ModelConfigError) as caught:
        complete(files, 1, ModelConfig.of(message, chosen))
    assert fault in str(caught.value)
