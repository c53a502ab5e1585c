"""What an `image_preprocess` model makes of its frames, read from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edge_server.backends.parameters import Parameters, check_parameters, read_parameters
from edge_server.cuda.kernels.preprocess import MAX_SIDE_PX
from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.tensors import DataType, Tensor, TensorSpec, element_count, shape_text

if TYPE_CHECKING:
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.files import ModelFiles

# 256 MiB of floats; a network that takes more is a slip of the keyboard.
MAX_ELEMENTS = 64 * 1024 * 1024

_FLOATS = (DataType.FP32, DataType.FP16)


class ImagePreprocessParameters(Parameters, frozen=True):
    """See `image_preprocess`."""

    scale: float = 1 / 255


@dataclass(frozen=True)
class Preprocessing:
    """One model's wish; the same wherever its instances run.

    Attributes:
        image: the input's name.
        planes: the output for the network, [3,H,W].
        size: the name of the output for the frame's size; None where there is none.
        scale: what the 8-bit values are multiplied by.
        most_frames: of one batch.
        batched: tensors have a batch dimension.
    """

    image: str
    planes: TensorSpec
    size: str | None
    scale: np.float32
    most_frames: int
    batched: bool

    @staticmethod
    def of(config: ModelConfig) -> Preprocessing:
        """Of a configuration that `check_config` has seen."""
        planes, size = _planes_output(config), _size_output(config)
        assert planes is not None  # noqa: S101 - `check_config` saw to it
        return Preprocessing(
            config.inputs[0].name,
            planes,
            size.name if size else None,
            np.float32(read_parameters(config, ImagePreprocessParameters).scale),
            max(1, config.max_batch_size),
            config.max_batch_size > 0,
        )

    def frames_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """How many frames an input of that shape holds, and their height and width in px.

        Raises:
            InvalidRequest: it is empty, or a side is longer than `MAX_SIDE_PX`.
        """
        if 0 in shape:
            raise InvalidRequest(f"input '{self.image}': an image of {shape_text(shape)} is empty")
        height, width = shape[-3:-1]
        if max(height, width) > MAX_SIDE_PX:
            raise InvalidRequest(
                f"input '{self.image}': an image of {shape_text(shape)}; a side has at most "
                f"{MAX_SIDE_PX} px"
            )
        return shape[0] if self.batched else 1, height, width

    def size_tensor(self, frames: int, height: int, width: int) -> Tensor:
        """The frames' size, as many times as there are frames."""
        sizes = np.full((frames, 2), (height, width), np.int32)
        return Tensor(sizes if self.batched else sizes[0])


def check_config(files: ModelFiles, config: ModelConfig) -> None:
    """Raises: ModelConfigError: other inputs, outputs or parameters than there can be."""
    where = files.config_path
    if [(s.datatype, s.shape) for s in config.inputs] != [(DataType.UINT8, (-1, -1, 3))]:
        raise ModelConfigError(
            f"{where}: image_preprocess has one input, TYPE_UINT8 with dims [-1,-1,3]"
        )
    planes = _planes_output(config)
    if planes is None or len(config.outputs) > 2:
        raise ModelConfigError(
            f"{where}: image_preprocess has an output TYPE_FP32 or TYPE_FP16 with dims [3,H,W], "
            "and optionally one TYPE_INT32 with dims [2] for the frame's height and width"
        )
    if element_count(planes.shape) > MAX_ELEMENTS or max(planes.shape) > MAX_SIDE_PX:
        raise ModelConfigError(
            f"{where}: output '{planes.name}' of image_preprocess has dims "
            f"{shape_text(planes.shape)}; at most {MAX_ELEMENTS} elements are possible, and "
            f"{MAX_SIDE_PX} px a side"
        )
    for spec in config.outputs:
        if spec is not planes and spec != _size_output(config):
            raise ModelConfigError(
                f"{where}: output '{spec.name}' of image_preprocess: the frame's size is "
                "TYPE_INT32 with dims [2]"
            )
    check_parameters(files, config, ImagePreprocessParameters)


def _planes_output(config: ModelConfig) -> TensorSpec | None:
    for spec in config.outputs:
        if spec.datatype in _FLOATS and len(spec.shape) == 3 and spec.shape[0] == 3:
            return spec if min(spec.shape) > 0 else None
    return None


def _size_output(config: ModelConfig) -> TensorSpec | None:
    for spec in config.outputs:
        if spec.datatype is DataType.INT32 and spec.shape == (2,):
            return spec
    return None
