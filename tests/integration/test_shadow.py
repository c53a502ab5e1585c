"""The shipped lane network beside itself, and beside a copy with noise on its weights."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edge_server.cameras.source import open_source
from edge_server.daemon.parts import chosen_control
from edge_server.gpu.device import Devices
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelRegistry
from edge_server.inference.scheduling import Scheduling
from edge_server.pipeline.fair_shares import FairShares
from edge_server.pipeline.lane_pipeline import LanePipeline
from edge_server.pipeline.networks import NetworkPipeline
from edge_server.settings import NetworkSection, Repository
from tests.unit.pipeline.test_pipeline import OneCamera

if TYPE_CHECKING:
    from collections.abc import Iterator

MODELS = Path(__file__).parents[2] / "models"
FRAMES = 60


def write_candidate(repository: Path, name: str, noise: float) -> None:
    """Write the shipped ensemble NAME with a network of its own, whose weights have this noise."""
    network = shutil.copytree(MODELS / "laneDetect_model", repository / f"{name}_net")
    shutil.rmtree(network / "configs")
    config = (network / "config.pbtxt").read_text()
    config = re.sub(r"(?m)^parameters.*$", "", config).replace("laneDetect_model", f"{name}_net")
    (network / "config.pbtxt").write_text(config)
    model = onnx.load(network / "1/model.onnx")
    generator = np.random.default_rng(3)
    for weights in model.graph.initializer:
        array = numpy_helper.to_array(weights)
        if array.dtype == np.float32 and array.ndim == 4:
            noisy = array * (1 + noise * generator.normal(size=array.shape))
            weights.CopyFrom(numpy_helper.from_array(noisy.astype(np.float32), weights.name))
    onnx.save(model, network / "1/model.onnx")
    ensemble = shutil.copytree(MODELS / "lane_detection", repository / name)
    text = (ensemble / "config.pbtxt").read_text()
    text = text.replace("laneDetect_model", f"{name}_net").replace("lane_detection", name)
    (ensemble / "config.pbtxt").write_text(text)


@pytest.fixture(scope="module")
def data_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlane]:
    repository = tmp_path_factory.mktemp("candidates")
    write_candidate(repository, "noisy", 2.0)
    registry, scheduling = ModelRegistry(), Scheduling()
    settings = Repository(paths=(str(MODELS), str(repository)))
    control = chosen_control(registry, scheduling, Devices(), settings)
    control.start()
    yield DataPlane(registry)
    control.close(30.0)
    scheduling.close()


@pytest.mark.parametrize(
    ("candidate", "outcome"), [("lane_detection", "watching"), ("noisy", "worse")]
)
def test_the_lane_network_agrees_with_itself_and_not_with_a_degraded_copy(
    data_plane: DataPlane, candidate: str, outcome: str
) -> None:
    section = NetworkSection(candidate, shadow_of="lanes", deadline_ms=10_000)
    network = NetworkPipeline(
        "road", "new", section, data_plane, [], shares=FairShares(), served="lane_detection"
    )
    camera = OneCamera()
    pipeline = LanePipeline(
        camera,  # type: ignore[arg-type]
        data_plane,
        "lane_detection",
        [],
        max_age_ms=10_000,
        networks=[network],
    )
    source = open_source("synthetic://road?seed=7&fps=0")
    for _ in range(FRAMES):
        frame = source.read()
        assert frame is not None
        camera._frames.append(frame)
        network._due_s = 0.0
        pipeline.tick(0.0)
        network.tick(0.0)
    source.close()
    verdict = network._agreement.verdict()
    assert verdict.frames == FRAMES
    assert verdict.outcome == outcome, " ".join(map(str, verdict.measures))
    if candidate == "lane_detection":
        measures = {each.name: each.value for each in verdict.measures}
        assert measures["missed lines"] == measures["distance, of the width"] == 0
