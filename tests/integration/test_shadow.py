"""A candidate for the lanes in a real daemon: its verdict and promotion, what is recorded where it
differs, and what it costs where it crashes, hangs or fills the memory.

In the quick tests the lane networks are made here with onnx: they see the same two lines in every
frame.
"""

from __future__ import annotations

import json
import os
import shutil
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from integration.delivery.verbs import models
from integration.test_mqtt_publisher import listening
from integration.test_networks import write_network
from mcap.reader import make_reader
from support.waiting import wait_until

from edge_server.mqtt.payloads import Topics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from support.daemon_process import Process
    from support.mosquitto import Mosquitto

MODELS = Path(__file__).parents[2] / "models"
TOPICS = Topics("truck-7")
ROAD = "synthetic://road?seed=7&width=320&height=180"
VERDICT_S = 100.0
ROWS = np.linspace(179, 90, 72)


def write_lane_network(repository: Path, name: str, *sides: int) -> None:
    """Write a network that sees these lines of a straight road in every frame."""
    lines = [np.stack([160 + side * (ROWS - 80), ROWS], axis=1) for side in sides]
    points = np.array([lines], np.float32).reshape(1, len(sides), 72, 2)
    scores = np.full((1, len(sides)), 0.9, np.float32)
    write_network(repository, name, {"lane_points": points, "lane_scores": scores})


# It goes well, and at the next frame it does not.
PYTHON_MODEL = """
import os
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        self.wrong = False

    def execute(self, requests):
        if self.wrong:
            {fault}
        self.wrong = True
        points = pb.Tensor("lane_points", np.zeros((1, 0, 72, 2), np.float32))
        scores = pb.Tensor("lane_scores", np.zeros((1, 0), np.float32))
        return [pb.InferenceResponse([points, scores]) for _ in requests]
"""


def write_faulty(repository: Path, name: str, fault: str) -> None:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(PYTHON_MODEL.format(fault=fault))
    (folder / "config.pbtxt").write_text(
        f'name: "{name}" backend: "python" max_batch_size: 1 '
        'input { name: "image" data_type: TYPE_UINT8 dims: [-1, -1, -1] } '
        'output { name: "lane_points" data_type: TYPE_FP32 dims: [-1, 72, 2] } '
        'output { name: "lane_scores" data_type: TYPE_FP32 dims: [-1] }'
    )


def write_settings(
    folder: Path, broker: Mosquitto, uri: str, shadows: Iterable[str], model: str = "lanes"
) -> Path:
    path = folder / "settings.toml"
    networks = "".join(
        f'[cameras.road.networks.{name}]\nmodel = "{name}"\nshadow_of = "lanes"\n'
        "deadline_ms = 1000\n"
        for name in shadows
    )
    path.write_text(
        f"""
        [repository]
        paths = ["{folder / "models"}"]
        mode = "poll"
        poll_s = 0.3
        settle_s = 0.3
        store = "{folder / "store"}"
        [device]
        id = "truck-7"
        [mqtt]
        host = "{broker.host}"
        port = {broker.port}
        [recorder]
        mode = "events"
        events = ["model"]
        directory = "{folder / "recordings"}"
        before_s = 1.0
        after_s = 1.0
        [cameras.road]
        uri = "{uri}"
        model = "{model}"
        max_age_ms = 1000
        """
        + networks
    )
    return path


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    repository = tmp_path / "models"
    (repository / "small_frames" / "1").mkdir(parents=True)
    (repository / "small_frames" / "config.pbtxt").write_text(
        'name: "small_frames" backend: "image_preprocess" max_batch_size: 1 '
        'input { name: "image" data_type: TYPE_UINT8 dims: [-1, -1, -1] } '
        'output { name: "x" data_type: TYPE_FP32 dims: [3, 36, 64] } '
        'parameters { key: "pixel_format" value { string_value: "any" } }'
    )
    return repository


