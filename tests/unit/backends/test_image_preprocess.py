"""A frame of any size becomes the network's input; its size goes along."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends import image_preprocess
from edge_server.backends.preprocess_cpu import scale_frame
from edge_server.cuda.devices import Devices
from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.files import ModelFiles
from edge_server.tensors import Tensor

FILES = ModelFiles("p", Path("p"), {1: Path("p/1")})
IMAGE = 'input { name: "image" data_type: TYPE_UINT8 dims: [-1, -1, 3] }'
NETWORK = 'output { name: "input" data_type: TYPE_FP32 dims: [3, 36, 64] }'
SIZE = 'output { name: "size" data_type: TYPE_INT32 dims: [2] }'


def config(text: str, batch: int = 1) -> ModelConfig:
    head = f'name: "p" backend: "image_preprocess" max_batch_size: {batch} '
    message = text_format.Parse(head + text, pb.ModelConfig())
    return image_preprocess.complete(FILES, 1, ModelConfig.of(message))


def run(model_config: ModelConfig, image: np.ndarray) -> dict[str, np.ndarray]:
    model = image_preprocess.load(Path("p/1"), model_config, Devices())
    names = frozenset(spec.name for spec in model_config.outputs)
    answer = model._run({"image": Tensor(image)}, names)
    return {name: tensor.array for name, tensor in answer.items()}


def test_output_is_planar_scaled_and_in_the_frames_channel_order() -> None:
    image = np.empty((1, 90, 160, 3), np.uint8)
    image[...] = (10, 20, 255)
    made = run(config(IMAGE + NETWORK + SIZE), image)
    assert made["input"].shape == (1, 3, 36, 64)
    assert made["input"].dtype == np.float32
    for plane, value in zip(made["input"][0], (10, 20, 255), strict=True):
        np.testing.assert_allclose(plane, value / 255, rtol=1e-6)
    np.testing.assert_array_equal(made["size"], [[90, 160]])


def test_without_a_batch_dimension_there_is_none_in_the_outputs() -> None:
    made = run(config(IMAGE + NETWORK + SIZE, batch=0), np.zeros((9, 16, 3), np.uint8))
    assert made["input"].shape == (3, 36, 64)
    assert made["size"].tolist() == [9, 16]


def bilinear(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """The textbook: sample centres at half pixels, edges repeated, no antialiasing."""
    rows = np.clip((np.arange(height) + 0.5) * image.shape[0] / height - 0.5, 0, None)
    columns = np.clip((np.arange(width) + 0.5) * image.shape[1] / width - 0.5, 0, None)
    y0, x0 = rows.astype(int), columns.astype(int)
    y1, x1 = np.minimum(y0 + 1, image.shape[0] - 1), np.minimum(x0 + 1, image.shape[1] - 1)
    wy, wx = (rows - y0)[:, None, None], (columns - x0)[None, :, None]
    values = image.astype(np.float64)
    top = values[y0][:, x0] * (1 - wx) + values[y0][:, x1] * wx
    bottom = values[y1][:, x0] * (1 - wx) + values[y1][:, x1] * wx
    return top * (1 - wy) + bottom * wy


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 90), st.integers(2, 90), st.integers(0, 2**31))
def test_resize_is_the_textbooks_bilinear_within_one_grey_level(
    height: int, width: int, seed: int
) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    out = np.empty((3, 36, 64), np.float32)
    scale_frame(image, np.float32(1 / 255), out)
    expected = bilinear(image, 36, 64).transpose(2, 0, 1) / 255
    assert np.abs(out - expected).max() <= 1 / 255 + 1e-6


@pytest.mark.parametrize(
    "text",
    [
        NETWORK,
        IMAGE,
        IMAGE + SIZE,
        IMAGE + NETWORK + 'output { name: "size" data_type: TYPE_INT32 dims: [3] }',
        'input { name: "image" data_type: TYPE_UINT8 dims: [3, -1, -1] }' + NETWORK,
        IMAGE + NETWORK + 'parameters { key: "scale" value { string_value: "much" } }',
    ],
)
def test_other_tensors_or_parameters_are_refused(text: str) -> None:
    with pytest.raises(ModelConfigError, match=r"^p/config.pbtxt: "):
        config(text)


def test_the_largest_network_input_has_64_mi_elements() -> None:
    config(IMAGE + 'output { name: "input" data_type: TYPE_FP32 dims: [3, 4096, 5461] }')
    with pytest.raises(ModelConfigError, match="at most 67108864 elements"):
        config(IMAGE + 'output { name: "input" data_type: TYPE_FP32 dims: [3, 4096, 5462] }')


def test_an_empty_image_is_the_callers_fault() -> None:
    with pytest.raises(InvalidRequest, match="is empty"):
        run(config(IMAGE + NETWORK), np.zeros((1, 0, 5, 3), np.uint8))
