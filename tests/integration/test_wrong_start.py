"""What is wrong at the start ends it with its exit code and its name, nothing half-started."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.verb import ANY_PORTS, run_verb

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from support.daemon_process import Process

MODELS = Path(__file__).parents[2] / "models"


def run_to_its_end(*arguments: str, verb: str = "run") -> subprocess.CompletedProcess[str]:
    return run_verb(verb, *ANY_PORTS, *arguments)


@pytest.fixture
def broken_models(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODELS, tmp_path / "models"))


def truncate_onnx(models: Path) -> None:
    path = models / "laneDetect_model" / "1" / "model.onnx"
    path.write_bytes(path.read_bytes()[:100_000])


def misspell_field(models: Path) -> None:
    path = models / "lane_decode" / "config.pbtxt"
    path.write_text(path.read_text().replace("max_batch_size", "max_batchsize"))


def forget_tensor(models: Path) -> None:
    path = models / "lane_detection" / "config.pbtxt"
    gives_size = 'output_map { key: "image_size" value: "image_size" }'
    path.write_text(path.read_text().replace(gives_size, "", 1))


@pytest.mark.parametrize("verb", ["run", "check"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate_onnx, "laneDetect_model/1/model.onnx: ONNX Runtime cannot load it"),
        (
            misspell_field,
            'lane_decode/config.pbtxt:4:1: Message type "inference.ModelConfig" has '
            'no field named "max_batchsize". Did you mean "max_batch_size"?',
        ),
        (
            forget_tensor,
            "lane_detection/config.pbtxt: output 'lane_points' for ensemble 'lane_detection' is "
            "not written: at least one of its depending tensors, 'image_size', is not connected",
        ),
    ],
)
def test_a_broken_repository_ends_with_78_and_the_fault_by_name(
    broken_models: Path, verb: str, damage: Callable[[Path], None], says: str
) -> None:
    damage(broken_models)
    done = run_to_its_end("--model-repository", str(broken_models), verb=verb)
    assert done.returncode == 78
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("mode", ["none", "explicit", "poll"])
def test_a_repository_that_is_not_mounted_yet_ends_with_69(tmp_path: Path, mode: str) -> None:
    done = run_to_its_end(
        f"--model-control-mode={mode}",
        f"--model-repository={tmp_path / 'away'}",
        *((f"--repository-copies={tmp_path / 'store'}",) if mode == "poll" else ()),
        *(("--load-model=lane_detection",) if mode == "explicit" else ()),
    )
    assert done.returncode == 69
    assert str(tmp_path / "away") in done.stderr
    assert "Traceback" not in done.stderr


def test_an_empty_place_where_a_cameras_model_shall_be_ends_with_69(tmp_path: Path) -> None:
    camera = "--camera=road=synthetic://road?seed=7&fps=10"
    done = run_to_its_end(f"--model-repository={tmp_path}", camera)
    assert done.returncode == 69
    assert "'lane_detection' gives no lanes" in done.stderr


INITIALIZES = """
import pathlib

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(0)
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [1]})
        return config

    def initialize(self, args):
        there = pathlib.Path(FOLDER) / "tried"
        tried = there.exists()
        there.touch()
        if not tried:
            raise OSError("the sensor does not answer")

    def execute(self, requests):
        return []
"""


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("none", marks=pytest.mark.long),
        pytest.param("explicit", marks=pytest.mark.long),
        "poll",
    ],
)
def test_an_initialize_that_raises_once_ends_with_69_and_serves_at_the_next_start(
    tmp_path: Path, mode: str, start: Callable[..., Process]
) -> None:
    model = tmp_path / "models" / "m"
    sensor, config = tmp_path / "sensor", tmp_path / "config.toml"
    sensor.mkdir()
    config.write_text(f'[python]\nwritable = ["{sensor}"]\n')
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(INITIALIZES.replace("FOLDER", repr(str(sensor))))
    (model / "config.pbtxt").write_text('backend: "python"')
    flags = [
        f"--config={config}",
        f"--model-repository={model.parent}",
        f"--model-control-mode={mode}",
        *(
            ("--repository-settle-secs=0", f"--repository-copies={tmp_path / 's'}")
            * (mode == "poll")
        ),
        *(("--load-model=m",) * (mode == "explicit")),
    ]
    done = run_to_its_end(*flags)
    assert "the sensor does not answer" in done.stderr
    assert done.returncode == 69
    start(*flags)


def test_one_fault_in_the_files_among_others_that_may_pass_ends_with_78(tmp_path: Path) -> None:
    for name, config in (("passes", 'backend: "python"'), ("stays", 'backnd: "python"')):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.py").write_text(INITIALIZES)
        (tmp_path / name / "config.pbtxt").write_text(config)
    done = run_to_its_end(f"--model-repository={tmp_path}")
    assert done.returncode == 78
    assert "models that cannot be loaded: passes, stays" in done.stderr


def test_a_taken_port_is_reported_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_to_its_end("--model-repository", str(MODELS), f"--grpc-port={port}")
    assert done.returncode == 69
    assert f"gRPC cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "another process may hold the port" in done.stderr
    assert "READY" not in done.stderr


def test_an_address_of_another_machine_is_reported_as_that() -> None:
    # 192.0.2.0/24 is for documentation (RFC 5737).
    done = run_to_its_end(
        "--model-repository",
        str(MODELS),
        "--grpc-address=192.0.2.1",
        "--grpc-insecure",
        "--grpc-control=off",
    )
    assert done.returncode == 69
    (line,) = done.stderr.splitlines()
    assert line.endswith("give an address of this machine with --grpc-address")


@pytest.mark.parametrize(
    ("camera", "code", "says"),
    [
        ("front=synthetic://road?sed=7", 78, "unknown option 'sed'; did you mean"),
        ("front=/nowhere/road.mp4", 69, "no such file or folder"),
    ],
)
def test_a_wrong_camera_is_reported_before_a_model_is_loaded(
    broken_models: Path, camera: str, code: int, says: str
) -> None:
    # A model that cannot be loaded would be told first, were it looked at.
    truncate_onnx(broken_models)
    repository = ["--model-repository", str(broken_models)]
    done = run_to_its_end(*repository, f"--camera={camera}")
    assert done.returncode == code
    assert says in done.stderr
    assert "model.onnx" not in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unreadable_video_ends_with_69_and_its_path(tmp_path: Path) -> None:
    video = tmp_path / "road.mp4"
    video.write_bytes(b"\0" * 1000)
    done = run_to_its_end("--model-repository", str(MODELS), f"--camera=front={video}")
    assert done.returncode == 69
    assert f"camera front: {video}: no video can be read" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_key_ends_with_78_and_the_nearest_one(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[grpc]\nprot = 8001\n")
    done = run_to_its_end("--config", str(config))
    assert done.returncode == 78
    assert done.stderr == (
        f'edge-server: {config}: grpc.prot: unknown key; did you mean "port"? (line 2)\n'
    )


def test_with_json_every_line_is_an_object_the_last_one_too() -> None:
    done = run_to_its_end("--model-repository=/nowhere", "--log-format=json")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert "model repository cannot be read" in lines[-1]["text"]
    assert lines[-1]["level"] == "error"


def test_with_json_ffmpeg_adds_no_lines_of_its_own(tmp_path: Path) -> None:
    video = tmp_path / "broken.mp4"
    video.write_bytes(b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom")
    arguments = [
        "--log-format=json",
        f"--camera=a={video}",
    ]
    done = run_to_its_end(*arguments)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert "no video can be read" in lines[-1]["text"]
