"""A frame of any size becomes the network's input; its size goes along."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.backends.vision.preprocessing import (
    HALVES,
    IMAGE,
    NETWORK,
    PLACES,
    SIZE,
    Preprocess,
    by_opencv,
    config,
    frames,
)

from edge_server.backends.vision.preprocess_cpu import scale_frame
from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.pixels import Image

if TYPE_CHECKING:
    from edge_server.gpu.device import Devices


@PLACES
def test_output_is_planar_scaled_and_in_the_frames_channel_order(
    devices: Devices, group: str
) -> None:
    image = np.empty((1, 90, 160, 3), np.uint8)
    image[...] = (10, 20, 255)
    made = Preprocess(config(IMAGE + NETWORK + SIZE + group), devices).run(image)
    assert made["input"].shape == (1, 3, 36, 64)
    assert made["input"].dtype == np.float32
    for plane, value in zip(made["input"][0], (10, 20, 255), strict=True):
        np.testing.assert_allclose(plane, value / 255, rtol=1e-6)
    np.testing.assert_array_equal(made["size"], [[90, 160]])


@PLACES
def test_without_a_batch_dimension_there_is_none_in_the_outputs(
    devices: Devices, group: str
) -> None:
    model = Preprocess(config(IMAGE + NETWORK + SIZE + group, batch=0), devices)
    made = model.run(frames(1, 9, 16)[0])
    np.testing.assert_array_equal(made["input"], by_opencv(frames(1, 9, 16))[0])
    assert made["size"].tolist() == [9, 16]


@PLACES
def test_a_network_may_want_halves(devices: Devices, group: str) -> None:
    image = frames(1, 45, 77)
    made = Preprocess(config(IMAGE + HALVES + group), devices).run(image)
    assert made["input"].dtype == np.float16
    np.testing.assert_array_equal(made["input"], by_opencv(image, np.float16))


@PLACES
def test_only_what_is_wanted_is_made(devices: Devices, group: str) -> None:
    model = Preprocess(config(IMAGE + NETWORK + SIZE + group), devices)
    assert list(model.run(frames(1, 9, 16), "size")) == ["size"]
    assert list(model.run(frames(1, 9, 16), "input")) == ["input"]


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
    scale_frame(Image.of_bgr(image), np.float32(1 / 255), out)
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
    with pytest.raises(ModelConfigError, match="32767 px a side"):
        config(IMAGE + 'output { name: "input" data_type: TYPE_FP32 dims: [3, 1, 32768] }')


def test_a_batch_has_a_bound_in_bytes() -> None:
    output = 'output { name: "input" data_type: TYPE_FP32 dims: [3, 1024, 1024] }'
    config(IMAGE + output, batch=85)
    with pytest.raises(ModelConfigError, match="takes 1082130432 bytes for a batch"):
        config(IMAGE + output, batch=86)


@PLACES
def test_an_empty_image_is_the_callers_fault(devices: Devices, group: str) -> None:
    model = Preprocess(config(IMAGE + NETWORK + group), devices)
    with pytest.raises(InvalidRequest, match="is empty"):
        model.run(np.zeros((1, 0, 5, 3), np.uint8))


@PLACES
def test_a_side_beyond_16_bits_is_the_callers_fault(devices: Devices, group: str) -> None:
    model = Preprocess(config(IMAGE + NETWORK + group), devices)
    with pytest.raises(InvalidRequest, match=r"\[1,2,32768,3\]; a side has at most 32767 px"):
        model.run(np.zeros((1, 2, 32768, 3), np.uint8))
    assert not model.run(np.zeros((1, 2, 32767, 3), np.uint8))["input"].any()
