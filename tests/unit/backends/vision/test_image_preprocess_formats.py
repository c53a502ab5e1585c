"""Pixel formats, crops and lenses in whole numbers (support.integer_colours), on both places."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.integer_colours import bgr_by_integers, random_image
from unit.backends.vision.preprocessing import (
    GPU,
    HALVES,
    IMAGE,
    NETWORK,
    PLACES,
    SIZE,
    Preprocess,
    config,
    parameter,
)

from edge_server.backends.vision.image_preprocess_config import UndistortionMap
from edge_server.errors import InvalidRequest, ModelConfigError, Unavailable
from edge_server.pixels import Colour, ColourMatrix, ColourRange, CropRegion, Image, PixelFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from support.simulated_gpu import SimulatedGpu

    from edge_server.gpu.device import Devices

FORMATS = pytest.mark.parametrize("pixel_format", [each.value for each in PixelFormat])
PLANAR = 'input { name: "image" data_type: TYPE_UINT8 dims: [-1, -1] }'
INPUTS = {
    "bgr": IMAGE,
    "grey": 'input { name: "image" data_type: TYPE_UINT8 dims: [-1, -1, 1] }',
    "yuy2": 'input { name: "image" data_type: TYPE_UINT8 dims: [-1, -1, 2] }',
    "nv12": PLANAR,
    "i420": PLANAR,
}
# Other than what a model takes where nothing is said.
COLOUR = Colour(ColourMatrix.BT709, ColourRange.FULL)
COLOURED = parameter("color_matrix", "bt709") + parameter("color_range", "full")
CROP = parameter("crop", "13,7,101,50")
MATRIX = np.array([[150.0, 0, 83], [0, 140, 41], [0, 0, 1]])
DISTORTION = np.array([-0.31, 0.12, 0.003, -0.002, -0.02])
LENS = (
    parameter("camera_matrix", "150,140,83,41")
    + parameter("distortion", "-0.31,0.12,0.003,-0.002,-0.02")
    + parameter("calibrated_size", "160x90")
)


def model_text(pixel_format: str, *more: str) -> str:
    return (
        INPUTS[pixel_format]
        + parameter("pixel_format", pixel_format)
        + COLOURED
        + SIZE
        + "".join(more)
    )


NV12, YUY2 = (INPUTS[each] + parameter("pixel_format", each) for each in ("nv12", "yuy2"))


def camera_frames(
    pixel_format: str, count: int = 1, height: int = 90, width: int = 160, colour: Colour = COLOUR
) -> tuple[NDArray[np.uint8], list[Image]]:
    """As a model for that format alone takes them, and as images."""
    images = [
        random_image(PixelFormat(pixel_format), width, height, seed, colour)
        for seed in range(count)
    ]
    frames = np.stack([image.packed() for image in images])
    return frames.squeeze(-1) if images[0].pixel_format.is_subsampled else frames, images


def by_integers(
    images: Sequence[Image],
    dtype: type[np.floating] = np.float32,
    region: CropRegion | None = None,
    lens: UndistortionMap | None = None,
) -> NDArray[np.floating]:
    """(frames, 3, 36, 64)."""
    bgr = np.stack([bgr_by_integers(image, 64, 36, region, lens) for image in images])
    return (bgr.transpose(0, 3, 1, 2) * np.float32(1 / 255)).astype(dtype)


@PLACES
@FORMATS
def test_any_format_gives_what_its_bgr_gives(
    devices: Devices, group: str, pixel_format: str
) -> None:
    # More frames than one launch of the kernel takes.
    frames, images = camera_frames(pixel_format, 18)
    text = model_text(pixel_format, HALVES, group)
    made = Preprocess(config(text, batch=18), devices).run(frames)
    np.testing.assert_array_equal(made["input"], by_integers(images, np.float16))
    assert made["size"].tolist() == [[90, 160]] * 18


@PLACES
@FORMATS
def test_formats_without_a_batch_dimension(devices: Devices, group: str, pixel_format: str) -> None:
    frames, images = camera_frames(pixel_format)
    text = model_text(pixel_format, NETWORK, group)
    made = Preprocess(config(text, batch=0), devices).run(frames[0])
    np.testing.assert_array_equal(made["input"], by_integers(images)[0])
    assert made["size"].tolist() == [90, 160]


@PLACES
@FORMATS
def test_a_crop_is_all_the_network_sees_and_its_size_is_told(
    devices: Devices, group: str, pixel_format: str
) -> None:
    frames, images = camera_frames(pixel_format, 2)
    text = model_text(pixel_format, NETWORK, CROP, group)
    made = Preprocess(config(text, batch=2), devices).run(frames)
    expected = by_integers(images, region=CropRegion(13, 7, 101, 50))
    np.testing.assert_array_equal(made["input"], expected)
    assert made["size"].tolist() == [[50, 101]] * 2


@PLACES
@FORMATS
@pytest.mark.parametrize("crop", ["", CROP], ids=["all", "crop"])
def test_a_lens_is_undone_crop_and_resize_in_the_same_interpolation(
    devices: Devices, group: str, pixel_format: str, crop: str
) -> None:
    frames, images = camera_frames(pixel_format, 2)
    text = model_text(pixel_format, NETWORK, LENS, crop, group)
    made = Preprocess(config(text, batch=2), devices).run(frames)
    x, y, width, height = (13, 7, 101, 50) if crop else (0, 0, 160, 90)
    # Column i of the network shows the undistorted frame at (i + 0.5) * step - 0.5 + x.
    step_x, step_y = width / 64, height / 36
    to_frame = [[step_x, 0, step_x / 2 - 0.5 + x], [0, step_y, step_y / 2 - 0.5 + y], [0, 0, 1]]
    network = np.linalg.inv(to_frame) @ MATRIX
    maps = cv2.initUndistortRectifyMap(MATRIX, DISTORTION, None, network, (64, 36), cv2.CV_16SC2)
    expected = by_integers(images, lens=UndistortionMap(*maps))
    np.testing.assert_array_equal(made["input"], expected)
    assert made["size"].tolist() == [[height, width]] * 2


@PLACES
def test_a_lens_without_distortion_changes_nothing(devices: Devices, group: str) -> None:
    frames, images = camera_frames("bgr", 1, 36, 64)
    straight = (
        parameter("camera_matrix", "70,70,32,18")
        + parameter("distortion", "0,0,0,0")
        + parameter("calibrated_size", "64x36")
    )
    made = Preprocess(config(model_text("bgr", NETWORK, straight, group)), devices).run(frames)
    np.testing.assert_array_equal(made["input"], by_integers(images))


@PLACES
@pytest.mark.parametrize(
    ("text", "shape", "says"),
    [
        (NV12, (91, 64), "H rows of luma and then H/2 of chroma, H even"),
        (NV12, (90, 63), "the width of nv12 frames is even"),
        (NV12, (0, 64), r"an image of \[1,0,64\] is empty"),
        (NV12, (3, 32768), "a side has at most 32767 px"),
        (YUY2, (90, 63, 2), r"an image of \[1,90,63,2\]; the width of yuy2 frames is even"),
        (
            IMAGE + CROP,
            (56, 160, 3),
            "a frame of 160x56 px does not contain the model's crop, 101x50 px at 13,7",
        ),
        (NV12 + CROP, (84, 160), "a frame of 160x56 px does not contain the model's crop"),
        (
            IMAGE + LENS,
            (180, 320, 3),
            "a frame of 320x180 px cannot be undistorted with a calibration for 160x90; send frames"
            " of that size, or calibrate with this one",
        ),
    ],
)
def test_a_frame_that_does_not_fit_is_the_callers_fault(
    devices: Devices, group: str, text: str, shape: tuple[int, ...], says: str
) -> None:
    model = Preprocess(config(text + NETWORK + group), devices)
    with pytest.raises(InvalidRequest, match=f"^input 'image': .*{says}"):
        model.run(np.zeros((1, *shape), np.uint8))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            parameter("pixel_format", "rgb"),
            "'pixel_format' is 'rgb'; it is one of bgr, grey, yuy2, nv12, i420, any",
        ),
        (
            parameter("color_matrix", "bt2020"),
            "'color_matrix' is 'bt2020'; it is one of bt601, bt709",
        ),
        (parameter("color_range", "tv"), "'color_range' is 'tv'; it is one of limited, full"),
        (parameter("crop", "1,2,3"), "'crop' is '1,2,3'; it is x,y,width,height in px"),
        (parameter("crop", "0,0,0,9"), "'crop' is '0,0,0,9'"),
        (parameter("crop", "0,0,9," + "9" * 400), "it is x,y,width,height in px"),
        (parameter("crop", "-1,0,9,9"), "'crop' is '-1,0,9,9'"),
        (parameter("crop", "30000,0,3000,9"), "ends within 32767 px"),
        (
            parameter("camera_matrix", "9,9,5,5"),
            "'distortion' is missing; undistortion takes 'camera_matrix', 'distortion' and "
            "'calibrated_size' together, or none of them",
        ),
        (
            LENS + parameter("crop", "0,0,161,90"),
            "'crop' is '0,0,161,90', which is not within the undistorted frame of 160x90 px",
        ),
        (parameter("pixel_formt", "bgr"), "backend 'image_preprocess' knows: scale, pixel_format"),
        (
            parameter("pixel_format", "nv12"),
            "one input, TYPE_UINT8 with dims [-1,-1] for pixel_format nv12",
        ),
    ],
)
def test_parameters_that_cannot_be_are_refused_with_the_remedy(more: str, says: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        config(IMAGE + NETWORK + more)
    assert says in str(caught.value)
    assert str(caught.value).startswith("p/config.pbtxt: ")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("camera_matrix", "150,140,83", "it is fx,fy,cx,cy"),
        ("camera_matrix", "0,140,83,41", "fx and fy more than 0"),
        ("camera_matrix", "150,nan,83,41", "it is fx,fy,cx,cy"),
        ("distortion", "1,2,3", "it is k1,k2,p1,p2[,k3[,k4,k5,k6"),
        ("distortion", "1,2,3,inf", "as cv2.calibrateCamera gives them"),
        ("calibrated_size", "1920*1080", "for example 1920x1080"),
        ("calibrated_size", "0x1080", "'calibrated_size' is '0x1080'"),
        ("calibrated_size", "161x90", "the width of nv12 frames is even"),
        ("calibrated_size", "160x91", "the height of nv12 frames is even"),
    ],
)
def test_a_calibration_that_cannot_be_is_refused(key: str, value: str, says: str) -> None:
    given = {"camera_matrix": "9,9,5,5", "distortion": "0,0,0,0", "calibrated_size": "160x90"}
    lens = "".join(parameter(*each) for each in {**given, key: value}.items())
    with pytest.raises(ModelConfigError) as caught:
        config(model_text("nv12", NETWORK, lens))
    assert f"parameters: '{key}' is '{value}'" in str(caught.value)
    assert says in str(caught.value)


@given(
    st.sampled_from(["crop", "camera_matrix", "distortion", "calibrated_size", "pixel_format"]),
    st.text("0123456789,.x-e ", max_size=20) | st.sampled_from(["inf,nan,1,1", "1e999,1,1,1"]),
)
def test_any_text_is_a_parameter_or_a_clear_refusal(key: str, value: str) -> None:
    given = {"camera_matrix": "9,9,5,5", "distortion": "0,0,0,0", "calibrated_size": "160x90"}
    text = "".join(parameter(*each) for each in {**given, key: value}.items())
    said = f"'{key}' is "
    try:
        config(IMAGE + NETWORK + text)
    except ModelConfigError as error:
        said = str(error)
    assert f"'{key}' is " in said


def test_a_gpu_without_memory_for_a_map_makes_no_instance(
    devices: Devices, simulated_gpu: SimulatedGpu
) -> None:
    # Room for the output of 27648 bytes, and not for the map of 6 bytes a pixel.
    simulated_gpu.set("memory=33000")
    Preprocess(config(model_text("bgr", NETWORK, GPU)), devices).close()
    with pytest.raises(Unavailable, match=r"^instance p_0 cannot be made: .* allocate 9216 bytes"):
        Preprocess(config(model_text("bgr", NETWORK, LENS, GPU)), devices)


def test_a_map_goes_with_its_instance(devices: Devices, simulated_gpu: SimulatedGpu) -> None:
    model = Preprocess(config(model_text("yuy2", NETWORK, LENS, GPU)), devices)
    model.run(camera_frames("yuy2")[0])
    assert simulated_gpu.device_bytes > 0
    model.close()
    del model
    assert simulated_gpu.comes_to(0)
