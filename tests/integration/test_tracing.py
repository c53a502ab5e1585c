"""Traces as the stock client turns them on, and as Triton's users find them in the file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.daemon_process import Process

TIMEOUT_S = 30.0
ECHO = """
backend: "identity"
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
"""
CHAIN = """
platform: "ensemble"
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
ensemble_scheduling {
  step { model_name: "echo" model_version: -1
         input_map { key: "x" value: "x" } output_map { key: "x" value: "between" } }
  step { model_name: "asks" model_version: -1
         input_map { key: "x" value: "between" } output_map { key: "y" value: "y" } }
}
"""
# A model that asks another one (Triton's BLS).
ASKS = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
instance_group { kind: KIND_CPU }
"""
ASKS_PY = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x")
            made = pb_utils.InferenceRequest(
                model_name="echo", requested_output_names=["x"], inputs=[x]
            ).exec()
            y = pb_utils.get_output_tensor_by_name(made, "x").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        return answers
"""
GRPC = ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END"]
SENT = ["GRPC_SEND_START", "GRPC_SEND_END"]
COMPUTED = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    for name, config in (("echo", ECHO), ("chain", CHAIN), ("asks", ASKS)):
        (path / name / "1").mkdir(parents=True)
        (path / name / "config.pbtxt").write_text(config)
    (path / "asks" / "1" / "model.py").write_text(ASKS_PY)
    return path


class Traced(NamedTuple):
    """One trace of a file."""

    model: str
    request_id: str
    parent: int
    names: list[str]


def traces(path: Path) -> dict[int, Traced]:
    """By their ids; the times of each are in their order."""
    elements: list[dict[str, Any]] = json.loads(path.read_text())
    found = {}
    for head, times in zip(elements[::2], elements[1::2], strict=True):
        assert head["id"] == times["id"]
        assert head["model_version"] == 1
        moments = [each["ns"] for each in times["timestamps"]]
        assert moments == sorted(moments)
        found[head["id"]] = Traced(
            head["model_name"],
            head.get("request_id", ""),
            head.get("parent_id", 0),
            [each["name"] for each in times["timestamps"]],
        )
    assert len(found) * 2 == len(elements)
    return found


def ask(client: triton.InferenceServerClient, model: str, request_id: str = "") -> None:
    tensor = triton.InferInput("x", [4], "FP32")
    tensor.set_data_from_numpy(np.arange(4, dtype=np.float32))
    client.infer(model, [tensor], request_id=request_id)


def test_what_a_client_turns_on_is_in_the_file_when_the_daemon_ends(
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
    repository: Path,
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.json"
    process = start(f"--model-repository={repository}", "--trace-config", f"triton,file={path}")
    server = client(process)
    assert "trace" in server.get_server_metadata().extensions
    ask(server, "echo", "before")
    told = server.update_trace_settings(
        settings={"trace_level": ["TIMESTAMPS"], "trace_rate": "2", "trace_count": "3"}
    ).settings
    assert list(told["trace_file"].value) == [str(path)]
    for number in range(4):
        ask(server, "echo", f"echo {number}")
    ask(server, "chain")
    ask(server, "chain", "chain 1")
    left = server.get_trace_settings().settings["trace_count"]
    assert list(left.value) == ["0"]
    ask(server, "echo", "after")
    assert process.terminate() == 0
    found = traces(path)
    roots = {each.request_id: own_id for own_id, each in found.items() if not each.parent}
    assert list(roots) == ["echo 1", "echo 3", "chain 1"]
    assert found[roots["echo 1"]].names == [
        *GRPC,
        "REQUEST_START",
        "QUEUE_START",
        *COMPUTED,
        "INFER_RESPONSE_COMPLETE",
        "REQUEST_END",
        *SENT,
    ]
    chain = roots["chain 1"]
    assert found[chain].names == [
        *GRPC,
        "REQUEST_START",
        "INFER_RESPONSE_COMPLETE",
        "REQUEST_END",
        *SENT,
    ]
    members = {own_id: each for own_id, each in found.items() if each.parent}
    ((asks, _),) = ((i, each) for i, each in members.items() if each.model == "asks")
    assert [(each.model, each.parent) for each in members.values()] == [
        ("echo", chain),
        ("asks", chain),
        ("echo", asks),
    ]
    for each in members.values():
        assert each.names == ["REQUEST_START", "QUEUE_START", *COMPUTED, "REQUEST_END"]


def test_requests_of_a_stream_are_traced_into_numbered_files_and_a_kill_leaves_them_whole(
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
    repository: Path,
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.json"
    configuration = tmp_path / "config.toml"
    configuration.write_text(
        f'[trace]\nfile = "{path}"\nlevel = ["TIMESTAMPS"]\nrate = 1\nlog_frequency = 2\n'
    )
    process = start(f"--model-repository={repository}", f"--config={configuration}")
    server = client(process)
    answers: list[str] = []
    server.start_stream(lambda result, error: answers.append(result.get_response().id))
    tensor = triton.InferInput("x", [4], "FP32")
    tensor.set_data_from_numpy(np.arange(4, dtype=np.float32))
    for number in range(3):
        server.async_stream_infer("echo", [tensor], request_id=str(number))
    server.stop_stream()
    assert answers == ["0", "1", "2"]
    last = path.with_name("trace.json.1")
    wait_for(last)
    process.popen.kill()
    process.popen.wait(TIMEOUT_S)
    first = traces(path.with_name("trace.json.0"))
    assert [each.request_id for each in (*first.values(), *traces(last).values())] == answers
    assert first[1].names[:3] == [*GRPC, "REQUEST_START"]
    assert not path.exists()


def wait_for(path: Path) -> None:
    wait_until(
        lambda: path.exists() and path.stat().st_size,
        TIMEOUT_S,
        otherwise=lambda: f"{path} does not come",
    )
