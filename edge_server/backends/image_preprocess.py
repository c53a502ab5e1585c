"""`image_preprocess`: a camera frame becomes a network's input.

Input: one UINT8 tensor with dims [-1,-1,3] (height, width, BGR).
Outputs: one FP32 tensor with dims [3,H,W] (planes in the frame's channel order, values times
`scale`), and optionally one INT32 tensor with dims [2]: the frame's height and width in px, for
whoever has to find the way back from network to frame coordinates.

Parameters in config.pbtxt: `scale` (default 1/255).

The frame is resized bilinearly in 8 bits (OpenCV's INTER_LINEAR: sample centres at half pixels,
no antialiasing), then scaled in 32-bit floats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge_server.backends.contract import TensorModel, Tensors
from edge_server.backends.parameters import Parameters, check_parameters, read_parameters
from edge_server.backends.preprocess_cpu import scale_frame
from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.tensors import DataType, Tensor, TensorSpec, element_count, shape_text

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.cuda.devices import Devices
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.files import ModelFiles

# 256 MiB of floats; a network that takes more is a slip of the keyboard.
MAX_ELEMENTS = 64 * 1024 * 1024


class ImagePreprocessParameters(Parameters, frozen=True):
    """See the module."""

    scale: float = 1 / 255


def complete(files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
    """Raises: ModelConfigError: other inputs, outputs or parameters than the module describes."""
    del version
    where = files.config_path
    if [(s.datatype, s.shape) for s in config.inputs] != [(DataType.UINT8, (-1, -1, 3))]:
        raise ModelConfigError(
            f"{where}: image_preprocess has one input, TYPE_UINT8 with dims [-1,-1,3]"
        )
    network_input = _network_input(config)
    if network_input is None or len(config.outputs) > 2:
        raise ModelConfigError(
            f"{where}: image_preprocess has an output TYPE_FP32 with dims [3,H,W], and optionally "
            "one TYPE_INT32 with dims [2] for the frame's height and width"
        )
    if element_count(network_input.shape) > MAX_ELEMENTS:
        raise ModelConfigError(
            f"{where}: output '{network_input.name}' of image_preprocess has dims "
            f"{shape_text(network_input.shape)}; at most {MAX_ELEMENTS} elements are possible"
        )
    for spec in config.outputs:
        if spec is not network_input and spec != _size_output(config):
            raise ModelConfigError(
                f"{where}: output '{spec.name}' of image_preprocess: the frame's size is "
                "TYPE_INT32 with dims [2]"
            )
    check_parameters(files, config, ImagePreprocessParameters)
    return config


def load(directory: Path, config: ModelConfig, devices: Devices) -> TensorModel:
    del directory, devices
    image = config.inputs[0].name
    network_input = _network_input(config)
    assert network_input is not None  # noqa: S101 - `complete` saw to it
    size = _size_output(config)
    scale = np.float32(read_parameters(config, ImagePreprocessParameters).scale)
    batched = config.max_batch_size > 0

    def run(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        frames = inputs[image].array if batched else inputs[image].array[np.newaxis]
        height, width = frames.shape[1:3]
        if 0 in frames.shape:
            raise InvalidRequest(
                f"input '{image}': an image of {shape_text(frames.shape)} is empty"
            )
        made: dict[str, Tensor] = {}
        if network_input.name in outputs:
            planes = np.empty((len(frames), *network_input.shape), np.float32)
            for frame, out in zip(frames, planes, strict=True):
                scale_frame(frame, scale, out)
            made[network_input.name] = Tensor(planes if batched else planes[0])
        if size is not None and size.name in outputs:
            sizes = np.full((len(frames), 2), (height, width), np.int32)
            made[size.name] = Tensor(sizes if batched else sizes[0])
        return made

    return TensorModel(run)


def _network_input(config: ModelConfig) -> TensorSpec | None:
    for spec in config.outputs:
        if spec.datatype is DataType.FP32 and len(spec.shape) == 3 and spec.shape[0] == 3:
            return spec if min(spec.shape) > 0 else None
    return None


def _size_output(config: ModelConfig) -> TensorSpec | None:
    for spec in config.outputs:
        if spec.datatype is DataType.INT32 and spec.shape == (2,):
            return spec
    return None