def wait_for_verdict(
    broker: Mosquitto, network: str, outcome: str, log: Path, within_s: float = VERDICT_S
) -> dict[str, Any]:
    with listening(broker, TOPICS.verdict("road", network)) as inbox:

        def found() -> list[Any]:
            verdicts = [json.loads(m.payload) for m in inbox.matching(lambda m: m.payload)]
            return [each for each in verdicts if each["outcome"] == outcome]

        verdict: dict[str, Any] = wait_until(
            found,
            within_s,
            otherwise=lambda: (
                [m.payload for m in inbox.matching(lambda _: True)][-1:],
                log.read_text()[-2000:],
            ),
        )[0]
        return verdict


def promote(folder: Path, name: str) -> Any:
    return models("promote", name, "--to", folder / "models", "--store", folder / "store")


def steps_of(process: Process, model: str) -> list[str]:
    url = f"http://127.0.0.1:{process.http_port}/v2/models/{model}/config"
    with urllib.request.urlopen(url) as answer:
        steps = json.load(answer)["ensemble_scheduling"]["step"]
    return [each["model_name"] for each in steps]


def test_a_candidate_with_a_good_verdict_is_promoted_and_one_that_differs_is_recorded(
    tmp_path: Path, repository: Path, mosquitto: Mosquitto, start: Callable[..., Process]
) -> None:
    for name, sides in (("lanes", (-1, 1)), ("candidate", (-1, 1)), ("blind", (2,))):
        write_lane_network(repository, name, *sides)
    config = write_settings(tmp_path, mosquitto, f"{ROAD}&fps=0", ("candidate", "blind"))
    process = start(f"--config={config}")
    early = promote(tmp_path, "candidate")
    verdict = wait_for_verdict(mosquitto, "candidate", "good", process.log)
    assert verdict["frames"] >= 200
    # Whoever asks again later gets it at once.
    with listening(mosquitto, TOPICS.verdict("road", "candidate")) as inbox:
        assert inbox.wait_for(lambda each: each.retain)
    # Before that it had to be forced.
    assert (early.returncode, "candidate: no good verdict" in early.stderr) == (1, True)
    worse = promote(tmp_path, "blind")
    assert worse.returncode == 1
    assert "blind: no good verdict: worse: in " in worse.stderr

    done = promote(tmp_path, "candidate")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: steps_of(process, "lanes") == ["small_frames", "candidate_net"])
    with listening(mosquitto, TOPICS.lanes("road")) as inbox:
        message = inbox.wait_for(lambda m: json.loads(m.payload)["status"] == "FRAME_STATUS_OK")
    assert len(json.loads(message.payload)["lanes"]) == 2

    def recorded() -> list[Path]:
        found = (tmp_path / "recordings").glob("*-event-model-*.mcap")
        return [each for each in found if b"candidate_differs" in each.read_bytes()]

    path = wait_until(recorded, otherwise=process.log.read_text)[0]
    with path.open("rb") as file:
        summary = make_reader(file).get_summary()
    assert summary is not None
    topics = {each.topic for each in summary.channels.values()}
    # The lanes that were served, and beside them those of both candidates.
    assert topics >= {
        "/road/image",
        "/road/lanes",
        "/road/networks/blind/annotations",
        "/road/networks/candidate/results",
    }


