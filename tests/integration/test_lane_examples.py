"""The example programs for vehicles, in each language, and the client in C++."""

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

import numpy as np
import pytest
from support.daemon_process import Process
from support.lane_stand_in import PowerCut, StandIn
from support.lane_stubs import CLIENT, PROTO
from support.waiting import wait_until

from edge_lanes import e2e

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.mosquitto import Mosquitto

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/lanes"
CPP_CLIENT = ROOT / "clients/cpp"
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
        uri = "synthetic://road?seed=7&fps=10&width=640&height=360"
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
        yield process
    finally:
        process.close()


def python(folder: Path, request: pytest.FixtureRequest) -> Run:
    return [
        "env",
        f"PYTHONPATH={CLIENT}",
        sys.executable,
        "-W",
        "error",
        str(EXAMPLES / "lanes.py"),
    ]


def skip_without(needs: dict[str, str]) -> None:
    if missing := [package for tool, package in needs.items() if shutil.which(tool) is None]:
        pytest.skip(f"not here: apt install {' '.join(missing)}")


def build(*command: str | Path, **environment: str) -> None:
    done = subprocess.run(
        ["timeout", "600", *command],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def cmake(source: Path, made: Path, *options: str) -> Path:
    """Build a CMake project without optimisation, and return its folder."""
    flags = "-DCMAKE_CXX_FLAGS=-O0 -Wall -Wextra -Wno-unused-parameter -Werror"
    build("cmake", "-S", source, "-B", made, flags, *options)
    build("cmake", "--build", made, "--parallel", "2")
    return made


@pytest.fixture(scope="module")
def cpp_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the client in C++ is installed."""
    skip_without(
        {
            "cmake": "cmake",
            "make": "make",
            "g++": "g++",
            "pkg-config": "pkg-config",
            "protoc": "protobuf-compiler",
            "grpc_cpp_plugin": "protobuf-compiler-grpc libgrpc++-dev libprotobuf-dev",
        }
    )
    folder = tmp_path_factory.mktemp("cpp")
    made = cmake(CPP_CLIENT, folder / "build", f"-DEDGE_LANES_PROTO_DIR={PROTO}")
    build("cmake", "--install", made, "--prefix", folder / "prefix")
    return folder / "prefix"


def cpp(folder: Path, request: pytest.FixtureRequest) -> Run:
    prefix = request.getfixturevalue("cpp_client")
    made = cmake(EXAMPLES / "cpp", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    return [str(made / "lanes")]


def go(folder: Path, request: pytest.FixtureRequest) -> Run:
    libraries = "golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev"
    if not Path("/usr/share/gocode/src/google.golang.org/grpc").is_dir():
        pytest.skip(f"not here: apt install {libraries}")
    skip_without(
        {
            "make": "make",
            "go": "golang-go",
            "protoc": "protobuf-compiler",
            "protoc-gen-go": "protoc-gen-go",
            "protoc-gen-go-grpc": "protoc-gen-go-grpc",
        }
    )
    source = folder / "source"
    shutil.copytree(EXAMPLES / "go", source)
    build("make", "-C", source, f"PROTO={PROTO}", "debian", GOCACHE=str(folder / "cache"))
    return [str(source / "lanes")]


@pytest.mark.parametrize(
    "program",
    [python, pytest.param(cpp, marks=pytest.mark.long), pytest.param(go, marks=pytest.mark.long)],
)
def test_a_vehicle_program_gets_lanes_and_events_and_gives_its_speed(
    program: Callable[[Path, pytest.FixtureRequest], Run],
    tmp_path: Path,
    daemon: Process,
    request: pytest.FixtureRequest,
) -> None:
    command = [*program(tmp_path, request), f"127.0.0.1:{daemon.port}"]

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


@pytest.mark.long
def test_the_program_of_the_cpp_clients_readme_shows_a_lane(
    cpp_client: Path, tmp_path: Path, daemon: Process
) -> None:
    readme = (CPP_CLIENT / "README.md").read_text()
    for language, name in (("cpp", "first_lane.cc"), ("cmake", "CMakeLists.txt")):
        (text,) = re.findall(rf"```{language}\n(#include.*?|cmake_.*?)```", readme, re.DOTALL)
        (tmp_path / name).write_text(text.replace(":8001", f":{daemon.port}"))
    made = cmake(tmp_path, tmp_path / "build", f"-DCMAKE_PREFIX_PATH={cpp_client}")
    with subprocess.Popen([made / "first_lane"], stdout=subprocess.PIPE, text=True) as program:
        assert re.fullmatch(r"[1-5] lanes\n", program.stdout.readline() if program.stdout else "")
        program.kill()


@pytest.mark.long
def test_the_cpp_client_hears_of_silence_and_connects_again(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    device = StandIn()
    with PowerCut(device.port) as line, (tmp_path / "errors").open("w") as errors:
        command = [*cpp(tmp_path, request), f"127.0.0.1:{line.port}", "lanes"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as program:
            try:
                shown = program.stdout or ()
                words = [line.split()[2] for line in itertools.islice(shown, 5)]
                assert words == ["OK", "DEGRADED", "STALE", "INVALID", "OK"]
                line.cut()
                wait_until(lambda: "no lanes: \n" in (tmp_path / "errors").read_text())
                assert "front 1 OK 0 ms, 0 lanes, offset - m, lost 1\n" in shown
                device.stop()
                wait_until(lambda: "no lanes: 14: " in (tmp_path / "errors").read_text())
                device.start()
                assert "front 1 OK 0 ms, 0 lanes, offset - m, lost 1\n" in shown
            finally:
                program.kill()
    device.stop()


CHECK_ENVELOPES = """
#include <edge_lanes/e2e.h>
#include <iostream>
int main(int, char** argv) {
  edge_lanes::Checker checker(argv[1]);
  std::string now, payload, envelope;
  while (std::getline(std::cin, now, '\\t') && std::getline(std::cin, payload, '\\t') &&
         std::getline(std::cin, envelope)) {
    const edge_lanes::Checker::Clock::time_point at{std::chrono::nanoseconds(std::stoll(now))};
    const auto check = envelope.empty() ? checker.Examine(payload, std::nullopt, at)
                                        : checker.Examine(payload, envelope, at);
    std::cout << int(check) << " " << int(checker.Silence(at)) << "\\n";
  }
}
"""


@pytest.mark.long
def test_the_cpp_client_judges_envelopes_as_the_python_client_does(tmp_path: Path) -> None:
    skip_without({"g++": "g++"})
    (tmp_path / "main.cc").write_text(CHECK_ENVELOPES)
    sources = [tmp_path / "main.cc", CPP_CLIENT / "src/e2e.cc"]
    build("g++", "-std=c++17", f"-I{CPP_CLIENT / 'include'}", *sources, "-o", tmp_path / "check")
    topic = "edge/v1/lkw-ä/cameras/front/lanes"
    checker = e2e.Checker(topic)
    verdicts = list(e2e.Check)
    random = np.random.default_rng(7)
    lines, expected = [], []
    now_ns, counter, session = 10**12, 2**32 - 500, "0" * 8
    for _ in range(5000):
        now_ns += int(random.choice((1, 50, 50, 50, 900, 1300))) * 10**6
        counter += int(random.choice((1, 1, 1, 1, 1, 1, 0, -1, 2, 5, 6, 7, 2**31)))
        if random.random() < 0.02:
            session = f"{random.integers(16):08x}"
        sent_ms = now_ns // 10**6 - int(random.choice((0, 0, 0, 0, 30, 1100)))
        payload = f"{random.random()}"
        envelope = e2e.protect(
            topic, payload.encode(), e2e.Envelope(session, counter % 2**32, sent_ms)
        )
        match random.integers(20):
            case 0:
                envelope = ""
            case 1:  # one character is another one
                at = int(random.integers(len(envelope)))
                envelope = f"{envelope[:at]}{random.choice(list('0aX '))}{envelope[at + 1 :]}"
        lines.append(f"{now_ns}\t{payload}\t{envelope}\n")
        check = checker.check(payload.encode(), envelope or None, now_ns / 10**9)
        silence = checker.silence(now_ns / 10**9)
        expected.append(f"{verdicts.index(check)} {verdicts.index(silence)}")
    assert {line[0] for line in expected} == {str(number) for number in range(len(verdicts))}
    done = subprocess.run(
        [tmp_path / "check", topic],
        input="".join(lines),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == expected


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
        reason = {"code": "REASON_CODE_ENDED", "text": "it ended after 5 frames"}
        ended = (frame for frame in frames if reason in frame.get("reason_details", ()))
        told = [(e["status"], e["frame_id"], e["lanes"]) for e in itertools.islice(ended, 2)]
        assert told == [("FRAME_STATUS_INVALID", 4, [])] * 2
        subscriber.kill()
