"""`lane_decode`: a LaneATT network's proposals become lanes in the frame's pixels.

Inputs: FP32 [anchors,77] (the network's output) and INT32 [2] (the frame's height and width, px).
Outputs: FP32 [-1,72,2], a lane's (x, y) in px of the frame at 72 rows from the bottom of the image
to its top, x = -2 where the lane has no point; and FP32 [-1], the lanes' scores. Lanes are sorted
by score; there may be none.

Parameters in config.pbtxt: `score_threshold`, `nms_threshold_px` (px of the 640-wide network
input), `max_lanes`, and `scores` (`logits` or `prob`: whether the network's first two columns
still need the softmax).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from edge_server.backends.contract import Placement, TensorModel, Tensors
from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.lanes.decode import DecodedLanes, decode_lanes
from edge_server.lanes.rows import ABSENT_X, ROWS
from edge_server.tensors import DataType, Tensor, TensorSpec

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.files import ModelFiles

_COLUMNS = 77


@dataclass(frozen=True)
class _Parameters:
    score_threshold: float
    nms_threshold_px: float
    max_lanes: int
    scores: Literal["logits", "prob"]

    @staticmethod
    def of(config: ModelConfig) -> _Parameters:
        said = dict(config.parameters)
        try:
            parameters = _Parameters(
                score_threshold=float(said.pop("score_threshold", "0.5")),
                nms_threshold_px=float(said.pop("nms_threshold_px", "50")),
                max_lanes=int(said.pop("max_lanes", "5")),
                scores=cast("Literal['logits', 'prob']", said.pop("scores", "logits")),
            )
        except ValueError as error:
            raise ModelConfigError(f"model '{config.name}': parameters: {error}") from error
        if said:
            raise ModelConfigError(
                f"model '{config.name}': unknown parameter '{next(iter(said))}'; lane_decode knows "
                "score_threshold, nms_threshold_px, max_lanes and scores"
            )
        if parameters.scores not in {"logits", "prob"}:
            raise ModelConfigError(
                f"model '{config.name}': parameter 'scores' is 'logits' or 'prob', not "
                f"'{parameters.scores}'"
            )
        return parameters

    def decode(self, proposals: NDArray[np.float32]) -> DecodedLanes:
        return decode_lanes(
            proposals,
            score_threshold=self.score_threshold,
            nms_threshold_px=self.nms_threshold_px,
            max_lanes=self.max_lanes,
            scores=self.scores,
        )


def complete(files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
    """Raises: ModelConfigError: other tensors or parameters than the module describes."""
    del version
    inputs = {(s.datatype, s.shape[1:] if len(s.shape) == 2 else s.shape) for s in config.inputs}
    outputs = {(s.datatype, s.shape) for s in config.outputs}
    if inputs != {(DataType.FP32, (_COLUMNS,)), (DataType.INT32, (2,))}:
        raise ModelConfigError(
            f"{files.config_path}: lane_decode has two inputs, TYPE_FP32 [anchors,{_COLUMNS}] and "
            "TYPE_INT32 [2] (the frame's height and width)"
        )
    if outputs != {(DataType.FP32, (-1, ROWS, 2)), (DataType.FP32, (-1,))}:
        raise ModelConfigError(
            f"{files.config_path}: lane_decode has two outputs, TYPE_FP32 [-1,{ROWS},2] (points) "
            "and TYPE_FP32 [-1] (scores)"
        )
    _Parameters.of(config)
    return config


def load(directory: Path, config: ModelConfig, placement: Placement) -> TensorModel:
    del directory, placement
    proposals = _named(config.inputs, DataType.FP32, rank=2)
    size = _named(config.inputs, DataType.INT32, rank=1)
    points = _named(config.outputs, DataType.FP32, rank=3)
    scores = _named(config.outputs, DataType.FP32, rank=1)
    parameters = _Parameters.of(config)
    batched = config.max_batch_size > 0

    def run(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        rows, frame_size = inputs[proposals].array, inputs[size].array
        if batched:
            if len(rows) != 1:
                raise InvalidRequest(
                    f"model '{config.name}': images differ in their number of lanes, so a batch "
                    "has one image"
                )
            rows, frame_size = rows[0], frame_size[0]
        lanes = parameters.decode(rows)
        made = {
            points: frame_points(lanes, height=int(frame_size[0]), width=int(frame_size[1])),
            scores: lanes.scores,
        }
        return {name: Tensor(made[name][np.newaxis] if batched else made[name]) for name in outputs}

    return TensorModel(run)


def frame_points(lanes: DecodedLanes, *, height: int, width: int) -> NDArray[np.float32]:
    """(K, 72, 2) float32 (x, y) in px of a frame of that size, x = -2 where absent."""
    points = np.empty((*lanes.x.shape, 2), np.float32)
    points[..., 0] = np.where(np.isnan(lanes.x), ABSENT_X, lanes.x * width)
    points[..., 1] = np.linspace(height, 0, ROWS, dtype=np.float32)
    return points


def _named(specs: tuple[TensorSpec, ...], datatype: DataType, rank: int) -> str:
    return next(s.name for s in specs if s.datatype is datatype and len(s.shape) == rank)
