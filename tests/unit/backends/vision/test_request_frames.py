"""A model for any pixel format: each request says what its frames are, on both places."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from support.integer_colours import COLOURS, bgr_by_integers, camera_image, random_image
from tritonclient.grpc import model_config_pb2 as pb
from unit.backends.vision.preprocessing import (
    GPU,
    NETWORK,
    PLACES,
    SIZE,
    Preprocess,
    config,
    entry,
    parameter,
)
from unit.inference.ensembles import models_of

from edge_server.backends.contract import ExecuteRequest, LoadContext
from edge_server.backends.vision import image_preprocess
from edge_server.backends.vision.image_preprocess_config import frames_of_request
from edge_server.backends.vision.preprocess_cpu import scale_frame
from edge_server.errors import EdgeServerError, InvalidRequest, ModelConfigError
from edge_server.inference.registry import Snapshot
from edge_server.model_config.config import ModelConfig, Placement
from edge_server.pixels import Colour, ColourMatrix, ColourRange, Image, PixelFormat
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor
from edge_server.tools.road.renderer import render
from edge_server.tools.road.scene import RoadScene

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.backends.contract import Tensors
    from edge_server.gpu.device import Devices
    from edge_server.requests import Parameters

ANY = 'input { name: "image" data_type: TYPE_UINT8 dims: [-1, -1, -1] }' + parameter(
    "pixel_format", "any"
)
FULL_709 = Colour(ColourMatrix.BT709, ColourRange.FULL)


def parameters_of(image: Image) -> dict[str, str]:
    return {
        "pixel_format": image.pixel_format.value,
        "color_matrix": image.colour.matrix.value,
        "color_range": image.colour.range.value,
    }


def planes(image: Image) -> NDArray[np.float32]:
    """(3, 36, 64) in whole numbers, scaled."""
    scaled: NDArray[np.float32] = bgr_by_integers(image, 64, 36).transpose(2, 0, 1) * np.float32(
        1 / 255
    )
    return scaled


@PLACES
def test_each_format_and_colour_goes_through_one_model(devices: Devices, group: str) -> None:
    model = Preprocess(config(ANY + NETWORK + SIZE + group), devices)
    for pixel_format, colour in product(PixelFormat, COLOURS):
        image = random_image(pixel_format, 96, 54, colour=colour)
        made = model.run(image.packed()[np.newaxis], **parameters_of(image))
        np.testing.assert_array_equal(made["input"], planes(image)[np.newaxis])
        assert made["size"].tolist() == [[54, 96]]


@PLACES
@pytest.mark.parametrize("pixel_format", [PixelFormat.BGR, PixelFormat.YUY2, PixelFormat.GREY])
def test_without_parameters_the_channels_say_the_format(
    devices: Devices, group: str, pixel_format: PixelFormat
) -> None:
    text = ANY + parameter("color_matrix", "bt709") + parameter("color_range", "full")
    image = random_image(pixel_format, 96, 54, colour=FULL_709)
    made = Preprocess(config(text + NETWORK + group), devices).run(image.packed()[np.newaxis])
    np.testing.assert_array_equal(made["input"], planes(image)[np.newaxis])


@PLACES
def test_a_request_may_name_the_colours_of_a_fixed_format(devices: Devices, group: str) -> None:
    text = 'input { name: "image" data_type: TYPE_UINT8 dims: [-1, -1, 2] }' + parameter(
        "pixel_format", "yuy2"
    )
    model = Preprocess(config(text + NETWORK + group), devices)
    for colour in COLOURS:
        image = random_image(PixelFormat.YUY2, 96, 54, colour=colour)
        made = model.run(image.packed()[np.newaxis], **parameters_of(image))
        np.testing.assert_array_equal(made["input"], planes(image)[np.newaxis])


def execute(
    devices: Devices, group: str, requests: list[tuple[NDArray[np.uint8], Parameters]]
) -> list[Tensors | EdgeServerError]:
    """The answers of one batch, in the order of the requests."""
    answers: list[Tensors | EdgeServerError | None] = [None] * len(requests)
    model = image_preprocess.load(
        LoadContext(None, config(ANY + NETWORK + SIZE + group, batch=32), devices)
    )
    instance = model.make_instance("p_0", Placement("GPU", 0) if group == GPU else Placement("CPU"))

    def responder(number: int) -> object:
        def respond(
            made: Tensors | EdgeServerError | None, final: bool, parameters: object = None
        ) -> None:
            assert final
            assert answers[number] is None
            answers[number] = made

        return respond

    instance.execute(
        [
            ExecuteRequest(
                {"image": Tensor(pixels)},
                frozenset({"input", "size"}),
                responder(number),
                InferRequest("p", {}, parameters=parameters),
                Snapshot({}),
            )
            for number, (pixels, parameters) in enumerate(requests)
        ]
    )
    assert None not in answers
    return answers


@PLACES
def test_requests_of_a_batch_have_their_own_formats_and_colours(
    devices: Devices, group: str
) -> None:
    # All have the shape [n,81,96,1].
    kinds = [
        (PixelFormat.NV12, 54, COLOURS[0], 3),
        (PixelFormat.NV12, 54, COLOURS[3], 1),
        (PixelFormat.I420, 54, COLOURS[3], 2),
        (PixelFormat.GREY, 81, COLOURS[1], 18),
        (PixelFormat.NV12, 54, COLOURS[0], 1),
    ]
    images = [
        [random_image(form, 96, height, seed, colour) for seed in range(count)]
        for form, height, colour, count in kinds
    ]
    answers = execute(
        devices,
        group,
        [(np.stack([i.packed() for i in each]), parameters_of(each[0])) for each in images],
    )
    for each, answer, (_, height, _, count) in zip(images, answers, kinds, strict=True):
        assert not isinstance(answer, EdgeServerError)
        made = answer["input"].array
        made = made if isinstance(made, np.ndarray) else made.on_host()
        np.testing.assert_array_equal(made, np.stack([planes(image) for image in each]))
        assert answer["size"].array.tolist() == [[height, 96]] * count


@PLACES
def test_a_wrong_parameter_costs_its_own_request_of_a_batch(devices: Devices, group: str) -> None:
    image = random_image(PixelFormat.NV12, 96, 54)
    pixels = image.packed()[np.newaxis]
    good = (pixels, parameters_of(image))
    first, wrong, last = execute(devices, group, [good, (pixels, {"pixel_format": "nv21"}), good])
    assert isinstance(wrong, InvalidRequest)
    for answer in (first, last):
        assert not isinstance(answer, EdgeServerError)
        assert answer["input"].shape == (1, 3, 36, 64)


@PLACES
@pytest.mark.parametrize(
    ("shape", "parameters", "says"),
    [
        (
            (54, 96, 3),
            {"pixel_format": "rgb"},
            "parameter 'pixel_format' is 'rgb'; it is one of bgr, grey, yuy2, nv12, i420",
        ),
        (
            (54, 96, 3),
            {"color_matrix": "bt2020"},
            "parameter 'color_matrix' is 'bt2020'; it is one of bt601, bt709",
        ),
        (
            (54, 96, 2),
            {"color_range": 1},
            "parameter 'color_range' is '1'; it is one of limited, full",
        ),
        (
            (54, 96, 3),
            {"pixel_format": "nv12"},
            "parameter 'pixel_format' is 'nv12', whose frames have 1 as the last of the dims, not "
            "[54,96,3]; send such a frame, or leave 'pixel_format' out for bgr, yuy2 and grey",
        ),
        ((81, 96, 1), {"pixel_format": "bgr"}, "whose frames have 3 as the last of the dims"),
        ((54, 96, 4), {}, "the last of the dims is 3 for bgr, 2 for yuy2, 1 for grey, nv12 and"),
        ((80, 96, 1), {"pixel_format": "i420"}, "the i420 frame has H rows of luma and then H/2"),
        ((81, 95, 1), {"pixel_format": "i420"}, "the width of i420 frames is even"),
        ((54, 95, 2), {}, "the width of yuy2 frames is even"),
        ((0, 96, 1), {}, "is empty"),
        ((54, 96, 0), {}, "is empty"),
        ((1, 32768, 1), {}, "a side has at most 32767 px"),
    ],
)
def test_parameters_that_contradict_are_refused_with_the_remedy(
    devices: Devices, group: str, shape: tuple[int, ...], parameters: Parameters, says: str
) -> None:
    model = Preprocess(config(ANY + NETWORK + group), devices)
    with pytest.raises(InvalidRequest) as caught:
        model.run(np.zeros((1, *shape), np.uint8), **parameters)
    assert says in str(caught.value)
    assert str(caught.value).startswith("input 'image': an image of [1,")


@PLACES
def test_another_format_than_the_models_only_one_is_refused(devices: Devices, group: str) -> None:
    text = 'input { name: "image" data_type: TYPE_UINT8 dims: [-1, -1] }' + parameter(
        "pixel_format", "i420"
    )
    model = Preprocess(config(text + NETWORK + group), devices)
    with pytest.raises(InvalidRequest) as caught:
        model.run(np.zeros((1, 81, 96), np.uint8), pixel_format="nv12")
    assert (
        "parameter 'pixel_format' is 'nv12', the model takes i420; send i420 frames, or give the "
        'model pixel_format "any" and dims [-1,-1,-1]'
    ) in str(caught.value)


@given(
    st.lists(st.integers(1, 40), min_size=3, max_size=3),
    st.dictionaries(
        st.sampled_from(["pixel_format", "color_matrix", "color_range", "other"]),
        st.sampled_from(["bgr", "grey", "yuy2", "nv12", "i420", "bt709", "full", "", True, 1, 0.5]),
    ),
    st.sampled_from([None, *PixelFormat]),
)
def test_any_request_is_frames_or_a_clear_refusal(
    dims: list[int], parameters: Parameters, only: PixelFormat | None
) -> None:
    said, size, expected = "", (0, 0), (0, 0)
    try:
        frames = frames_of_request(tuple(dims), parameters, only, Colour(), 1)
        if frames.width % 2 == 0 and frames.height % 2 == 0:
            pixels = np.zeros(dims, np.uint8)
            image = Image.of_packed(frames.pixel_format, pixels, frames.colour)
            size, expected = (image.width, image.height), (frames.width, frames.height)
    except ValueError as error:
        said = str(error)
    assert size == expected
    assert not said or any(word in said for word in ("pixel_format", "color_", "H even"))


def test_any_format_has_three_open_dims() -> None:
    with pytest.raises(ModelConfigError, match=r"dims \[-1,-1,-1\] for pixel_format any"):
        config(ANY.replace("[-1, -1, -1]", "[-1, -1, 3]") + NETWORK)


@PLACES
def test_the_parameters_go_through_an_ensemble(devices: Devices, group: str) -> None:
    ensemble = ModelConfig.of(
        text_format.Parse(
            'name: "lanes" max_batch_size: 1 platform: "ensemble" '
            'input { name: "image" data_type: TYPE_UINT8 dims: [-1, -1, -1] } '
            'output { name: "input" data_type: TYPE_FP32 dims: [3, 36, 64] } '
            'ensemble_scheduling { step { model_name: "p" model_version: -1 '
            'input_map { key: "image" value: "image" } '
            'output_map { key: "input" value: "input" } } }',
            pb.ModelConfig(),
        )
    )
    model = entry(config(ANY + NETWORK + SIZE + group), devices)
    snapshot = models_of(ensemble, model).snapshot
    image = random_image(PixelFormat.I420, 96, 54, colour=FULL_709)
    request = InferRequest(
        "lanes",
        {"image": Tensor(image.packed()[np.newaxis])},
        parameters=parameters_of(image),
    )
    made = snapshot.infer(request).outputs["input"].array
    np.testing.assert_array_equal(made, planes(image)[np.newaxis])


@pytest.fixture(scope="module")
def picture() -> NDArray[np.uint8]:
    """A rendered road."""
    road, _ = render(RoadScene.for_camera(3), 120.0, 640, 360)
    return road


@pytest.mark.parametrize("colour", COLOURS, ids=str)
@pytest.mark.parametrize("pixel_format", PixelFormat)
def test_one_picture_is_the_same_input_in_each_format(
    picture: NDArray[np.uint8], pixel_format: PixelFormat, colour: Colour
) -> None:
    scale = np.float32(1 / 255)
    expected, made = np.empty((3, 180, 320), np.float32), np.empty((3, 180, 320), np.float32)
    shown = picture
    if pixel_format is PixelFormat.GREY:
        weights = {
            ColourMatrix.BT601: (0.114, 0.587, 0.299),
            ColourMatrix.BT709: (0.0722, 0.7152, 0.2126),
        }[colour.matrix]
        luma = np.rint(picture @ np.array(weights)).astype(np.uint8)
        shown = luma[..., None].repeat(3, axis=-1)
    scale_frame(Image.of_bgr(shown), scale, expected)
    scale_frame(camera_image(pixel_format, picture, colour), scale, made)
    levels = np.abs(made - expected) * 255
    # Chroma of four pixels and roundings to 8 bits, of the values, the resized ones and the result.
    assert levels.mean() < 0.8
    assert np.percentile(levels, 99) < 4
    # With other colours than the camera's the picture is another.
    if pixel_format not in (PixelFormat.BGR, PixelFormat.GREY):
        for other in COLOURS:
            if other != colour:
                image = camera_image(pixel_format, picture, colour)
                scale_frame(Image(pixel_format, image.planes, other), scale, made)
                assert np.abs(made - expected).mean() * 255 > levels.mean()


@pytest.mark.parametrize("pixel_format", PixelFormat)
def test_gaps_between_rows_change_nothing(pixel_format: PixelFormat) -> None:
    image = random_image(pixel_format, 96, 54, colour=FULL_709)
    views = []
    for plane in image.planes:
        padded = np.full((plane.shape[0], plane.shape[1] + 8, *plane.shape[2:]), 0xEE, np.uint8)
        padded[:, : plane.shape[1]] = plane
        views.append(padded[:, : plane.shape[1]])
    made = np.empty((3, 36, 64), np.float32)
    scale_frame(Image(pixel_format, tuple(views), image.colour), np.float32(1 / 255), made)
    np.testing.assert_array_equal(made, planes(image))
