"""Models follow the repository, and nothing that happens there hurts who asks meanwhile."""

from __future__ import annotations

import contextlib
import shutil
import time
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
import tritonclient.http as httpclient
from support.adding_models import build, network, swap
from support.model_folders import write_manifest
from support.verb import run_verb
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.polling_server import Server

TIMEOUT_S = 30.0
# Callers know of what changes.
MAY_BREAK = (
    'backend: "onnxruntime" '
    'parameters { key: "allow_interface_change" value { string_value: "true" } }'
)


def models(*arguments: str | Path) -> str:
    """What `edge-server models` prints when all is well."""
    done = run_verb("models", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def repository(tmp_path: Path) -> Path:
    """`m`, which adds 1, and `other`, so that taking `m` away leaves something to see."""
    place = tmp_path / "repository"
    build(place / "m", network(1))
    build(place / "other", network(100))
    return place


def test_every_way_of_delivering_is_followed(serve: Callable[..., Server]) -> None:
    server = serve()
    assert server.answer() == 1
    swap(server.repository, "m", network(2))
    assert server.wait_for(2) <= {1}
    # In place, the manifest last.
    model = server.repository / "m"
    (model / "1" / "model.onnx").write_bytes(network(3))
    write_manifest(model, "m")
    assert server.wait_for(3) <= {2}
    # In place, plainly, over an older time.
    (model / "manifest.json").unlink()
    (model / "1" / "model.onnx").write_bytes(network(4))
    assert server.wait_for(4) <= {3}
    # A new version, and back.
    shutil.copytree(model / "1", server.repository / ".2")
    (server.repository / ".2" / "model.onnx").write_bytes(network(5))
    (server.repository / ".2").rename(model / "2")
    assert server.wait_for(5) <= {4}
    shutil.rmtree(model / "2")
    assert server.wait_for(4) <= {5}


def test_what_is_broken_is_never_served_and_says_why(serve: Callable[..., Server]) -> None:
    server = serve()
    swap(server.repository, "m", network(9)[:-5])
    where = str(server.repository / "m" / "1" / "model.onnx")
    assert server.wait_for_reason(where) == "READY"
    swap(server.repository, "m", network(9), 'backend: "onnxruntime" max_batch_size: many')
    where = str(server.repository / "m" / "config.pbtxt")
    assert server.wait_for_reason(f"{where}:1") == "READY"
    folder = build(server.repository / ".incoming-m", network(9))
    write_manifest(folder, "m")
    damaged = bytearray(network(9))
    damaged[30] ^= 1
    (folder / "1" / "model.onnx").write_bytes(damaged)
    shutil.rmtree(server.repository / "m")
    folder.rename(server.repository / "m")
    assert server.wait_for_reason("is not what manifest.json says") == "READY"
    assert server.answer() == 1
    # Told once, however often it was looked at since.
    server.process.wait_for_log("is not what manifest.json says")
    assert server.log.count("is not what manifest.json says") == 1
    wait_until(lambda: server.metric('edge_model_reload_total{result="failed"}') == 3)
    assert server.metric("edge_repo_poll_age_seconds") < TIMEOUT_S
    swap(server.repository, "m", network(2))
    server.wait_for(2)
    assert server.index()["m"] == [("READY", "")]


RAISES = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        raise pb_utils.TritonModelException("as bad as can be")
"""


def test_what_serves_worse_than_what_was_before_is_taken_back(
    serve: Callable[..., Server],
) -> None:
    server = serve()
    folder = server.repository / ".incoming-m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(RAISES)
    (folder / "config.pbtxt").write_text(
        'backend: "python" input { name: "x" data_type: TYPE_FP32 dims: 1 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 1 }'
    )
    shutil.rmtree(server.repository / "m")
    folder.rename(server.repository / "m")
    told: set[str] = set()

    def is_rolled_back() -> bool:
        try:
            assert server.answer() == 1
        except InferenceServerException as error:
            told.add(error.message())
        return "rolled back" in server.log

    wait_until(is_rolled_back, TIMEOUT_S, otherwise=lambda: server.log)
    assert all("as bad as can be" in text for text in told)
    wait_until(lambda: server.metric('edge_model_reload_total{result="rolled_back"}') == 1)
    assert server.answer() == 1
    (entry,) = server.index()["m"]
    assert entry[0] == "READY"
    assert "rolled back" in entry[1]
    # Nor is it taken again, by whatever way it comes.
    (server.repository / "m" / "1" / "model.py").write_text(RAISES)
    assert server.wait_for_reason("quarantined") == "READY"
    assert server.answer() == 1
    # Unless somebody lets it out: then it is tried again, as it is, and rolled back again.
    store = server.repository.parent / "store"
    listed = models("list", server.repository, "--store", store)
    assert "is in quarantine: rolled back: version 1:" in listed
    released = models("release", "m", "--store", store)
    assert "released; the daemon looks at it again" in released

    def is_rolled_back_again() -> bool:
        with contextlib.suppress(InferenceServerException):
            server.answer()
        return server.metric('edge_model_reload_total{result="rolled_back"}') == 2

    wait_until(is_rolled_back_again, TIMEOUT_S, otherwise=lambda: server.log)
    assert server.answer() == 1
    swap(server.repository, "m", network(2))
    server.wait_for(2)


ASKS = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            asked = pb_utils.InferenceRequest(
                model_name="other", requested_output_names=["y"], inputs=request.inputs()
            )
            answer = asked.exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            answers.append(pb_utils.InferenceResponse(answer.output_tensors()))
        return answers
"""
PYTHON = (
    'backend: "python" input { name: "x" data_type: TYPE_FP32 dims: 1 } '
    'output { name: "y" data_type: TYPE_FP32 dims: 1 }'
)


def test_a_predecessor_that_asks_other_models_is_not_asked_again(
    serve: Callable[..., Server], repository: Path
) -> None:
    """What is worse goes back all the same, by what failed before it."""
    (repository / "m" / "1" / "model.onnx").unlink()
    (repository / "m" / "1" / "model.py").write_text(ASKS)
    (repository / "m" / "config.pbtxt").write_text(PYTHON)
    server = serve()
    assert server.answer() == 100
    asked = server.metric('nv_inference_request_success{model="other",version="1"}')
    (repository / "m" / "1" / "model.py").write_text(RAISES)

    def is_rolled_back() -> bool:
        nonlocal asked
        with contextlib.suppress(InferenceServerException):
            # That of the predecessor, till the new one serves.
            asked += server.answer() == 100
        return "model m: rolled back" in server.log

    wait_until(is_rolled_back, TIMEOUT_S, otherwise=lambda: server.log)
    server.process.wait_for_log("requests failed; before it 0.0% did")
    assert server.metric('nv_inference_request_success{model="other",version="1"}') == asked


def test_other_instances_are_an_update_in_place(serve: Callable[..., Server]) -> None:
    server = serve()
    for _ in range(10):
        server.answer()
    config = server.repository / "m" / "config.pbtxt"
    config.write_text('backend: "onnxruntime" instance_group { count: 3 kind: KIND_CPU }')

    def has_three() -> bool:
        assert server.answer() == 1
        return bool(server.client.get_model_config("m").config.instance_group[0].count == 3)

    wait_until(has_three, TIMEOUT_S)
    (statistics,) = server.client.get_inference_statistics("m").model_stats
    assert statistics.inference_count >= 10


ENSEMBLE = (
    'platform: "ensemble" input { name: "x" data_type: TYPE_FP32 dims: 1 } '
    'output { name: "y" data_type: TYPE_FP32 dims: 1 } ensemble_scheduling { step { '
    'model_name: "m" model_version: -1 input_map { key: "x" value: "x" } '
    'output_map { key: "y" value: "y" } } }'
)


@pytest.mark.parametrize("asked_for", [False, True])
def test_a_member_that_its_ensemble_does_not_fit_is_refused_or_takes_that_down(
    asked_for: bool, serve: Callable[..., Server], repository: Path
) -> None:
    (repository / "e" / "1").mkdir(parents=True)
    (repository / "e" / "config.pbtxt").write_text(ENSEMBLE)
    server = serve(*(["--incompatible-member=take_down"] if asked_for else []))
    assert server.answer("e") == 1
    swap(repository, "m", network(2, (2,)))
    broken = "model 'm' would break those who call it: input 'x' has shape [2], had [1]"
    assert server.wait_for_reason(broken, ask="e") == "READY"
    swap(repository, "m", network(2, (2,)), MAY_BREAK)
    if asked_for:
        text = "in ensemble e, ensemble tensor y: inconsistent shape"
        assert server.wait_for_reason(text, "e", ask="other") == "UNAVAILABLE"
        assert server.index()["m"] == [("READY", "")]
    else:
        text = "ensemble 'e', which serves, uses model 'm' and would no longer fit"
        assert server.wait_for_reason(text) == "READY"
        assert server.answer("e") == 1
    swap(repository, "m", network(3), MAY_BREAK)
    wait_until(
        lambda: server.index()["e"] == [("READY", "")] and server.answer("e") == 3,
        TIMEOUT_S,
        otherwise=lambda: (server.index(), server.log),
    )
    assert server.answer() == 3


def test_an_idle_model_is_unloaded_and_the_next_request_of_any_protocol_loads_it(
    serve: Callable[..., Server], repository: Path
) -> None:
    limit = 'parameters { key: "idle_unload_s" value { string_value: "0.5" } }'
    config = f'backend: "onnxruntime" {limit}'
    build(repository / "m", network(1), config)
    server = serve()

    def idle() -> None:
        wait_until(
            lambda: server.index()["m"] == [("UNAVAILABLE", "idle: its next request loads it")],
            TIMEOUT_S,
            otherwise=lambda: (server.index(), server.log),
        )
        assert server.client.is_model_ready("m")
        assert server.client.is_server_ready()

    idle()
    assert server.answer() == 1
    idle()
    with httpclient.InferenceServerClient(f"127.0.0.1:{server.process.http_port}") as client:
        assert client.is_model_ready("m")
        values = httpclient.InferInput("x", [1], "FP32")
        values.set_data_from_numpy(np.zeros(1, np.float32))
        assert client.infer("m", [values]).as_numpy("y")[0] == 1
    idle()
    swap(repository, "m", network(2), config)
    server.wait_for(2)


def test_a_slow_writer_is_waited_for(serve: Callable[..., Server]) -> None:
    server = serve()
    data = network(7)
    path = server.repository / "m" / "1" / "model.onnx"
    with path.open("wb") as file:
        for start in range(0, len(data), 40):
            file.write(data[start : start + 40])
            file.flush()
            time.sleep(0.1)
    assert server.wait_for(7) <= {1}


def test_a_model_comes_and_goes_with_its_directory(serve: Callable[..., Server]) -> None:
    server = serve()
    swap(server.repository, "new", network(8))
    wait_until(lambda: server.client.is_model_ready("new"))
    assert server.answer("new") == 8
    shutil.rmtree(server.repository / "new")

    def has_gone() -> bool:
        assert server.answer() == 1
        return not server.client.is_model_ready("new")

    wait_until(has_gone, TIMEOUT_S)


def test_a_repository_that_vanishes_unloads_nothing(serve: Callable[..., Server]) -> None:
    server = serve()
    server.repository.rename(server.repository.parent / "away")

    def is_logged(words: str) -> bool:
        assert server.answer() == 1
        return words in server.log

    wait_until(lambda: is_logged("what is loaded of it serves on"), TIMEOUT_S)
    server.repository.mkdir()
    wait_until(lambda: is_logged("holds no model"), TIMEOUT_S)
    server.repository.rmdir()
    (server.repository.parent / "away").rename(server.repository)
    swap(server.repository, "m", network(2))
    server.wait_for(2)


def test_what_served_last_serves_again_without_a_repository(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("[repository]\nprobation_requests = 0\n")
    server = serve("--config", str(settings))
    swap(server.repository, "m", network(2))
    server.wait_for(2)
    wait_until(lambda: server.log.count("model m: last known good") >= 2, TIMEOUT_S)
    server.process.popen.kill()
    server.process.close()
    shutil.rmtree(server.repository)
    again = serve()
    assert again.answer() == 2
    assert again.answer("other") == 100


KILLS = """
import os, signal
class TritonPythonModel:
    def initialize(self, args):
        os.kill(os.getppid(), signal.SIGKILL)
    def execute(self, requests):
        pass
"""


def test_a_model_that_kills_the_process_that_loads_it_is_left_out_at_the_third_start(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    # In its sandbox it could not.
    open_to_it = tmp_path / "config.toml"
    open_to_it.write_text('[python]\nsandbox = "off"\n')
    server = serve(f"--config={open_to_it}")
    folder = server.repository / ".incoming-m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(KILLS)
    (folder / "config.pbtxt").write_text(
        'backend: "python" output { name: "y" data_type: TYPE_FP32 dims: 1 }'
    )
    shutil.rmtree(server.repository / "m")
    folder.rename(server.repository / "m")
    for _ in range(2):
        server.process.popen.wait(TIMEOUT_S)
        server.process.close()
        server = serve(f"--config={open_to_it}")
    assert server.wait_for_reason("quarantined") == "READY"
    assert server.answer() == 1


def test_an_ensemble_and_its_member_change_together(
    serve: Callable[..., Server], repository: Path
) -> None:
    def ensemble(tensor: str) -> str:
        return (
            'platform: "ensemble" input { name: "x" data_type: TYPE_FP32 dims: 1 } '
            'output { name: "y" data_type: TYPE_FP32 dims: 1 } '
            'ensemble_scheduling { step { model_name: "m" model_version: -1 '
            f'input_map {{ key: "{tensor}" value: "x" }} output_map {{ key: "y" value: "y" }} }} }}'
        )

    def place(tensor: str) -> None:
        folder = repository / ".incoming-e"
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(ensemble(tensor))
        if (repository / "e").exists():
            shutil.rmtree(repository / "e")
        folder.rename(repository / "e")

    place("x")
    server = serve()
    assert server.answer("e") == 1
    swap(repository, "m", network(2))
    assert server.wait_for(2, "e") <= {1}
    # A member that no longer fits is refused; with an ensemble that fits it, both come.
    renamed = onnx.load_from_string(network(3))
    renamed.graph.input[0].name = renamed.graph.node[0].input[0] = "a"
    swap(repository, "m", renamed.SerializeToString(), MAY_BREAK)
    assert server.wait_for_reason("would no longer fit") == "READY"
    assert server.answer("e") == 2
    place("a")
    assert server.wait_for(3, "e") <= {2}


def test_a_store_serves_no_models_of_another_repository(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    repository, other = tmp_path / "repository", tmp_path / "other"
    server = serve()
    assert server.answer() == 1
    assert server.process.terminate() == 0
    # Whatever is followed beside it: that set is another one.
    other.mkdir()
    repository.rename(tmp_path / "elsewhere")
    repository.mkdir()
    server = serve(f"--model-repository={other}")
    assert server.index() == {}
    said = f"was last used for {repository}, now for {other}, {repository}: the"
    server.process.wait_for_log(said)
    assert server.process.terminate() == 0
    # What was kept of the first is still there, also where that is not mounted yet.
    repository.rmdir()
    assert serve().answer() == 1


def test_names_that_are_no_text_are_told_and_end_nothing(serve: Callable[..., Server]) -> None:
    server = serve()
    (server.repository / "\udcff").mkdir()
    (server.repository / "m" / "1" / "\udcfe").touch()
    server.wait_for_reason(r"1/\xfe: the name is not UTF-8; rename it")
    server.wait_for_reason(r"'\xff' is no model", r"\xff")
    assert server.answer() == 1
    assert server.metric("edge_repo_poll_age_seconds") < TIMEOUT_S
