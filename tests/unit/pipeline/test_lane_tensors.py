"""A camera's image becomes the input of a lane model, and says what its pixels are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from google.protobuf import text_format
from integer_colours import bgr_by_integers, random_image
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError
from edge_server.model_config.config import ModelConfig
from edge_server.pipeline.lane_tensors import ImageNeeds, LaneTensors, check_replacement
from edge_server.pixels import Colour, ColourMatrix, ColourRange, PixelFormat

if TYPE_CHECKING:
    from edge_server.pixels import Image

FULL_709 = Colour(ColourMatrix.BT709, ColourRange.FULL)


def config(dims: str) -> ModelConfig:
    text = (
        f'name: "lanes" max_batch_size: 1 input {{ name: "i" data_type: TYPE_UINT8 dims: {dims} }} '
        'output { name: "p" data_type: TYPE_FP32 dims: [-1, 72, 2] } '
        'output { name: "s" data_type: TYPE_FP32 dims: [-1] }'
    )
    return ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))


def tensors(dims: str) -> LaneTensors:
    return LaneTensors.of(config(dims))


@pytest.fixture
def image() -> Image:
    return random_image(PixelFormat.NV12, 96, 54, colour=FULL_709)


def test_a_model_for_any_format_gets_the_cameras_own(image: Image) -> None:
    tensor, parameters = tensors("[-1, -1, -1]").input_of(image)
    np.testing.assert_array_equal(tensor.array, image.packed()[np.newaxis])
    assert np.shares_memory(tensor.array, image.planes[0])
    assert parameters == {
        "pixel_format": "nv12",
        "color_matrix": "bt709",
        "color_range": "full",
    }


def test_a_model_for_one_format_is_told_format_and_colours(image: Image) -> None:
    """A model for I420 has the dims of one for NV12: it can refuse what it does not take."""
    tensor, parameters = tensors("[-1, -1]").input_of(image)
    assert tensor.shape == (1, 81, 96)
    assert parameters["pixel_format"] == "nv12"
    assert parameters["color_range"] == "full"


def test_a_model_for_bgr_gets_bgr(image: Image) -> None:
    tensor, parameters = tensors("[-1, -1, 3]").input_of(image)
    np.testing.assert_array_equal(tensor.array, bgr_by_integers(image)[np.newaxis])
    assert parameters["pixel_format"] == "bgr"


ANY, BGR, NV12 = "[-1, -1, -1]", "[-1, -1, 3]", "[-1, -1]"


@pytest.mark.parametrize(
    ("old", "new"), [(ANY, BGR), (BGR, ANY), (NV12, ANY), (NV12, BGR), (NV12, NV12)]
)
def test_a_model_may_follow_one_whose_images_it_takes(old: str, new: str) -> None:
    check_replacement(config(old), config(new))


@pytest.mark.parametrize("old", [ANY, BGR, "[-1, -1, 2]"])
def test_a_model_for_another_format_alone_may_not_follow(old: str) -> None:
    with pytest.raises(ModelConfigError, match=r"takes nv12 images alone.*dims \[-1,-1,-1\]"):
        check_replacement(config(old), config(NV12))


def preprocess(parameters: str = "", backend: str = "image_preprocess") -> ModelConfig:
    text = (
        f'name: "scale" backend: "{backend}" max_batch_size: 1 '
        'input { name: "i" data_type: TYPE_UINT8 dims: [-1, -1, -1] } '
        'output { name: "o" data_type: TYPE_FP32 dims: [3, 360, 640] } ' + parameters
    )
    return ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }} '


def test_a_model_needs_no_larger_images_than_it_makes_of_them() -> None:
    anyone = parameter("pixel_format", "any")
    assert ImageNeeds.of(preprocess(anyone)) == ImageNeeds(None, (640, 360))
    assert ImageNeeds.of(preprocess(backend="python")) == ImageNeeds()


def test_a_region_in_px_needs_whole_images() -> None:
    crop = parameter("pixel_format", "any") + parameter("crop", "0,360,1920,720")
    assert ImageNeeds.of(preprocess(crop)).size is None


def test_the_step_that_takes_the_image_is_found_in_an_ensemble() -> None:
    text = (
        'name: "lanes" platform: "ensemble" max_batch_size: 1 '
        'input { name: "i" data_type: TYPE_UINT8 dims: [-1, -1, -1] } '
        'output { name: "p" data_type: TYPE_FP32 dims: [-1, 72, 2] } '
        'output { name: "s" data_type: TYPE_FP32 dims: [-1] } ensemble_scheduling { '
        'step { model_name: "scale" model_version: -1 '
        '  input_map { key: "x" value: "i" } output_map { key: "o" value: "m" } } '
        'step { model_name: "network" model_version: -1 input_map { key: "m" value: "m" } '
        '  output_map { key: "p" value: "p" } output_map { key: "s" value: "s" } } }'
    )
    ensemble = ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))
    assert LaneTensors.of(ensemble).step_of(ensemble) == "scale"
    assert tensors(ANY).step_of(config(ANY)) == ""
