"""Networks that somebody brings: those of examples/networks on rendered roads, and the text
detector of docs/networks.md, whose ONNX file comes in a wheel."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
from integration.test_mqtt_publisher import listening
from integration.test_networks import write_configs
from lane_training.vehicles import LABELS, truth_of
from support.daemon_process import Process
from support.mosquitto import Mosquitto, mosquitto_binary

from edge_server.cameras.frame import Frame
from edge_server.daemon.parts import chosen_control
from edge_server.gpu.device import Devices
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelRegistry
from edge_server.inference.scheduling import Scheduling
from edge_server.mqtt.payloads import Topics
from edge_server.pipeline.networks import NetworkModel
from edge_server.pipeline.perception import Detections, Segmentation
from edge_server.pixels import Image
from edge_server.settings import Repository
from edge_server.tools.road.renderer import render
from edge_server.tools.road.scene import RoadScene

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.pipeline.networks import NetworkAnswer

EXAMPLES = Path(__file__).parents[2] / "examples" / "networks"
DOC = EXAMPLES.parents[1] / "docs" / "networks.md"
# Not among the roads that the network was trained on.
ROADS = range(2**31, 2**31 + 12)
SIZE = 1280, 720


@pytest.fixture(scope="module")
def data_plane() -> Iterator[DataPlane]:
    registry, scheduling = ModelRegistry(), Scheduling()
    control = chosen_control(registry, scheduling, Devices(), Repository(paths=(str(EXAMPLES),)))
    control.start()
    yield DataPlane(registry)
    control.close(30.0)
    scheduling.close()


def answers(data_plane: DataPlane, name: str) -> Iterator[tuple[RoadScene, NetworkAnswer]]:
    model = NetworkModel(data_plane, name, "", None)
    for seed in ROADS:
        scene = RoadScene.for_camera(seed)
        picture, _ = render(scene, 400.0, *SIZE)
        yield scene, model.run(Frame.arrived(seed, Image.of_bgr(picture)))


def test_the_example_network_finds_vehicles_of_rendered_roads(data_plane: DataPlane) -> None:
    right = beside = vehicles = 0
    for scene, answer in answers(data_plane, "vehicles"):
        truth = truth_of(scene, 400.0, *SIZE)
        found = answer.result
        assert isinstance(found, Detections)
        assert found.labels == LABELS
        low = np.maximum(found.boxes[:, None, :2], truth.boxes[None, :, :2])
        high = np.minimum(found.boxes[:, None, 2:], truth.boxes[None, :, 2:])
        both = np.clip(high - low, 0, None).prod(axis=2)
        areas = [(each[:, 2:] - each[:, :2]).prod(axis=1) for each in (found.boxes, truth.boxes)]
        overlap = both / (areas[0][:, None] + areas[1] - both)
        same = found.classes[:, None] == truth.classes
        seen = truth.classes >= 0
        vehicles += int(seen.sum())
        right += int(((overlap >= 0.5) & same).any(axis=0)[seen].sum())
        beside += int((overlap < 0.1).all(axis=1).sum())
    assert vehicles > 20
    assert right >= 0.6 * vehicles
    assert beside <= 0.1 * vehicles


def test_the_example_network_finds_the_drivable_area(data_plane: DataPlane) -> None:
    for scene, answer in answers(data_plane, "drivable_area"):
        found = answer.result
        assert isinstance(found, Segmentation)
        cells = np.repeat(found.run_classes, found.run_lengths).reshape(found.size[::-1])
        area = np.kron(cells, np.ones((15, 16), np.int64)) > 0
        truth = truth_of(scene, 400.0, *SIZE).drivable
        assert np.count_nonzero(area & truth) > 0.9 * np.count_nonzero(area | truth)
        assert found.labels == ("background", "drivable")
        assert found.polygons[0].class_id == 1


TEXT_PX = 440, 220, 400, 70


@pytest.fixture
def text_repository(tmp_path: Path) -> Path:
    """The models of docs/networks.md, by its commands."""
    (version,) = re.findall(r"rapidocr-onnxruntime==([\d.]+)", DOC.read_text())
    command = "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"
    package = f"rapidocr-onnxruntime=={version}"
    done = subprocess.run(
        [sys.executable, *command, "--retries=1", "--timeout=10", f"--dest={tmp_path}", package],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"pip gets no {package}: {done.stderr.strip().splitlines()[-1:]}")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = [each for each in files.namelist() if each.endswith("_det_infer.onnx")]
        (tmp_path / "text.onnx").write_bytes(files.read(name))
    repository = tmp_path / "models"
    write_configs(repository, "text")
    (repository / "text_net" / "labels.txt").write_text("background\ntext\n")
    subprocess.run(
        [
            *(sys.executable, EXAMPLES / "prepare_network.py", tmp_path / "text.onnx"),
            repository / "text_net" / "1" / "model.onnx",
            *("--mean", ".5", ".5", ".5", "--std", ".5", ".5", ".5"),
        ],
        check=True,
    )
    return repository


def write_pictures(folder: Path) -> None:
    """A sign that comes nearer by some pixels, so that the camera does not count as frozen."""
    folder.mkdir()
    for number in range(5):
        picture = np.full((720, 1280, 3), 90, np.uint8)
        cv2.rectangle(picture, (380, 180), (900, 340), (30, 90, 20), -1)
        x, y, _, height = TEXT_PX
        place = x + number, y + height
        font = cv2.FONT_HERSHEY_SIMPLEX
        cv2.putText(picture, "EXIT 12", place, font, 3.0, (240, 240, 240), 8, cv2.LINE_AA)
        cv2.imwrite(str(folder / f"{number}.png"), picture)


def test_a_text_detector_of_a_wheel_outlines_the_text_of_a_camera_without_lanes(
    tmp_path: Path, text_repository: Path
) -> None:
    if not mosquitto_binary():
        pytest.skip("no mosquitto on this machine: apt install mosquitto")
    write_pictures(tmp_path / "pictures")
    broker = Mosquitto(tmp_path)
    broker.start()
    config = tmp_path / "settings.toml"
    config.write_text(
        f"""
        [repository]
        paths = ["{text_repository}"]
        [device]
        id = "truck-7"
        [mqtt]
        host = "{broker.host}"
        port = {broker.port}
        [cameras.rear]
        uri = "file://{tmp_path / "pictures"}?loop=true&fps=5"
        model = ""
        [cameras.rear.networks.text]
        model = "text"
        max_hz = 2
        deadline_ms = 10000
        """
    )
    process = Process(tmp_path, f"--config={config}")
    try:
        process.wait_for("READY=1")
        topic = Topics("truck-7").network("rear", "text")
        with listening(broker, topic) as inbox:
            # On a busy machine the first one says that there is no result yet.
            found = json.loads(
                inbox.wait_for(
                    lambda m: json.loads(m.payload)["status"] == "FRAME_STATUS_OK"
                ).payload
            )
    finally:
        process.close()
        broker.kill()
    assert found["task"] == "TASK_SEGMENTATION"
    mask = found["segmentation"]
    assert mask["labels"] == ["background", "text"]
    assert {each["class_id"] for each in mask["outlines"]} == {1}
    x, y, width, height = TEXT_PX
    for outline in mask["outlines"]:
        assert x - 10 <= min(outline["x"]) <= max(outline["x"]) <= x + width + 10
        assert y - 10 <= min(outline["y"]) <= max(outline["y"]) <= y + height + 10
    assert sum(max(each["x"]) - min(each["x"]) for each in mask["outlines"]) > 0.6 * width
