"""A camera's image becomes the input of a lane model, and says what its pixels are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from google.protobuf import text_format
from support.integer_colours import bgr_by_integers, random_image
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError
from edge_server.model_config.config import ModelConfig
from edge_server.pipeline.contracts import check_replacement
from edge_server.pipeline.lane_model import ImageNeeds, LaneTensors
from edge_server.pixels import Colour, ColourMatrix, ColourRange, Image, PixelFormat

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


@pytest.mark.parametrize("given", [PixelFormat.NV12, PixelFormat.I420])
@pytest.mark.parametrize("wanted", [PixelFormat.NV12, PixelFormat.I420])
def test_a_model_for_either_of_two_planar_formats_gets_the_same_pixels_from_both(
    given: PixelFormat, wanted: PixelFormat
) -> None:
    image = random_image(given, 96, 54, colour=FULL_709)
    tensor, parameters = replace(tensors(NV12), pixel_format=wanted).input_of(image)
    assert tensor.shape == (1, 81, 96)
    assert parameters == {
        "pixel_format": wanted.value,
        "color_matrix": "bt709",
        "color_range": "full",
    }
    seen = Image.of_packed(wanted, tensor.array[0][..., np.newaxis], FULL_709)
    np.testing.assert_array_equal(bgr_by_integers(seen), bgr_by_integers(image))


@pytest.mark.parametrize("given", [PixelFormat.BGR, PixelFormat.YUY2, PixelFormat.I420])
def test_a_model_for_grey_gets_the_luma_of_every_format(given: PixelFormat) -> None:
    image = random_image(given, 96, 54, colour=FULL_709)
    tensor, parameters = tensors("[-1, -1, 1]").input_of(image)
    assert tensor.shape == (1, 54, 96, 1)
    assert parameters["pixel_format"] == "grey"
    assert parameters["color_range"] == "full"
    if given is PixelFormat.BGR:
        expected = image.planes[0] @ np.array([0.114, 0.587, 0.299])
        assert np.abs(tensor.array[0, ..., 0] - expected).max() < 1
    else:
        np.testing.assert_array_equal(tensor.array[0, ..., 0], image.luma())


def test_a_model_for_nv12_gets_that_of_a_bgr_camera() -> None:
    pixels = np.full((54, 96, 3), (40, 90, 200), np.uint8)
    tensor, parameters = tensors(NV12).input_of(Image.of_bgr(pixels))
    seen = Image.of_packed(PixelFormat.NV12, tensor.array[0][..., np.newaxis])
    assert parameters["color_matrix"] == "bt601"
    assert parameters["color_range"] == "limited"
    assert np.abs(bgr_by_integers(seen).astype(int) - pixels).max() <= 2


def test_a_model_for_yuy2_alone_names_the_remedy(image: Image) -> None:
    with pytest.raises(ModelConfigError, match=r"takes yuy2 .* gives nv12; .*\[-1,-1,-1\]"):
        tensors("[-1, -1, 2]").input_of(image)
