"""A Python member of a camera's ensemble that hangs is killed, and the daemon goes on."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.waiting import wait_until

from edge_server.daemon.daemon import Daemon
from edge_server.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.lanes.types import LaneFrame

MODELS = Path(__file__).parents[2] / "models"
PATIENCE_S = 90.0
# The loop's own limit, scaled down, and less than an execution may take.
LOOP_LIMIT_S = 4.0
EXECUTION_S = 8

# Sleeps as long as a file says, for images of that height or for any, and tells that it does.
MODEL = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        images = [pb_utils.get_input_tensor_by_name(r, "image").as_numpy() for r in requests]
        if os.path.exists({nap!r}):
            with open({nap!r}) as file:
                seconds, height = file.read().split()
            if height in ("any", str(images[0].shape[1])):
                with open({began!r}, "a") as file:
                    file.write(f"{{os.getpid()}}\\n")
                time.sleep(float(seconds))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("same", i)]) for i in images]
"""
IMAGE = "data_type: TYPE_UINT8 dims: [ -1, -1, 3 ]"
PASS_ON = f"""
backend: "python" max_batch_size: 1
input {{ name: "image" {IMAGE} }} output {{ name: "same" {IMAGE} }}
parameters {{ key: "execution_timeout_s" value {{ string_value: "{EXECUTION_S}" }} }}
"""
ROAD = f"""
platform: "ensemble" max_batch_size: 1
input {{ name: "image" {IMAGE} }}
output {{ name: "lane_points" data_type: TYPE_FP32 dims: [ -1, 72, 2 ] }}
output {{ name: "lane_scores" data_type: TYPE_FP32 dims: -1 }}
ensemble_scheduling {{
  step {{ model_name: "pass_on" model_version: -1
    input_map {{ key: "image" value: "image" }} output_map {{ key: "same" value: "same" }} }}
  step {{ model_name: "lane_detection" model_version: -1
    input_map {{ key: "image" value: "same" }}
    output_map {{ key: "lane_points" value: "lane_points" }}
    output_map {{ key: "lane_scores" value: "lane_scores" }} }}
}}
"""


class Drive:
    """A daemon in this process with one camera, and what the camera told."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.nap, self.began = folder / "nap", folder / "began"
        self.lanes = threading.Semaphore(0)
        self.failures: list[tuple[float, str]] = []  # of each frame, and when
        self.failure: BaseException | None = None
        models = folder / "models"
        for name, config in (("pass_on", PASS_ON), ("road", ROAD)):
            (models / name / "1").mkdir(parents=True)
            (models / name / "config.pbtxt").write_text(config)
        code = MODEL.format(nap=str(self.nap), began=str(self.began))
        (models / "pass_on" / "1" / "model.py").write_text(code)
        settings = folder / "config.toml"
        settings.write_text(
            f'[repository]\npaths = ["{models}", "{MODELS}"]\n[grpc]\nport = 0\n'
            '[metrics]\nenabled = false\n[http]\nenabled = false\n[cameras.front]\nmodel = "road"\n'
            'uri = "synthetic://road?seed=7&fps=5"\n'
            f'[python]\nwritable = ["{folder}"]\n'
        )
        self.daemon = Daemon(read_settings(settings, {}), [self._note])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _note(self, lane_frame: LaneFrame, _frame: object) -> None:
        self.failures.append((time.time(), lane_frame.failure))
        if lane_frame.lanes:
            self.lanes.release()

    def start(self) -> None:
        self.daemon.start(self._stop)
        (pipeline,) = self.daemon.pipelines
        pipeline.worker.deadline_s = LOOP_LIMIT_S
        self._thread.start()

    def _run(self) -> None:
        try:
            self.daemon.run(self._stop)
        except BaseException as error:  # noqa: BLE001 - the test tells
            self.failure = error

    def let_nap(self, how: str) -> None:
        """Tell the model, which reads that whole or not at all."""
        whole = self._folder / "whole"
        whole.write_text(how)
        whole.rename(self.nap)

    def wait_for_lanes(self) -> None:
        """For new ones, twice: the first may be of before."""
        for _ in range(2):
            while self.lanes.acquire(blocking=False):
                pass
            assert self.lanes.acquire(timeout=PATIENCE_S)
        assert self.failure is None

    def wait_until(self, true: Callable[[], bool]) -> None:
        wait_until(lambda: self.failure is not None or true(), PATIENCE_S)
        assert self.failure is None, self.failure

    def processes(self) -> list[str]:
        """Those of the model that have napped, in order."""
        return self.began.read_text().split() if self.began.exists() else []

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.daemon.stop()


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    made = Drive(tmp_path)
    made.start()
    yield made
    made.nap.unlink(missing_ok=True)
    made.stop()


def test_a_member_that_hangs_is_killed_and_lanes_come_again(
    drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    drive.wait_for_lanes()
    drive.let_nap("600 any")
    drive.wait_until(lambda: len(drive.processes()) == 1)
    drive.nap.unlink()
    # Longer than the loop may take for anything else.
    killed = "'execute' did not return within"
    drive.wait_until(lambda: killed in caplog.text)
    killed_at = next(each.created for each in caplog.records if killed in each.getMessage())
    # Long before the process is killed, and more than once.
    unanswered = "model 'road' has not responded for"
    told_at = [at for at, failure in drive.failures if unanswered in failure]
    assert sum(at < killed_at for at in told_at) >= 2
    drive.wait_for_lanes()
    assert drive.daemon.pipelines[0].failed_frames > 0
    assert drive.failure is None


def test_a_client_s_slow_request_to_a_shared_member_costs_frames_only(drive: Drive) -> None:
    drive.wait_for_lanes()
    with triton.InferenceServerClient(f"127.0.0.1:{drive.daemon.grpc_port}") as client:
        image = triton.InferInput("image", [1, 8, 8, 3], "UINT8")
        image.set_data_from_numpy(np.zeros((1, 8, 8, 3), np.uint8))
        drive.let_nap(f"{LOOP_LIMIT_S + 1} 8")
        answered = threading.Event()
        failures: list[object] = []

        def note(result: object, error: object) -> None:
            failures.append(error)
            answered.set()

        client.async_infer("pass_on", [image], callback=note)
        drive.wait_until(lambda: len(drive.processes()) >= 1)
        drive.nap.unlink()
        assert answered.wait(PATIENCE_S)
    assert failures == [None]
    drive.wait_for_lanes()
    assert len(drive.processes()) == 1