def lanes_while_failing(process: Process, broker: Mosquitto, names: tuple[str, ...]) -> None:
    """Each candidate fails twice, and lanes miss no frame."""

    def failed() -> dict[str, float]:
        return {
            line.split('network="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
            for line in process.metrics().splitlines()
            if line.startswith("edge_network_missed_total") and 'reason="failed"' in line
        }

    with listening(broker, TOPICS.lanes("road")) as inbox:
        # Twice each: they come back, and fail again.
        wait_until(
            lambda: (
                min(failed().get(each, 0) for each in names) >= 2
                and len(inbox.matching(lambda _: True)) >= 5
            ),
            VERDICT_S,
            otherwise=process.log.read_text,
        )
        lanes = [json.loads(each.payload) for each in inbox.matching(lambda _: True)]
    numbers = [each["frame_id"] for each in lanes]
    assert numbers == list(range(numbers[0], numbers[-1] + 1)), "no frame is lost"
    assert {each["status"] for each in lanes} <= {"FRAME_STATUS_OK", "FRAME_STATUS_STALE"}
    assert {len(each["lanes"]) for each in lanes} == {2}
    assert len({each["boot_id"] for each in lanes}) == 1
    assert process.popen.poll() is None


def test_a_candidate_that_crashes_or_hangs_costs_itself_alone(
    tmp_path: Path, repository: Path, mosquitto: Mosquitto, start: Callable[..., Process]
) -> None:
    write_lane_network(repository, "lanes", -1, 1)
    write_faulty(repository, "crashes", "os._exit(5)")
    write_faulty(repository, "hangs", "while True: pass")
    config = write_settings(tmp_path, mosquitto, f"{ROAD}&fps=2", ("crashes", "hangs"))
    process = start(f"--config={config}")
    lanes_while_failing(process, mosquitto, ("crashes", "hangs"))


@pytest.fixture
def memory_limit() -> Iterator[Callable[[int], None]]:
    """Limits the memory of a process, and of those that it starts, as the service's unit does."""
    controllers = Path("/sys/fs/cgroup")
    old = (controllers / "memory").is_dir()
    group = controllers / ("memory" if old else "") / f"edge-server-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = group / ("memory.limit_in_bytes" if old else "memory.max")
        limit.write_text(str(1 << 30))
    except OSError as error:
        pytest.skip(f"no control group for memory: {error}")

    def put(pid: int) -> None:
        for each in (pid, *descendants(pid)):
            (group / "cgroup.procs").write_text(str(each))

    yield put
    wait_until(lambda: not (group / "cgroup.procs").read_text(), VERDICT_S)
    group.rmdir()


def descendants(pid: int) -> Iterator[int]:
    for each in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, each.read_text().split()):
            yield child
            yield from descendants(child)


@pytest.mark.long
def test_a_candidate_that_fills_the_memory_costs_itself_alone(
    memory_limit: Callable[[int], None],
    tmp_path: Path,
    repository: Path,
    mosquitto: Mosquitto,
    start: Callable[..., Process],
) -> None:
    write_lane_network(repository, "lanes", -1, 1)
    write_faulty(repository, "fills", "filled = [b'x' * (1 << 26) for _ in range(64)]")
    config = write_settings(tmp_path, mosquitto, f"{ROAD}&fps=5", ("fills",))
    process = start(f"--config={config}")
    memory_limit(process.popen.pid)
    lanes_while_failing(process, mosquitto, ("fills",))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_shipped_network_in_fewer_bits_gets_a_good_verdict(
    tmp_path: Path, mosquitto: Mosquitto, start: Callable[..., Process]
) -> None:
    repository = tmp_path / "models"
    shutil.copytree(MODELS, repository)
    network = repository / "candidate_net"
    (network / "1").mkdir(parents=True)
    shutil.copy(MODELS / "laneDetect_model/1/model_int8.onnx", network / "1/model.onnx")
    text = (MODELS / "laneDetect_model/config.pbtxt").read_text()
    lines = [line for line in text.splitlines() if "preferred_configs" not in line]
    (network / "config.pbtxt").write_text(
        "\n".join(lines).replace('"laneDetect_model"', '"candidate_net"')
    )
    ensemble = repository / "candidate"
    shutil.copytree(repository / "lane_detection", ensemble)
    text = (ensemble / "config.pbtxt").read_text()
    assert "laneDetect_model" in text
    (ensemble / "config.pbtxt").write_text(
        text.replace("lane_detection", "candidate").replace("laneDetect_model", "candidate_net")
    )
    uri = "synthetic://road?seed=7&fps=0&width=640&height=360"
    config = write_settings(tmp_path, mosquitto, uri, ("candidate",), "lane_detection")
    process = start(f"--config={config}")
    # Some 650 frames, which both networks see.
    verdict = wait_for_verdict(mosquitto, "candidate", "good", process.log, 500.0)
    assert {each["name"] for each in verdict["measures"]} >= {"missed lines", "extra lines"}
    done = promote(tmp_path, "candidate")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: "candidate_net" in steps_of(process, "lane_detection"))
