"""Models are loaded, reloaded and unloaded over the wire, by the stock client."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper, numpy_helper
from support.verb import run_verb
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

from edge_server.cli.model_push import write_manifest
from edge_server.repository.manifest import SigningKey, make_keys

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

IDENTITY = (
    'backend: "identity" input { name: "a" data_type: TYPE_FP32 dims: -1 } '
    'output { name: "b" data_type: TYPE_FP32 dims: -1 }'
)
ENSEMBLE = (
    'platform: "ensemble" input { name: "x" data_type: TYPE_FP32 dims: -1 } '
    'output { name: "z" data_type: TYPE_FP32 dims: -1 } '
    'ensemble_scheduling { step { model_name: "echo" model_version: -1 '
    'input_map { key: "a" value: "x" } output_map { key: "b" value: "z" } } }'
)
OVERRIDE = {
    "backend": "identity",
    "input": [{"name": "p", "data_type": "TYPE_INT32", "dims": [-1]}],
    "output": [{"name": "q", "data_type": "TYPE_INT32", "dims": [-1]}],
    "parameters": {"allow_interface_change": {"string_value": "true"}},
}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """`echo`, an ensemble `relay` of it, and `broken`."""
    directory = tmp_path / "models"
    for name, config in (("echo", IDENTITY), ("relay", ENSEMBLE), ("broken", "no such field")):
        (directory / name / "1").mkdir(parents=True)
        (directory / name / "config.pbtxt").write_text(config)
    return directory


@pytest.fixture
def server(
    models: Path, start: Callable[..., Any], client: Callable[..., triton.InferenceServerClient]
) -> triton.InferenceServerClient:
    """In explicit mode, with nothing loaded."""
    return client(start("--model-repository", str(models), "--model-control-mode", "explicit"))


def index(server: triton.InferenceServerClient) -> dict[tuple[str, str], tuple[str, str]]:
    models = server.get_model_repository_index().models
    return {(m.name, m.version): (m.state, m.reason) for m in models}


def ask(server: triton.InferenceServerClient, model: str, tensor: str = "a") -> list[float]:
    values = triton.InferInput(tensor, [2], "FP32")
    values.set_data_from_numpy(np.array([1.0, 2.0], np.float32))
    response = server.infer(model, [values])
    found: list[float] = response.as_numpy("z" if tensor == "x" else "b").tolist()
    return found


def refusal(call: Callable[..., object], *arguments: object, **named: object) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        call(*arguments, **named)
    return caught.value.status(), caught.value.message()


def wait_until_unloaded(
    server: triton.InferenceServerClient, *names: str, version: str = "1"
) -> None:
    """Unloading returns at once; nothing here is in flight, so it ends soon."""
    unloaded = {(name, version): ("UNAVAILABLE", "unloaded") for name in names}
    wait_until(lambda: unloaded.items() <= index(server).items(), otherwise=lambda: index(server))


def test_an_explicit_server_loads_on_request_and_lists_what_it_could_load(
    server: triton.InferenceServerClient,
) -> None:
    assert server.is_server_ready()
    nothing = ("", "")
    assert index(server) == {
        ("broken", ""): nothing,
        ("echo", ""): nothing,
        ("relay", ""): nothing,
    }
    assert not server.is_model_ready("relay")
    server.load_model("relay")
    assert ask(server, "relay", "x") == [1.0, 2.0]
    ready = ("READY", "")
    assert index(server) == {("broken", ""): nothing, ("echo", "1"): ready, ("relay", "1"): ready}


def test_an_unloaded_member_takes_its_ensemble_along_and_brings_it_back(
    server: triton.InferenceServerClient,
) -> None:
    server.load_model("relay")
    server.unload_model("echo")
    status, text = refusal(ask, server, "relay", "x")
    assert status == "StatusCode.NOT_FOUND"
    assert "Request for unknown model: 'relay' has no available versions" in text
    wait_until_unloaded(server, "echo", "relay")
    assert server.is_server_ready()
    assert not server.is_model_ready("echo")
    server.load_model("echo")
    assert ask(server, "relay", "x") == [1.0, 2.0]


def test_unload_dependents_takes_the_members_that_nobody_asked_for(
    server: triton.InferenceServerClient,
) -> None:
    server.load_model("relay")
    server.unload_model("relay", unload_dependents=True)
    wait_until_unloaded(server, "relay", "echo")
    server.unload_model("nowhere")


def test_a_reload_that_fails_leaves_what_serves(
    server: triton.InferenceServerClient, models: Path
) -> None:
    server.load_model("echo")
    (models / "echo" / "config.pbtxt").write_text(IDENTITY.replace("identity", "onnxruntime"))
    status, text = refusal(server.load_model, "echo")
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert text.startswith("load failed for model 'echo': version 1 is at UNAVAILABLE state: ")
    assert ask(server, "echo") == [1.0, 2.0]
    assert server.is_server_ready()


def test_a_clients_configuration_serves_until_it_is_unloaded_and_its_files_until_a_plain_load(
    server: triton.InferenceServerClient,
) -> None:
    server.load_model("echo")
    unsaid = {key: value for key, value in OVERRIDE.items() if key != "parameters"}
    status, text = refusal(server.load_model, "echo", config=json.dumps(unsaid))
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert "model 'echo' would break those who call it: input 'a' is gone;" in text
    server.load_model("echo", config=json.dumps(OVERRIDE))
    assert server.get_model_metadata("echo").inputs[0].name == "p"
    server.load_model("echo")
    assert server.get_model_metadata("echo").inputs[0].name == "p"
    server.unload_model("echo")
    wait_until_unloaded(server, "echo")
    server.load_model("echo")
    assert server.get_model_metadata("echo").inputs[0].name == "a"
    server.load_model("echo", config=json.dumps(OVERRIDE), files={"file:5/any": b"x"})
    assert list(server.get_model_metadata("echo").versions) == ["5"]
    server.load_model("echo")
    assert list(server.get_model_metadata("echo").versions) == ["1"]
    assert ask(server, "echo") == [1.0, 2.0]


def test_an_override_may_give_one_group_of_instances_as_an_object(
    server: triton.InferenceServerClient,
) -> None:
    config = {**OVERRIDE, "instance_group": {"count": 2, "kind": "KIND_CPU"}}
    server.load_model("echo", config=json.dumps(config))
    (group,) = server.get_model_config("echo").config.instance_group
    assert group.count == 2


def test_a_server_without_explicit_control_refuses_with_tritons_text(
    models: Path, start: Callable[..., Any], client: Callable[..., triton.InferenceServerClient]
) -> None:
    (models / "broken" / "config.pbtxt").write_text(IDENTITY)
    server = client(start("--model-repository", str(models)))
    text = "explicit model load / unload is not allowed if polling is enabled"
    for call in (server.load_model, server.unload_model):
        assert refusal(call, "echo") == ("StatusCode.UNAVAILABLE", text)
    assert ask(server, "echo") == [1.0, 2.0]


def test_what_is_named_at_the_start_is_loaded_and_nothing_else(
    models: Path, start: Callable[..., Any], client: Callable[..., triton.InferenceServerClient]
) -> None:
    flags = ["--model-control-mode", "explicit", "--load-model", "relay"]
    server = client(start("--model-repository", str(models), *flags))
    assert server.is_server_ready()
    ready = {m.name for m in server.get_model_repository_index().models if m.state == "READY"}
    assert ready == {"echo", "relay"}


def write_with_weights_beside(model: Path) -> None:
    """y = the mean of x + k over many k, all 1, which are in a file beside the network."""
    weights = numpy_helper.from_array(np.ones(1 << 22, np.float32), "k")
    io = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    nodes = [
        helper.make_node("Add", ["x", "k"], ["s"]),
        helper.make_node("ReduceMean", ["s"], ["y"], keepdims=1),
    ]
    graph = helper.make_graph(nodes, "g", io[:1], io[1:], [weights])
    network = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text('backend: "onnxruntime"')
    onnx.save_model(
        network, model / "1" / "model.onnx", save_as_external_data=True, location="weights"
    )


@pytest.mark.parametrize("mode", ["none", "explicit", "poll"])
def test_a_file_that_is_cut_short_while_its_model_serves_hurts_nobody(
    start: Callable[..., Any],
    client: Callable[..., triton.InferenceServerClient],
    tmp_path: Path,
    mode: str,
) -> None:
    repository = tmp_path / "repository"
    write_with_weights_beside(repository / "m")
    also = {
        "explicit": ["--load-model", "*"],
        "poll": [f"--repository-copies={tmp_path / 'store'}"],
    }
    process = start(
        f"--model-repository={repository}",
        f"--model-control-mode={mode}",
        *also.get(mode, []),
    )
    server = client(process)
    values = triton.InferInput("x", [1], "FP32")
    values.set_data_from_numpy(np.array([1.0], np.float32))
    for _ in range(2):
        assert server.infer("m", [values]).as_numpy("y").tolist() == [2.0]
        os.truncate(repository / "m" / "1" / "weights", 0)
    assert process.terminate() == 0


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_where_models_must_be_signed_a_start_with_another_is_refused(
    tmp_path: Path, models: Path, mode: str
) -> None:
    public = make_keys(tmp_path / "key")
    settings = tmp_path / "config.toml"
    settings.write_text(
        f'[repository]\npaths = ["{models}"]\nmode = "{mode}"\nstore = "{tmp_path / "store"}"\n'
        f'signatures = "require"\nsignature_keys = ["{public}"]\n[metrics]\nport = 0\n'
        "[http]\nport = 0\n"
    )
    done = run_verb("run", f"--config={settings}", "--grpc-port=0")
    assert done.returncode == 78
    assert "model 'echo': is not signed: it has neither manifest.json nor" in done.stderr
    assert "model echo: READY" not in done.stderr


def test_an_unsigned_model_is_warned_of_once(
    tmp_path: Path, models: Path, start: Callable[..., Any]
) -> None:
    public = make_keys(tmp_path / "key")
    settings = tmp_path / "config.toml"
    settings.write_text(
        f'[repository]\npaths = ["{models}"]\nmode = "poll"\nstore = "{tmp_path / "store"}"\n'
        f'signatures = "warn"\nsignature_keys = ["{public}"]\nexit_on_error = false\n'
    )
    process = start(f"--config={settings}")
    assert process.log.read_text().count("model echo: is not signed") == 1


def test_where_models_must_be_signed_nothing_else_is_loaded_on_request(
    tmp_path: Path,
    models: Path,
    start: Callable[..., Any],
    client: Callable[..., triton.InferenceServerClient],
) -> None:
    public = make_keys(tmp_path / "key")
    settings = tmp_path / "config.toml"
    settings.write_text(
        f'[repository]\npaths = ["{models}"]\nmode = "explicit"\n'
        f'signatures = "require"\nsignature_keys = ["{public}"]\n'
    )
    server = client(start(f"--config={settings}"))
    _, text = refusal(server.load_model, "echo")
    assert "model 'echo': is not signed" in text
    write_manifest(models / "echo", SigningKey(tmp_path / "key"))
    server.load_model("echo")
    assert ask(server, "echo") == [1.0, 2.0]
    # What a client brings was signed by nobody.
    for brought in ({}, {"files": {"file:1/model.py": b"import os"}}):
        _, text = refusal(server.load_model, "echo", config=json.dumps(OVERRIDE), **brought)
        assert "a configuration or files that a client sent, which are not signed" in text
    # A version with nothing in it is one more, and not signed.
    (models / "echo" / "7").mkdir()
    _, text = refusal(server.load_model, "echo")
    assert "directory 7, which is empty, is not in it" in text
    assert ask(server, "echo") == [1.0, 2.0]
    assert index(server)["echo", "1"][0] == "READY"


def test_loads_whose_callers_have_gone_are_given_up_and_leave_their_places(
    models: Path, server: triton.InferenceServerClient
) -> None:
    """There are 16 places for loads; all but the one of the load that hangs become free."""
    (models / "hangs" / "1").mkdir(parents=True)
    (models / "hangs" / "config.pbtxt").write_text(IDENTITY.replace("identity", "python"))
    (models / "hangs" / "1" / "model.py").write_text(
        "import time\nclass TritonPythonModel:\n    def initialize(self, args):\n"
        "        time.sleep(3600)\n    def execute(self, requests):\n        return []\n"
    )
    for _ in range(20):
        gone, _text = refusal(server.load_model, "hangs", client_timeout=0.2)
        assert gone == "StatusCode.DEADLINE_EXCEEDED"
    server.load_model("echo")
    assert ask(server, "echo") == [1.0, 2.0]
