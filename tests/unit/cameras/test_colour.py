"""Pictures in BGR: exact in whole numbers, close to what a person would see."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.integer_colours import (
    COLOURS,
    bgr_by_integers,
    bgr_of_yuv,
    camera_image,
    exact_factors,
    factors,
    random_image,
)

from edge_server.cameras.colour import bgr_of
from edge_server.pixels import Colour, CropRegion, Image, PixelFormat
from edge_server.tools.road.renderer import render
from edge_server.tools.road.scene import RoadScene

EACH_COLOUR = pytest.mark.parametrize("colour", COLOURS, ids=str)
EACH_FORMAT = pytest.mark.parametrize("pixel_format", PixelFormat)


@EACH_COLOUR
@EACH_FORMAT
def test_a_picture_is_that_of_whole_numbers(pixel_format: PixelFormat, colour: Colour) -> None:
    image = random_image(pixel_format, 98, 54, colour=colour)
    np.testing.assert_array_equal(bgr_of(image), bgr_by_integers(image))


def test_pixels_in_bgr_are_returned_themselves() -> None:
    image = random_image(PixelFormat.BGR, 98, 54)
    assert np.shares_memory(bgr_of(image), image.planes[0])
    np.testing.assert_array_equal(bgr_of(image), image.planes[0])


@EACH_FORMAT
def test_gaps_between_rows_change_nothing(pixel_format: PixelFormat) -> None:
    image = random_image(pixel_format, 98, 54)
    padded = [np.pad(p, [(0, 0), (0, 6)] + [(0, 0)] * (p.ndim - 2)) for p in image.planes]
    views = tuple(p[:, : plane.shape[1]] for p, plane in zip(padded, image.planes, strict=True))
    for view in views:
        view.flags.writeable = False
    with_gaps = Image(pixel_format, views, image.colour)
    np.testing.assert_array_equal(bgr_of(with_gaps), bgr_of(image))


@EACH_COLOUR
@EACH_FORMAT
def test_a_cameras_picture_is_the_one_that_it_saw(
    pixel_format: PixelFormat, colour: Colour
) -> None:
    road, _ = render(RoadScene.for_camera(3), 120.0, 640, 360)
    made = bgr_of(camera_image(pixel_format, road, colour))
    if pixel_format is PixelFormat.GREY:
        assert (made[..., 0] == made[..., 1]).all()
        assert (made[..., 1] == made[..., 2]).all()
        # Grey of the pixels that have no colour.
        colourless = np.ptp(road, axis=2) <= 2
        levels = np.abs(made.astype(int) - road)[colourless]
    else:
        levels = np.abs(made.astype(int) - road)
    assert levels.mean() < 1.0
    # Edges of colour are as sharp as chroma.
    assert np.percentile(levels, 99) <= 10


@EACH_COLOUR
def test_the_factors_are_those_of_the_recommendation(colour: Colour) -> None:
    assert tuple(colour.to_bgr) == factors(colour)


@EACH_COLOUR
def test_a_colour_is_the_exact_one_within_less_than_a_level(colour: Colour) -> None:
    u, v = np.meshgrid(np.arange(256), np.arange(256))
    luma, blue_u, green_u, green_v, red_v = (float(each) for each in exact_factors(colour))
    for y in (0, 16, 17, 100, 128, 235, 255):
        bright = luma * (y - factors(colour)[0])
        exact = np.stack(
            [
                bright + blue_u * (u - 128),
                bright + green_u * (u - 128) + green_v * (v - 128),
                bright + red_v * (v - 128),
            ],
            axis=-1,
        ).clip(0, 255)
        made = bgr_of_yuv(np.full_like(u, y), u, v, colour)
        assert np.abs(made - exact).max() < 0.8


@EACH_COLOUR
def test_black_white_and_grey_have_no_tint(colour: Colour) -> None:
    black, white = (16, 235) if factors(colour)[0] else (0, 255)
    neutral = np.full(2, 128)
    ends = bgr_of_yuv(np.array([black, white]), neutral, neutral, colour)
    assert ends.tolist() == [[0, 0, 0], [255, 255, 255]]


@given(
    st.sampled_from(PixelFormat),
    st.tuples(*[st.integers(0, 30)] * 2, *[st.integers(1, 30)] * 2).map(
        lambda sides: CropRegion(*sides)
    ),
)
def test_the_chroma_of_a_region_covers_it_and_no_pair_more(
    pixel_format: PixelFormat, region: CropRegion
) -> None:
    columns, rows = pixel_format.chroma_step_px
    chroma = region.of_chroma(pixel_format)
    assert region.x - columns < chroma.x * columns <= region.x
    assert region.y - rows < chroma.y * rows <= region.y
    right, bottom = region.x + region.width, region.y + region.height
    assert right <= (chroma.x + chroma.width) * columns < right + columns
    assert bottom <= (chroma.y + chroma.height) * rows < bottom + rows
