"""Several cameras share one model of a real daemon: fairly, by priority, and in common batches."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
import tritonclient.grpc as triton

from edge_server.daemon.daemon import Daemon
from edge_server.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.lanes.types import LaneFrame

MODELS = Path(__file__).parents[2] / "models"
PATIENCE_S = 120.0

# A run takes as long however many frames are in it.
NETWORK = """
import time
import numpy
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(RUN_S)
        lanes = [
            pb_utils.Tensor("lane_points", numpy.full((1, 1, 72, 2), 100, numpy.float32)),
            pb_utils.Tensor("lane_scores", numpy.ones((1, 1), numpy.float32)),
        ]
        return [pb_utils.InferenceResponse(lanes) for _ in requests]
"""
LANES = """
output { name: "lane_points" data_type: TYPE_FP32 dims: [ -1, 72, 2 ] }
output { name: "lane_scores" data_type: TYPE_FP32 dims: -1 }
"""
NETWORK_CONFIG = f"""
backend: "python" input {{ name: "input" data_type: TYPE_FP32 dims: [ 3, 360, 640 ] }} {LANES}
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


class Drive:
    """A daemon in this process whose cameras offer more frames than the network can take: where
    `rows` run at once, each of four cameras has one by the end of a run, on a busy machine too."""

    def __init__(self, folder: Path, rows: int, *cameras: str) -> None:
        models = folder / "models"
        for name, config in (
            ("network", f"max_batch_size: {rows} {NETWORK_CONFIG}"),
            ("road", ROAD),
        ):
            (models / name / "1").mkdir(parents=True)
            (models / name / "config.pbtxt").write_text(
                config + "dynamic_batching { }" * (name == "network" and rows > 1)
            )
        run_s = 0.05 if rows == 1 else 0.25
        (models / "network/1/model.py").write_text(f"RUN_S = {run_s}\n{NETWORK}")
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

    def _note(self, lane_frame: LaneFrame, _: object) -> None:
        with self._more:
            self.lanes[lane_frame.camera] += bool(lane_frame.lanes)
            self._more.notify_all()

    def shares(self, count: int) -> list[int]:
        """The lanes of each camera, once the least served one has got `count` from now on."""
        with self._more:
            self.lanes.clear()
            assert self._more.wait_for(
                lambda: min(self.lanes[name] for name in self.names) >= count, PATIENCE_S
            )
            return [self.lanes[name] for name in self.names]


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[..., Drive]]:
    made: list[Drive] = []

    def make(rows: int, *cameras: str) -> Drive:
        made.append(Drive(tmp_path, rows, *cameras))
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
    drive: Callable[..., Drive],
) -> None:
    daemon = drive(1, *[""] * 4)
    daemon.shares(1)
    image = triton.InferInput("image", [1, 96, 160, 3], "UINT8")
    image.set_data_from_numpy(np.zeros((1, 96, 160, 3), np.uint8))
    with triton.InferenceServerClient(f"127.0.0.1:{daemon.daemon.grpc_port}") as client:
        client.infer("road", [image])
        daemon.lanes.clear()
        for _ in range(10):
            client.infer("road", [image], client_timeout=PATIENCE_S)
        # Every fourth run would be 30; the cameras' frames of before count, too.
        assert daemon.lanes.total() < 60
    daemon.shares(1)


def test_frames_of_several_cameras_and_sizes_run_in_one_batch(drive: Callable[..., Drive]) -> None:
    daemon = drive(4, *[""] * 4)
    daemon.shares(10)
    with triton.InferenceServerClient(f"127.0.0.1:{daemon.daemon.grpc_port}") as client:
        (network,) = client.get_inference_statistics("network").model_stats
    assert network.inference_count > 1.5 * network.execution_count
