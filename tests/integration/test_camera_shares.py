"""Several cameras share one model of a real daemon: fairly, by priority, and in common batches."""

from __future__ import annotations

import shutil
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
import tritonclient.grpc as triton
from support.waiting import wait_until

from edge_server.backends import BACKENDS
from edge_server.backends.contract import TensorModel
from edge_server.daemon.daemon import Daemon
from edge_server.settings import read_settings
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.backends.contract import LoadContext, Tensors
    from edge_server.cameras.camera import Camera
    from edge_server.lanes.types import LaneFrame
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.files import ModelFiles

MODELS = Path(__file__).parents[2] / "models"
PATIENCE_S = 120.0

LANES = """
output { name: "lane_points" data_type: TYPE_FP32 dims: [ -1, 72, 2 ] }
output { name: "lane_scores" data_type: TYPE_FP32 dims: -1 }
"""
NETWORK_CONFIG = f"""
backend: "waiting" input {{ name: "input" data_type: TYPE_FP32 dims: [ 3, 360, 640 ] }} {LANES}
"""
ROAD = f"""
platform: "ensemble" max_batch_size: 1
input {{ name: "image" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] }} {LANES}
ensemble_scheduling {{
  step {{ model_name: "lane_preprocess" model_version: -1
    input_map {{ key: "image" value: "image" }} output_map {{ key: "input" value: "input" }} }}
  step {{ model_name: "network" model_version: -1
    input_map {{ key: "input" value: "input" }}
    output_map {{ key: "lane_points" value: "lane_points" }}
    output_map {{ key: "lane_scores" value: "lane_scores" }} }}
}}
"""


def _pictures(folder: Path, width: int) -> Path:
    """Make a recording that costs little to play, and whose pictures differ."""
    folder.mkdir()
    random = np.random.default_rng(width)
    for n in range(3):
        noise = random.integers(0, 255, (96, width, 3), np.uint8)
        cv2.imwrite(str(folder / f"{n}.png"), noise)
    return folder


