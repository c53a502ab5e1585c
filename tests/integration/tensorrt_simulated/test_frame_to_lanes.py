"""The copies of a frame on its way through the shipped ensemble, as the driver sees them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.inference.registry import ModelRegistry
from edge_server.lifecycle.build import Build
from edge_server.lifecycle.lifecycle import ModelLifecycle
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.records import ModelTable
from edge_server.model_config.config import Completion
from edge_server.repository.scan import Repositories
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from support.workshop import Workshop

MODELS = Path(__file__).parents[3] / "models"


@pytest.mark.parametrize("graphs", ["true", "false"])
@pytest.mark.parametrize("integrated", [1, 0], ids=["Orin", "card"])
def test_the_plan_writes_its_rows_where_the_decoding_reads_them(
    workshop: Workshop, tmp_path: Path, integrated: int, graphs: str
) -> None:
    """On an integrated GPU nothing is copied to the host; a card sends its rows, once."""
    workshop.gpu.set(f"integrated={integrated}")
    from tensorrt.simulated_plan import SimulatedPlan

    models = tmp_path / "models"
    shutil.copytree(MODELS, models)
    network = models / "laneDetect_model"
    plan = (network / "configs" / "tensorrt.pbtxt").read_text()
    (network / "config.pbtxt").write_text(
        plan + f'parameters {{ key: "cuda_graphs" value {{ string_value: "{graphs}" }} }}'
    )
    onnx_file = (network / "1" / "model.onnx").read_bytes()
    (network / "1" / "model.plan").write_bytes(SimulatedPlan().file(onnx_file))
    registry = ModelRegistry()
    loader = RepositoryLoader(
        ModelLifecycle(ModelTable(registry), Build(devices=workshop.devices)),
        Repositories([models]),
        completion=Completion(gpus=1),
    )
    assert loader.load_all() == []
    request = InferRequest("lane_detection", {"image": Tensor(np.zeros((1, 720, 1280, 3), "u1"))})
    registry.snapshot.infer(request)
    warm = workshop.gpu.copies_to_host
    registry.snapshot.infer(request)
    assert workshop.gpu.copies_to_host - warm == 1 - integrated
    loader.close(10.0)
