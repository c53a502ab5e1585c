"""The example programs for vehicles, in each language, against a real daemon."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.daemon_process import Process
from support.lane_stubs import CLIENT, PROTO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.mosquitto import Mosquitto

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/lanes"
WAIT_S = 60.0
LANES = re.compile(
    r"road \d+ (OK|DEGRADED|STALE) \d+ ms, \d lanes, offset (-|[+-]\d\.\d\d) m, lost \d+"
    r"(, [A-Z_]+)*"
)
ENDED = re.compile(r"clip 4 INVALID \d+ ms, 0 lanes, offset - m, lost \d+(, AGE)?, ENDED")
EVENT = re.compile(r"(\d+) [A-Z_]+ (BEGIN|END|INSTANT) \w+ \S+")

Run = list[str]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("daemon")
    config = folder / "settings.toml"
    config.write_text(
        f"""
        [repository]
        paths = ["{ROOT / "models"}"]
        [cameras.road]
        uri = "synthetic://road?seed=7&fps=10"
        max_age_ms = 1000
        [cameras.absent]  # which is an event
        uri = "/dev/video63"
        [cameras.clip]  # which ends
        uri = "synthetic://road?seed=7&fps=0&frames=5"
        """
    )
    process = Process(folder, f"--config={config}")
    try:
        process.wait_for("READY=1")
        process.drain()
        yield process
    finally:
        process.close()


def python(folder: Path) -> Run:
    return [
        "env",
        f"PYTHONPATH={CLIENT}",
        sys.executable,
        "-W",
        "error",
        str(EXAMPLES / "lanes.py"),
    ]


def built(language: str, folder: Path, target: str, needs: dict[str, str]) -> Run:
    """Build the program with its Makefile, in a copy of its folder."""
    if missing := [package for tool, package in needs.items() if shutil.which(tool) is None]:
        pytest.skip(f"not here: apt install {' '.join(missing)}")
    shutil.copytree(EXAMPLES / language, folder / "source")
    make = [
        "make",
        "-C",
        str(folder / "source"),
        f"PROTO={PROTO}",
        "CXXFLAGS=-O0 -Wall -Werror",
    ]
    done = subprocess.run(
        ["timeout", "300", *make, target],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "GOCACHE": str(folder / "cache")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [str(folder / "source/lanes")]


def cpp(folder: Path) -> Run:
    return built(
        "cpp",
        folder,
        "lanes",
        {
            "make": "make",
            "g++": "g++",
            "pkg-config": "pkg-config",
            "protoc": "protobuf-compiler",
            "grpc_cpp_plugin": "protobuf-compiler-grpc libgrpc++-dev libprotobuf-dev",
        },
    )


def go(folder: Path) -> Run:
    libraries = "golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev"
    if not Path("/usr/share/gocode/src/google.golang.org/grpc").is_dir():
        pytest.skip(f"not here: apt install {libraries}")
    return built(
        "go",
        folder,
        "debian",
        {
            "make": "make",
            "go": "golang-go",
            "protoc": "protobuf-compiler",
            "protoc-gen-go": "protoc-gen-go",
            "protoc-gen-go-grpc": "protoc-gen-go-grpc",
        },
    )


@pytest.mark.parametrize(
    "program",
    [python, pytest.param(cpp, marks=pytest.mark.long), pytest.param(go, marks=pytest.mark.long)],
)
def test_a_vehicle_program_gets_lanes_and_events_and_gives_its_speed(
    program: Callable[[Path], Run], tmp_path: Path, daemon: Process
) -> None:
    command = [*program(tmp_path), f"127.0.0.1:{daemon.port}"]

    def output(*words: str) -> list[str]:
        done = subprocess.run(
            [*command, *words], capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    lanes = output("lanes", "6")
    assert len(lanes) == 6
    assert all(LANES.fullmatch(line) for line in lanes if line.startswith("road ")), lanes
    assert any(line.startswith("road ") for line in lanes)
    # 10 a second are of the road, one of the clip that has ended.
    assert any(ENDED.fullmatch(line) for line in output("lanes", "40"))
    last_id = tmp_path / "last_id"
    last_id.write_text("0")
    before = tmp_path / "before"
    before.hardlink_to(last_id)
    (event,) = output("events", str(last_id), "1")
    found = EVENT.fullmatch(event)
    assert found, event
    # The identity of the log may follow.
    assert last_id.read_text().split()[0] == found[1]
    assert before.read_text() == "0", "it was written in place, and is empty for a moment"
    assert output("vehicle", "22.5") == ["taken"]
    assert output("vehicle", "22.5", "left", "0.2") == ["taken"]


def test_a_subscriber_learns_that_a_recording_has_ended(
    mosquitto: Mosquitto, start: Callable[..., Process]
) -> None:
    if shutil.which("mosquitto_sub") is None:
        pytest.skip("no mosquitto_sub on this machine: apt install mosquitto-clients")
    command = ["mosquitto_sub", "-h", mosquitto.host, "-p", str(mosquitto.port), "-W", "60"]
    with subprocess.Popen(
        [*command, "-t", "edge/v1/+/cameras/+/lanes"], stdout=subprocess.PIPE, text=True
    ) as subscriber:
        start(
            f"--model-repository={ROOT / 'models'}",
            "--camera=clip=synthetic://road?seed=7&fps=0&frames=5",
            f"--mqtt={mosquitto.host}:{mosquitto.port}",
        )
        frames = (json.loads(line) for line in subscriber.stdout or ())
        ended = (frame for frame in frames if frame["status"] == "FRAME_STATUS_INVALID")
        for frame in itertools.islice(ended, 2):
            assert (frame["frame_id"], frame["lanes"]) == (4, [])
            assert frame["reason_details"][-1] == {
                "code": "REASON_CODE_ENDED",
                "text": "it ended after 5 frames",
            }
        subscriber.kill()
