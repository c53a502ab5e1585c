"""A load that nobody wants any more keeps neither a stop nor a later push waiting."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.daemon_process import Process
from support.polling_server import POLL
from support.waiting import TIMEOUT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.polling_server import Server

CONFIG = (
    'backend: "python" input { name: "x" data_type: TYPE_FP32 dims: 1 } '
    'output { name: "y" data_type: TYPE_FP32 dims: 1 }'
)
ADDS = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(each, "x").as_numpy() for each in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x + NUMBER)]) for x in inputs]
"""
HANGS = """
class TritonPythonModel:
    def initialize(self, args):
        print("hangs in initialize", flush=True)
        while True:
            pass
    def execute(self, requests):
        pass
"""
HANGS_BEFORE = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        print("hangs in auto_complete_config", flush=True)
        while True:
            pass
    def execute(self, requests):
        pass
"""


def deliver(repository: Path, code: str) -> None:
    folder = repository / ".incoming"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "1" / "model.py").write_text(code)
    if (repository / "m").exists():
        (repository / "m").rename(repository / f".old-{len(list(repository.iterdir()))}")
    folder.rename(repository / "m")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    place = tmp_path / "repository"
    place.mkdir()
    return place


@pytest.fixture
def begin(tmp_path: Path, repository: Path) -> Iterator[Callable[..., Process]]:
    """Starts a daemon, and does not wait until it is ready."""
    begun: list[Process] = []

    def start(*arguments: str) -> Process:
        begun.append(Process(tmp_path, f"--model-repository={repository}", *arguments))
        return begun[-1]

    yield start
    for each in begun:
        each.close()


def wait_until_it_hangs(process: Process) -> None:
    wait_until(lambda: "hangs in" in process.log.read_text(), otherwise=process.log.read_text)


@pytest.mark.parametrize(
    ("mode", "code"),
    [
        ("none", HANGS_BEFORE),
        ("poll", HANGS),
        pytest.param("none", HANGS, marks=pytest.mark.long),
        pytest.param("poll", HANGS_BEFORE, marks=pytest.mark.long),
    ],
)
def test_a_stop_waits_for_no_model_that_hangs_while_the_daemon_starts(
    mode: str, code: str, begin: Callable[..., Process], repository: Path, tmp_path: Path
) -> None:
    deliver(repository, code)
    copies = (*POLL, f"--repository-copies={tmp_path / 'store'}") if mode == "poll" else ()
    process = begin(*copies)
    wait_until_it_hangs(process)
    # The model's own limit is 120 s.
    assert process.terminate() == 0
    assert "still loading" not in process.log.read_text()


def test_a_stop_waits_for_no_pushed_model_that_hangs(
    serve: Callable[..., Server], repository: Path
) -> None:
    deliver(repository, ADDS.replace("NUMBER", "1"))
    server = serve()
    deliver(repository, HANGS)
    wait_until_it_hangs(server.process)
    assert server.process.terminate() == 0
    assert "still loading" not in server.log


@pytest.mark.parametrize("code", [HANGS, pytest.param(HANGS_BEFORE, marks=pytest.mark.long)])
def test_a_push_ends_the_load_of_the_one_before_it_that_hangs(
    code: str, serve: Callable[..., Server], repository: Path
) -> None:
    deliver(repository, ADDS.replace("NUMBER", "1"))
    server = serve()
    deliver(repository, code)
    wait_until_it_hangs(server.process)
    deliver(repository, ADDS.replace("NUMBER", "2"))
    assert server.wait_for(2) <= {1}
    server.process.wait_for_log("a later change of the model came")
    assert server.index()["m"] == [("READY", "")]


AT_ONCE = """
import os, signal, sys
class SignalAtTheFirstImport:
    def find_spec(self, name, *_):
        if name == "edge_server.cli.main":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, SignalAtTheFirstImport())
sys.argv = ["edge-server", "run", "--grpc-port=0"]
from edge_server.__main__ import main
main()
"""


def test_a_stop_before_anything_has_begun_is_an_end_as_requested() -> None:
    command = [sys.executable, "-c", AT_ONCE]
    done = subprocess.run(command, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0
