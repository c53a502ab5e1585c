"""`lane_decode`: a LaneATT network's proposals become lanes in the frame's pixels.

Inputs: FP32 [anchors,77] (the network's output) and INT32 [2] (the frame's height and width, px).
Outputs: FP32 [-1,72,2], a lane's (x, y) in px of the frame at 72 rows from the bottom of the image
to its top, x = -2 where the lane has no point; and FP32 [-1], the lanes' scores. Lanes are sorted
by score; there may be none.

Parameters in config.pbtxt: `score_threshold`, `nms_threshold_px` (px of the 640-wide network
input), `max_lanes`, and `scores` (`logits` or `prob`: whether the network's first two columns
still need the softmax). `confidence_temperature` and `confidence_bias` make a probability of each
score that is given out; the threshold, the suppression and the order use the network's own.
`training/calibrate_confidence.py` finds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np

from edge_server.backends.contract import (
    BackendParameters,
    TensorModel,
    Tensors,
    check_parameters,
    parameters_of,
)
from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.lanes.decode import (
    COLUMN_COUNT,
    ROW_COUNT,
    DecodedLanes,
    calibrated_confidence,
    decode_lanes,
)
from edge_server.lanes.types import ABSENT_X
from edge_server.tensors import DataType, Tensor, TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.backends.contract import LoadContext
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.files import ModelFiles

# The rows of a lane, from the bottom of the image to its top.
_UPWARDS = np.linspace(1.0, 0.0, ROW_COUNT)


class LaneDecodeParameters(BackendParameters, frozen=True):
    """The parameters of the module docstring; default thresholds are LaneATT's for CULane."""

    score_threshold: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.5
    nms_threshold_px: Annotated[float, msgspec.Meta(ge=0)] = 50.0
    max_lanes: Annotated[int, msgspec.Meta(ge=1)] = 4
    scores: Literal["logits", "prob"] = "logits"
    confidence_temperature: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    confidence_bias: Annotated[float, msgspec.Meta(ge=-60, le=60)] = 0.0


def complete(files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
    del version
    inputs = {(s.datatype, len(s.shape), s.shape[-1:]) for s in config.inputs}
    outputs = {(s.datatype, s.shape) for s in config.outputs}
    if inputs != {(DataType.FP32, 2, (COLUMN_COUNT,)), (DataType.INT32, 1, (2,))}:
        raise ModelConfigError(
            f"{files.config_path}: lane_decode has two inputs, TYPE_FP32 [anchors,{COLUMN_COUNT}] "
            "and TYPE_INT32 [2] (the frame's height and width)"
        )
    if outputs != {(DataType.FP32, (-1, ROW_COUNT, 2)), (DataType.FP32, (-1,))}:
        raise ModelConfigError(
            f"{files.config_path}: lane_decode has two outputs, TYPE_FP32 [-1,{ROW_COUNT},2] "
            "(points) and TYPE_FP32 [-1] (scores)"
        )
    check_parameters(files, config, LaneDecodeParameters)
    return config


def load(context: LoadContext) -> TensorModel:
    config = context.config
    proposals = _named(config.inputs, DataType.FP32, rank=2)
    size = _named(config.inputs, DataType.INT32, rank=1)
    points = _named(config.outputs, DataType.FP32, rank=3)
    scores = _named(config.outputs, DataType.FP32, rank=1)
    parameters = parameters_of(config, LaneDecodeParameters)
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
        lanes = decode_lanes(
            rows,
            score_threshold=parameters.score_threshold,
            nms_threshold_px=parameters.nms_threshold_px,
            max_lanes=parameters.max_lanes,
            scores=parameters.scores,
        )
        made = {
            points: frame_points(lanes, height=int(frame_size[0]), width=int(frame_size[1])),
            scores: calibrated_confidence(
                lanes.scores, parameters.confidence_temperature, parameters.confidence_bias
            ),
        }
        return {name: Tensor(made[name][np.newaxis] if batched else made[name]) for name in outputs}

    return TensorModel(run)


def frame_points(lanes: DecodedLanes, *, height: int, width: int) -> NDArray[np.float32]:
    """Return (K, 72, 2) float32 (x, y) in px of a frame of that size, x = -2 where absent."""
    points = np.empty((*lanes.x.shape, 2), np.float32)
    points[..., 0] = np.where(np.isnan(lanes.x), ABSENT_X, lanes.x * np.float32(width))
    points[..., 1] = _UPWARDS * height
    return points


def _named(specs: tuple[TensorSpec, ...], datatype: DataType, rank: int) -> str:
    return next(s.name for s in specs if s.datatype is datatype and len(s.shape) == rank)
