"""`edge-server plan refresh`, by the command line, with a simulated TensorRT and a broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from support.mosquitto import Mosquitto, Subscriber, mosquitto_binary
from support.notify_socket import NotifySocket
from support.processes import first_to_kill
from support.verb import run_verb
from support.waiting import wait_until

from edge_server.backends.tensorrt.plan_options import side_car_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.simulated_gpu import SimulatedGpu

CONFIG = """
platform: "tensorrt_plan"
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_GPU count: 2 }} ]
parameters {{ key: "auto_build" value {{ string_value: "{auto_build}" }} }}
"""


class Site:
    """Repository, state, and the verb; see simulated_settings.py for the words of `tensorrt`."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.models = folder / "models"
        self.models.mkdir()
        self.state = folder / "state"
        self.config = folder / "config.toml"
        self.config.write_text(f'[repository]\npaths = ["{self.models}"]\n')
        self._environment = {**environment, "STATE_DIRECTORY": str(self.state)}

    def environment(self, tensorrt: str = "", **more: str) -> dict[str, str]:
        """What a verb runs in."""
        return {**self._environment, "EDGE_SIMULATED_TENSORRT": tensorrt, **more}

    def command(self) -> list[str]:
        return [sys.executable, "-m", "edge_server", *self._words()]

    def _words(self, *arguments: str) -> list[str]:
        return ["plan", "refresh", f"--config={self.config}", *arguments]

    def refresh(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return run_verb(*self._words(*arguments), env=self.environment(**more))

    @property
    def cached(self) -> list[Path]:
        return sorted(self.state.glob("plans/*/model.plan"))


@pytest.fixture
def add_model(site: Site, write_onnx: Callable[..., None]) -> Callable[..., Path]:
    def add(name: str, *, auto_build: bool = True) -> Path:
        directory = site.models / name
        write_onnx(directory / "1" / "model.onnx", (1,))
        (directory / "config.pbtxt").write_text(CONFIG.format(auto_build=str(auto_build).lower()))
        return directory

    return add


@pytest.fixture
def site(simulated_libcuda: SimulatedGpu, tmp_path: Path) -> Site:
    return Site(tmp_path, simulated_libcuda.environment())


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    if not mosquitto_binary():
        pytest.skip("mosquitto is missing: apt install mosquitto")
    broker = Mosquitto(tmp_path)
    broker.start()
    yield broker
    broker.kill()


def test_plans_are_built_once_and_again_for_another_tensorrt(
    site: Site, add_model: Callable[..., Path]
) -> None:
    add_model("cached")
    beside = add_model("beside", auto_build=False)
    done = site.refresh()
    assert (done.returncode, done.stdout) == (0, "plans: 0 fit, 2 built\n"), done.stderr
    assert len(site.cached) == 1
    assert side_car_path(beside / "1" / "model.plan").is_file()
    assert site.refresh().stdout == "plans: 2 fit, 0 built\n"
    done = site.refresh(tensorrt="version=10.16.1.11")
    assert done.stdout == "plans: 0 fit, 2 built\n"
    assert "built with TensorRT 10.3 for sm_" in done.stderr
    assert site.refresh(tensorrt="version=10.16.1.11").stdout == "plans: 2 fit, 0 built\n"


def test_one_model_that_fails_leaves_the_others_their_plans(
    site: Site, add_model: Callable[..., Path], broker: Mosquitto
) -> None:
    (add_model("a") / "1" / "model.onnx").unlink()
    (add_model("b") / "config.pbtxt").write_text("platform: [")
    add_model("c")
    with site.config.open("a") as file:
        file.write(f'[device]\nid = "truck"\n[mqtt]\nhost = "127.0.0.1"\nport = {broker.port}\n')
    done = site.refresh()
    assert done.returncode == 1
    assert done.stdout == "plans: 0 fit, 1 built, 2 failed\n"
    assert len(site.cached) == 1
    # Retained: who comes later sees how it ended.
    subscriber = Subscriber(broker.port, "edge/v1/truck/plans")
    said = subscriber.wait("edge/v1/truck/plans")
    assert (said["state"], said["model"]) == ("failed", "")
    assert "model.onnx" in said["text"]
    subscriber.close()


def test_a_machine_without_a_gpu_says_so_where_a_model_needs_one(
    site: Site, add_model: Callable[..., Path]
) -> None:
    assert site.refresh(LD_LIBRARY_PATH="/nowhere").returncode == 0
    add_model("m")
    done = site.refresh(LD_LIBRARY_PATH="/nowhere")
    assert done.returncode == 69
    assert "no plan can be built here" in done.stderr
    assert "libcuda" in done.stderr


def test_systemd_gets_ready_after_the_wait_while_a_build_goes_on(
    site: Site, add_model: Callable[..., Path], tmp_path: Path
) -> None:
    add_model("m")
    with site.config.open("a") as file:
        file.write("wait_for_plans_s = 1\n")
    with closing(NotifySocket(tmp_path)) as systemd:
        environment = site.environment("build_s=600", NOTIFY_SOCKET=systemd.address)
        with subprocess.Popen(site.command(), env=environment, text=True) as process:
            try:
                told: list[str] = []
                while "READY=1" not in told or not any("STATUS=m: " in text for text in told):
                    told.append(systemd.said.get(timeout=60))
                assert process.poll() is None
                assert told.count("READY=1") == 1
            finally:
                process.terminate()
            assert process.wait(30) == -signal.SIGTERM
    # What was begun is gone with who asked for it.
    assert not site.cached


def test_the_kill_of_a_build_is_told_and_the_next_model_is_built(
    site: Site, add_model: Callable[..., Path]
) -> None:
    add_model("a")
    add_model("b")
    with subprocess.Popen(
        site.command(),
        env=site.environment("build_s=3"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        # As the kernel does where memory runs out.
        os.kill(wait_until(lambda: first_to_kill(process.pid), 60), signal.SIGKILL)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert output == "plans: 0 fit, 1 built, 1 failed\n"
    assert "was killed: most likely for want of memory" in errors