class WaitingNetwork:
    """A backend whose runs end once every camera has its next frame: cameras that offer more than
    the network takes, on a machine of any speed.

    Attributes:
        cameras: those that are waited for.
        expected: set where the next run that has begun also waits until a client's request is
            queued behind it.
        queued: returns whether it is.
    """

    def __init__(self) -> None:
        self.cameras: list[Camera] = []
        self.expected = threading.Event()
        self.queued: Callable[[], bool] = lambda: True

    def complete(self, files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
        return config

    def load(self, context: LoadContext) -> TensorModel:
        return TensorModel(self._run)

    def _run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        for camera in self.cameras:
            camera.wait_for_frame(PATIENCE_S)
        if self.expected.is_set():
            wait_until(self.queued, PATIENCE_S)
            self.expected.clear()
        rows = inputs["input"].shape[0]
        points, scores = np.full((rows, 1, 72, 2), 100, np.float32), np.ones((rows, 1), np.float32)
        return {"lane_points": Tensor(points), "lane_scores": Tensor(scores)}


class Drive:
    """A daemon in this process whose cameras offer more frames than the network can take."""

    def __init__(self, folder: Path, network: WaitingNetwork, rows: int, *cameras: str) -> None:
        models = folder / "models"
        for name, config in (
            ("network", f"max_batch_size: {rows} {NETWORK_CONFIG}"),
            ("road", ROAD),
        ):
            (models / name / "1").mkdir(parents=True)
            (models / name / "config.pbtxt").write_text(
                config + "dynamic_batching { }" * (name == "network" and rows > 1)
            )
        shutil.copytree(MODELS / "lane_preprocess", models / "lane_preprocess")
        settings = folder / "config.toml"
        settings.write_text(
            f'[repository]\npaths = ["{models}"]\n[grpc]\nport = 0\n[metrics]\nenabled = false\n'
            "[http]\nenabled = false\n"
            + "".join(
                f'[cameras.c{n}]\nmodel = "road"\nmax_age_ms = 1000\n{more}\n'
                f'uri = "file://{_pictures(folder / f"pictures{n}", 160 + 2 * n)}'
                f'?loop=true&fps={25 + n}"\n'
                for n, more in enumerate(cameras)
            )
        )
        self.names = [f"c{n}" for n in range(len(cameras))]
        self.lanes: Counter[str] = Counter()
        self._more = threading.Condition()
        self.daemon = Daemon(read_settings(settings, {}), [self._note])
        self.daemon.start(threading.Event())
        network.cameras = [pipeline.camera for pipeline in self.daemon.pipelines]
        network.queued = self._is_queued

    def _note(self, lane_frame: LaneFrame, _: object) -> None:
        with self._more:
            self.lanes[lane_frame.camera] += bool(lane_frame.lanes)
            self._more.notify_all()

    def _is_queued(self) -> bool:
        """Whether more requests wait for the network than the cameras have turns for."""
        network = self.daemon.data_plane.find("network", "")
        return network.scheduler.pending() >= self.daemon.pipelines[0]._shares.limit

    def shares(self, count: int) -> list[int]:
        """The lanes of each camera, once the least served one has got `count` from now on."""
        with self._more:
            self.lanes.clear()
            assert self._more.wait_for(
                lambda: min(self.lanes[name] for name in self.names) >= count, PATIENCE_S
            )
            return [self.lanes[name] for name in self.names]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> WaitingNetwork:
    backend = WaitingNetwork()
    monkeypatch.setitem(BACKENDS, "waiting", "edge_server_waiting_network")
    monkeypatch.setitem(sys.modules, "edge_server_waiting_network", backend)
    return backend


@pytest.fixture
def drive(tmp_path: Path, network: WaitingNetwork) -> Iterator[Callable[..., Drive]]:
    made: list[Drive] = []

    def make(rows: int, *cameras: str) -> Drive:
        made.append(Drive(tmp_path, network, rows, *cameras))
        return made[-1]

    yield make
    for each in made:
        each.daemon.stop()


@pytest.mark.parametrize("cameras", [2, 4])
def test_cameras_of_one_priority_get_equal_shares(
    drive: Callable[..., Drive], cameras: int
) -> None:
    shares = drive(1, *[""] * cameras).shares(25)
    assert max(shares) <= 1.2 * min(shares)


def test_a_camera_of_priority_3_gets_three_times_the_lanes(drive: Callable[..., Drive]) -> None:
    # Three sevenths of the turns: also where two frames are on their way at a time.
    first, *others = drive(1, "priority = 3", "", "priority = 1", "", "").shares(15)
    assert max(others) <= 1.2 * min(others)
    assert 2.4 <= first / min(others) <= 3.6


def test_a_client_is_served_beside_cameras_that_keep_the_model_busy(
    drive: Callable[..., Drive], network: WaitingNetwork
) -> None:
    daemon = drive(1, *[""] * 4)
    daemon.shares(1)
    image = triton.InferInput("image", [1, 96, 160, 3], "UINT8")
    image.set_data_from_numpy(np.zeros((1, 96, 160, 3), np.uint8))
    with triton.InferenceServerClient(f"127.0.0.1:{daemon.daemon.grpc_port}") as client:
        client.infer("road", [image])
        daemon.lanes.clear()
        for _ in range(10):
            network.expected.set()
            client.infer("road", [image], client_timeout=PATIENCE_S)
        # Every fourth run would be 30; the cameras' frames of before count, too.
        assert daemon.lanes.total() < 60
    daemon.shares(1)


def test_frames_of_several_cameras_and_sizes_run_in_one_batch(drive: Callable[..., Drive]) -> None:
    daemon = drive(4, *[""] * 4)
    with triton.InferenceServerClient(f"127.0.0.1:{daemon.daemon.grpc_port}") as client:

        def has_batches() -> bool:
            (network,) = client.get_inference_statistics("network").model_stats
            return network.inference_count > 1.5 * network.execution_count

        wait_until(has_batches, PATIENCE_S)  # at the start they take turns
