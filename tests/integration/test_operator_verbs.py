"""The verbs of people who operate a device, against one real daemon: status, top, infer, bench."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest
from support.free_ports import free_ports
from support.notify_socket import NotifySocket
from support.preloaded import start_daemon
from support.verb import run_verb
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 60
MODELS = Path(__file__).parents[2] / "models"


class Appliance:
    """A daemon with a camera that is there and one that is not, and its verbs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.toml"
        port, metrics_port, broker_port = free_ports(3)
        self.config.write_text(
            f'[repository]\npaths = ["{MODELS}"]\n'
            f'[grpc]\nport = {port}\nsocket = "{folder}/grpc.sock"\n'
            f"[metrics]\nport = {metrics_port}\n[http]\nport = 0\n"
            f'[mqtt]\nhost = "127.0.0.1"\nport = {broker_port}\n'
            '[cameras.front]\nuri = "synthetic://road?seed=7&fps=2"\n'
            f'[cameras.rear]\nuri = "rtsp://127.0.0.1:{broker_port}/none"\n'
        )
        self.addresses = (
            *("--grpc", f"127.0.0.1:{port}"),
            *("--metrics", f"127.0.0.1:{metrics_port}"),
        )
        self.systemd = NotifySocket(folder)
        environment = {**os.environ, "NOTIFY_SOCKET": self.systemd.address}
        arguments = ["run", "--config", str(self.config)]
        self.daemon = start_daemon(arguments, environment, folder / "log")
        assert self.systemd.wait_for("READY=1", TIMEOUT_S), (folder / "log").read_text()

    def command(self, verb: str, *arguments: str) -> list[str]:
        edge_server = [sys.executable, "-m", "edge_server"]
        return [*edge_server, verb, *arguments, "--config", str(self.config)]

    def run(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_verb(verb, *arguments, "--config", self.config, cwd=self.folder)

    def json(self, verb: str, *arguments: str) -> Any:
        done = self.run(verb, *arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def appliance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Appliance]:
    started = Appliance(tmp_path_factory.mktemp("appliance"))
    yield started
    started.daemon.kill()
    started.daemon.wait()
    started.systemd.close()


def test_status_shows_models_cameras_broker_and_the_rest_on_one_screen(
    appliance: Appliance,
) -> None:

    def with_frames() -> Any:
        found = appliance.json("status")
        front, rear = found["cameras"]
        return found if front["fps"] and rear["reason"] else None

    report = wait_until(with_frames)
    assert {each["name"]: each["state"] for each in report["models"]} == dict.fromkeys(
        ("laneDetect_model", "lane_decode", "lane_detection", "lane_preprocess"), "READY"
    )
    front, rear = report["cameras"]
    assert (front["state"], front["model"]) == ("ok", "lane_detection")
    assert front["fps"] > 0
    assert rear["state"] != "ok"
    assert rear["reason"]
    assert report["broker"]["connected"] is False
    assert report["settings"] == {"reloaded": True, "restart_needed": 0}
    text = appliance.run("status").stdout
    assert "✔ lane_detection" in text
    assert "✘ broker 127.0.0.1" in text
    assert len(text.splitlines()) < 30


def test_status_names_another_daemon_by_its_addresses(appliance: Appliance) -> None:
    done = run_verb("status", "--json", *appliance.addresses)
    assert json.loads(done.stdout)["ready"] is True


@pytest.mark.parametrize("verb", ["top", "bench"])
def test_a_daemon_that_does_not_run_is_an_error_with_the_remedy(
    appliance: Appliance, verb: str
) -> None:
    nobody, metrics = free_ports(2)
    more = {"bench": ["m"]}
    addresses = ("--grpc", f"127.0.0.1:{nobody}", "--metrics", f"127.0.0.1:{metrics}")
    done = appliance.run(verb, *more.get(verb, []), *addresses)
    assert done.returncode == 69
    assert "is the daemon running? `systemctl status edge-server` says why" in done.stderr
    assert "Traceback" not in done.stderr


def test_top_prints_once_in_each_interval_without_a_terminal(appliance: Appliance) -> None:
    done = appliance.run("top", "--interval", "0.2", "--count", "2", "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["ready"] for row in rows] == [True, True]
    assert rows[0]["uptime_s"] < rows[1]["uptime_s"]
    assert "\x1b" not in appliance.run("top", "--interval", "0.2", "--count", "1").stdout


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_top_draws_in_place_and_leaves_the_terminal_as_it_was(
    appliance: Appliance, end: signal.Signals
) -> None:
    ours, theirs = pty.openpty()
    top = subprocess.Popen(
        appliance.command("top", "--interval", "0.2"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    written = b""
    deadline_s = time.monotonic() + TIMEOUT_S
    while written.count(b"Ctrl-C ends") < 3:
        assert time.monotonic() < deadline_s, written
        if select.select([ours], [], [], 0.5)[0]:
            written += os.read(ours, 65536)
    top.send_signal(end)
    while select.select([ours], [], [], TIMEOUT_S)[0]:
        try:
            written += os.read(ours, 65536)
        except OSError:  # its end was closed
            break
    os.close(ours)
    assert top.wait(TIMEOUT_S) == 0
    assert written.startswith(b"\x1b[?1049h")
    assert written.endswith(b"\x1b[?25h\x1b[?1049l")
    assert "✔ lane_detection" in re.sub(r"\x1b\[[0-9;]*m", "", written.decode())


def test_infer_draws_the_lanes_of_a_picture(appliance: Appliance) -> None:
    picture = appliance.folder / "lanes.png"
    done = appliance.run(
        "infer", "lane_detection", "--image", "synthetic://road?seed=7", "--save", str(picture)
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"lanes\n  1: score [01]\.", done.stdout)
    drawn = cv2.imread(str(picture))
    again = appliance.folder / "again.png"
    appliance.run("infer", "lane_detection", "--image", str(picture), "--save", str(again))
    assert drawn is not None
    assert drawn.shape == (720, 1280, 3)
    assert (drawn != cv2.imread(str(again))).any()


def test_infer_gives_a_network_what_the_ensemble_makes_of_the_picture(
    appliance: Appliance,
) -> None:
    image = ("--image", "synthetic://road?seed=7")
    tensors = appliance.folder / "tensors.npz"
    assert appliance.run("infer", "lane_preprocess", *image, "--save", str(tensors)).stdout
    np.save(appliance.folder / "x.npy", np.load(tensors)["input"])
    by_file = appliance.json("infer", "laneDetect_model", "--input", "input=x.npy")
    by_image = appliance.json("infer", "laneDetect_model", *image)
    assert by_file["outputs"] == by_image["outputs"]
    assert by_file["outputs"][0]["shape"] == [1, 2784, 77]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("nope", "--image", "synthetic://road?seed=7"), 1, "no model 'nope'; there are: lane"),
        (("lane_decode", "--input", "x=x.npy"), 78, "--input x: its inputs are predict_lanes"),
    ],
)
def test_infer_says_what_is_wrong_with_its_exit_code(
    appliance: Appliance, arguments: tuple[str, ...], code: int, text: str
) -> None:
    done = appliance.run("infer", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr


def test_bench_measures_each_concurrency_and_the_stages_of_an_ensemble(
    appliance: Appliance,
) -> None:
    quick = ("--seconds", "0.5", "--concurrency", "1,2")
    found = appliance.json("bench", "lane_detection", *quick)
    assert [each["concurrency"] for each in found["measurements"]] == [1, 2]
    for each in found["measurements"]:
        latency = each["latency_ms"]
        assert 0 < latency["p50"] <= latency["p99"] <= latency["max"]
        assert each["failed"] == 0
        stages = {stage["model"]: stage for stage in each["stages"]}
        assert list(stages) == [
            *("lane_detection", "lane_preprocess", "laneDetect_model", "lane_decode")
        ]
        network = stages["laneDetect_model"]
        assert 0 < network["compute_infer"] <= network["total"] <= latency["max"]
    text = appliance.run("bench", "lane_preprocess", *quick[:-1], "1").stdout
    assert "CONCURRENCY  INFER/S  MEAN ms" in text
    assert "gRPC and client" in text


def test_sweep_measures_variants_in_a_daemon_of_its_own(
    appliance: Appliance, tmp_path: Path
) -> None:
    model = tmp_path / "repository/echo"
    (model / "1").mkdir(parents=True)
    written = (
        'backend: "identity" max_batch_size: 4 '
        'input { name: "x" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] } '
        'output { name: "y" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] }'
    )
    (model / "config.pbtxt").write_text(written)
    found = appliance.json(
        *("bench", "echo", "--sweep", "--model-repository", str(model.parent)),
        *("--instances", "1,2,99999", "--delays", "100", "--concurrency", "2", "--seconds", "0.2"),
    )
    tried = [(each["instances"], each["delay_us"]) for each in found["variants"]]
    assert tried == [
        *((None, None), (1, 100), (2, None), (2, 100)),
        *((99999, None), (99999, 100)),
    ]
    assert all(each["measurements"] for each in found["variants"][:-2])
    assert "99999 instances; at most" in found["variants"][-1]["failure"]
    assert (model / "config.pbtxt").read_text() == written
    assert "echo" not in {each["name"] for each in appliance.json("status")["models"]}
