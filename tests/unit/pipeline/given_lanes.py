"""A lane model that gives the same lanes for any image, and what serves it."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.contract import TensorModel
from edge_server.cameras.frame import Frame
from edge_server.errors import InternalError
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelEntry, ModelRegistry, ModelState
from edge_server.inference.scheduling import Scheduling
from edge_server.model_config.config import ModelConfig
from edge_server.pixels import Image
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.backends.contract import Run, Tensors

# On a busy machine a frame may be old when its turn comes: of a pipeline whose test is about
# something else.
OF_ANY_AGE_MS = 60_000
LANES = np.full((1, 2, 72, 2), -2, np.float32)
LANES[0, 0, 10:20] = 100
LANES[0, 1, 5] = 7  # a single point is no lane


class GivenLanes:
    """Gives LANES for any image, or fails while `broken`."""

    def __init__(self) -> None:
        self.broken = False

    def run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        if self.broken:
            raise InternalError("broken")
        return {
            "lane_points": Tensor(LANES),
            "lane_scores": Tensor(np.array([[0.9, 0.8]], np.float32)),
        }


def data_plane(
    model: GivenLanes,
    rows: int = 72,
    dims: str = "[-1, -1, 3]",
    networks: Mapping[str, tuple[str, Run]] = MappingProxyType({}),
) -> DataPlane:
    """Serve the lane model, and other networks: the outputs in their configurations, and what
    gives them."""
    text = (
        'name: "lane_detection" backend: "identity" max_batch_size: 1 instance_group { count: 1 } '
        f'input {{ name: "image" data_type: TYPE_UINT8 dims: {dims} }} '
        f'output {{ name: "lane_points" data_type: TYPE_FP32 dims: [-1, {rows}, 2] }} '
        'output { name: "lane_scores" data_type: TYPE_FP32 dims: -1 } '
    )
    config = ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))
    registry = ModelRegistry()
    loaded = Scheduling().model(config, 4, TensorModel(model.run))
    for name, (outputs, run) in networks.items():
        text = (
            f'name: "{name}" backend: "identity" max_batch_size: 1 instance_group {{ count: 1 }} '
            f'input {{ name: "image" data_type: TYPE_UINT8 dims: {dims} }} {outputs}'
        )
        made = ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))
        of_network = Scheduling().model(made, 1, TensorModel(run))
        registry.replace(name, [ModelEntry(name, 1, ModelState.READY, loaded=of_network)])
    registry.replace(
        "lane_detection", [ModelEntry("lane_detection", 4, ModelState.READY, loaded=loaded)]
    )
    return DataPlane(registry)


def frame(number: int) -> Frame:
    return Frame.arrived(number, Image.of_bgr(np.zeros((9, 16, 3), np.uint8)))
