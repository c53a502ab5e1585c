"""The shipped models where there is a GPU: lanes are the same, and copies are those that must be.

The GPU is simulated: its kernels run on the CPU, the network and the decoding are there anyway.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.daemon_process import Process
from support.verb import ANY_PORTS, run_verb

if TYPE_CHECKING:
    from collections.abc import Callable

    import tritonclient.grpc as triton
    from support.simulated_gpu import SimulatedGpu

    Start = Callable[..., Process]
    Client = Callable[[Process], triton.InferenceServerClient]

MODELS = Path(__file__).parents[2] / "models"
REQUESTS = 3
PLANES_BYTES = 3 * 360 * 640 * 4


@pytest.fixture
def gpu_machine(
    simulated_libcuda: SimulatedGpu, kernels_on_cpu: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Makes processes that are started from now on find a simulated GPU."""

    def be(words: str) -> None:
        for name, value in simulated_libcuda.environment(words).items():
            if os.environ.get(name) != value:
                monkeypatch.setenv(name, value)
        monkeypatch.setenv("EDGE_SIMULATED_KERNELS", str(kernels_on_cpu))

    return be


def lanes(
    client: triton.InferenceServerClient, image: triton.InferInput
) -> tuple[np.ndarray, np.ndarray]:
    answer = client.infer("lane_detection", [image])
    return answer.as_numpy("lane_points"), answer.as_numpy("lane_scores")


def copies(process: Process) -> dict[tuple[str, str, str], float]:
    """(sample, model, direction) → its value, where it is not 0."""
    return {
        (sample.name, sample.labels["model"], sample.labels["direction"]): sample.value
        for family in text_string_to_metric_families(process.metrics())
        if family.name.startswith("edge_tensor_copie")
        for sample in family.samples
        if sample.value and not sample.name.endswith("_created")
    }


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """The shipped repository, whose network stays on the CPU though there is a TensorRT."""
    models = tmp_path / "models"
    shutil.copytree(MODELS, models)
    config = models / "laneDetect_model" / "config.pbtxt"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if "preferred_configs" not in line))
    return models


class Seen(NamedTuple):
    models: Path
    image: triton.InferInput
    lanes: tuple[np.ndarray, np.ndarray]


@pytest.fixture
def seen_by_cpu(
    tmp_path: Path, client: Client, road_input: triton.InferInput, models: Path
) -> Seen:
    """What a daemon without a GPU sees."""
    folder = tmp_path / "cpu"
    folder.mkdir()
    process = Process(folder, "--model-repository", str(models))
    process.wait_for("READY=1")
    seen = Seen(models, road_input, lanes(client(process), road_input))
    assert copies(process) == {}
    process.terminate()
    process.close()
    assert len(seen.lanes[1][0]) > 0
    return seen


# An Orin's kernel reads the frame in pinned memory; a card gets a copy of it.
@pytest.mark.parametrize(
    "machine",
    ["compute=87,integrated=1,driver=12060", "compute=89,integrated=0,driver=13000"],
    ids=["Orin", "card"],
)
def test_lanes_are_those_of_the_cpu_and_only_the_networks_input_comes_back(
    start: Start,
    client: Client,
    seen_by_cpu: Seen,
    gpu_machine: Callable[[str], None],
    machine: str,
) -> None:
    gpu_machine(machine)
    on_gpu = start("--model-repository", str(seen_by_cpu.models))
    config = client(on_gpu).get_model_config("lane_preprocess").config
    (group,) = config.instance_group
    assert (group.kind, list(group.gpus)) == (group.KIND_GPU, [0])
    for _ in range(REQUESTS):
        for got, wanted in zip(
            lanes(client(on_gpu), seen_by_cpu.image), seen_by_cpu.lanes, strict=True
        ):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)
    counted = {
        ("edge_tensor_copies_total", "lane_preprocess", "to_host"): REQUESTS,
        ("edge_tensor_copied_bytes_total", "lane_preprocess", "to_host"): REQUESTS * PLANES_BYTES,
    }
    if "integrated=0" in machine:
        size = REQUESTS * int(np.prod(seen_by_cpu.image.shape()))
        counted["edge_tensor_copies_total", "lane_preprocess", "to_device"] = REQUESTS
        counted["edge_tensor_copied_bytes_total", "lane_preprocess", "to_device"] = size
    assert copies(on_gpu) == counted
    assert on_gpu.terminate() == 0


def test_a_gpu_without_room_costs_its_model_and_no_other(
    start: Start, client: Client, gpu_machine: Callable[[str], None], models: Path
) -> None:
    gpu_machine(f"memory={PLANES_BYTES // 2}")
    process = start("--model-repository", str(models), "--exit-on-error=false")
    states = {m.name: m for m in client(process).get_model_repository_index().models}
    assert states["laneDetect_model"].state == states["lane_decode"].state == "READY"
    assert states["lane_preprocess"].state == "UNAVAILABLE"
    assert (
        "instance lane_preprocess_0 cannot be made: GPU 0: allocate 2764800 bytes: cuMemAlloc "
        "failed: out of memory: fewer models, instances or smaller batches fit, or another "
        "process must give memory back"
    ) in states["lane_preprocess"].reason
    assert states["lane_detection"].state == "UNAVAILABLE"
    assert process.terminate() == 0


def test_check_proves_a_model_on_its_gpu(gpu_machine: Callable[[str], None], models: Path) -> None:
    gpu_machine(f"memory={PLANES_BYTES // 2}")
    done = run_verb("check", f"--model-repository={models}", *ANY_PORTS)
    assert done.returncode == 69
    assert "instance lane_preprocess_0 cannot be made: GPU 0: allocate" in done.stderr


def test_a_cameras_frames_go_by_the_gpu(
    start: Start, gpu_machine: Callable[[str], None], models: Path
) -> None:
    gpu_machine("compute=87,integrated=1,driver=12060")
    # READY is said once the camera's first frame has been answered.
    process = start("--model-repository", str(models), "--camera", "road=synthetic://road?fps=1")
    counted = copies(process)
    assert counted.pop(("edge_tensor_copies_total", "lane_preprocess", "to_host")) > 0
    assert counted.pop(("edge_tensor_copied_bytes_total", "lane_preprocess", "to_host")) > 0
    assert counted == {}
    assert process.terminate() == 0
