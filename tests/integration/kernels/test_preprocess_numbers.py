"""Kernels and CPU give the numbers of tests/support/integer_colours.py, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integration.kernels.shim import CameraFrame, DesiredModel, by_cpu, by_integers
from support.integer_colours import COLOURS, bgr_of_yuv, camera_image, image_of_planes

from edge_server.backends.vision.image_preprocess_config import UndistortionMap
from edge_server.pixels import Colour, CropRegion, Image, PixelFormat
from edge_server.tools.road.renderer import render
from edge_server.tools.road.scene import RoadScene

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn
    from integration.kernels.shim import Shim

FORMATS = st.sampled_from(PixelFormat)


def check(shim: Shim, frame: CameraFrame, wish: DesiredModel) -> None:
    expected = by_integers(frame, wish)
    np.testing.assert_array_equal(shim.run([frame], wish)[0], expected)
    np.testing.assert_array_equal(by_cpu(frame, wish), expected)


@st.composite
def frames(draw: DrawFn, longest_px: int = 90) -> CameraFrame:
    """Any size that the format allows, any colours, any stride, any alignment."""
    pixel_format = draw(FORMATS)
    width = draw(st.integers(1, longest_px))
    height = draw(st.integers(1, longest_px))
    if pixel_format.has_chroma:
        width += width % 2
    if pixel_format.is_subsampled:
        height += height % 2
    return CameraFrame.random(
        pixel_format,
        width,
        height,
        draw(st.integers(0, 2**31)),
        colour=draw(st.sampled_from(COLOURS)),
        gap_bytes=draw(st.integers(0, 40)),
        at_end=draw(st.booleans()),
    )


@st.composite
def regions(draw: DrawFn, frame: CameraFrame) -> CropRegion | None:
    if draw(st.booleans()):
        return None
    x = draw(st.integers(0, frame.layout.width - 1))
    y = draw(st.integers(0, frame.layout.height - 1))
    width = draw(st.integers(1, frame.layout.width - x))
    return CropRegion(x, y, width, draw(st.integers(1, frame.layout.height - y)))


@st.composite
def network_sides(draw: DrawFn, source: int) -> int:
    """Any side, with the ones that OpenCV treats apart drawn often."""
    special = [source, 2 * source, max(source // 2, 1), max(source // 3, 1)]
    return min(draw(st.one_of(st.sampled_from(special), st.integers(1, 150))), 200)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_frame_is_resized(shim: Shim, data: st.DataObject) -> None:
    frame = data.draw(frames())
    region = data.draw(regions(frame))
    source = region or CropRegion(0, 0, frame.layout.width, frame.layout.height)
    half = data.draw(st.booleans())
    wish = DesiredModel(
        data.draw(network_sides(source.width)),
        data.draw(network_sides(source.height)),
        scale=data.draw(st.sampled_from([1 / 255, 1.0, 1 / 58.0, 1e-7, 700.0, -1.0])),
        half=half,
        region=region,
        out_offset_bytes=data.draw(st.integers(0, 8)) * (2 if half else 4),
    )
    # 255 * 700 has no half: it is infinite on both sides.
    with np.errstate(over="ignore"):
        check(shim, frame, wish)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_frame_is_undistorted(shim: Shim, data: st.DataObject) -> None:
    frame = data.draw(frames())
    width, height = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 40))
    random = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    # Points beyond every border too, which OpenCV takes as black.
    lens = UndistortionMap.of_points(
        random.uniform(-5, frame.layout.width + 5, (height, width)).astype(np.float32),
        random.uniform(-5, frame.layout.height + 5, (height, width)).astype(np.float32),
    )
    half = data.draw(st.booleans())
    check(shim, frame, DesiredModel(width, height, half=half, undistortion=lens))


@pytest.mark.parametrize("colour", COLOURS, ids=str)
def test_every_colour_is_that_of_whole_numbers(shim: Shim, colour: Colour) -> None:
    """Each U beside each V, under luma of all sixteenths and both ends."""
    lumas = np.array([*range(0, 256, 16), 15, 17, 235, 254, 255, 1], np.uint8)
    u, v = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    u, v = np.tile(u, (len(lumas), 1)), np.tile(v, (len(lumas), 1))
    y = np.repeat(lumas, 256)[:, None].repeat(256, axis=1)
    # At the size of the chroma nothing is interpolated: neighbours have the same luma.
    luma = y.repeat(2, axis=0).repeat(2, axis=1)
    frame = CameraFrame(image_of_planes(PixelFormat.NV12, luma, u, v, colour))
    wish = DesiredModel(256, len(y), scale=1.0)
    expected = bgr_of_yuv(y, u, v, colour).transpose(2, 0, 1)
    np.testing.assert_array_equal(shim.run([frame], wish)[0], expected)
    np.testing.assert_array_equal(by_cpu(frame, wish), expected)


@pytest.mark.parametrize("colour", COLOURS, ids=str)
def test_every_grey_is_that_of_whole_numbers(shim: Shim, colour: Colour) -> None:
    luma = np.arange(256, dtype=np.uint8).reshape(8, 32, 1)
    check(shim, CameraFrame(Image(PixelFormat.GREY, (luma,), colour)), DesiredModel(32, 8, 1.0))


SIZES = {
    "thirds": (960, 540, 320, 180),
    "halves": (640, 360, 320, 180),
    "one to one": (320, 180, 320, 180),
    "up": (160, 90, 320, 180),
    "one axis": (320, 240, 320, 180),
    "anything": (642, 358, 112, 208),
    "a few columns of a wide frame": (32766, 2, 3, 5),
    "few columns each from far": (20000, 4, 40, 2),
}


@pytest.mark.parametrize("pixel_format", PixelFormat)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_cameras_sizes_are_resized(
    shim: Shim, sizes: tuple[int, int, int, int], pixel_format: PixelFormat
) -> None:
    width, height, out_width, out_height = sizes
    frame = CameraFrame.random(pixel_format, width, height)
    check(shim, frame, DesiredModel(out_width, out_height))


def road(pixel_format: PixelFormat) -> CameraFrame:
    """A rendered road as a camera of that format gives it."""
    image, _ = render(RoadScene.for_camera(3), 120.0, 1280, 720)
    return CameraFrame(camera_image(pixel_format, image, COLOURS[-1]))


@pytest.mark.parametrize("pixel_format", PixelFormat)
@pytest.mark.parametrize("region", [None, CropRegion(37, 251, 1201, 433)], ids=["whole", "crop"])
def test_a_road_is_prepared(
    shim: Shim, pixel_format: PixelFormat, region: CropRegion | None
) -> None:
    check(shim, road(pixel_format), DesiredModel(320, 180, half=True, region=region))


@pytest.mark.parametrize("pixel_format", PixelFormat)
def test_a_road_behind_a_lens_is_undistorted(shim: Shim, pixel_format: PixelFormat) -> None:
    camera = np.array([[900.0, 0, 640], [0, 900, 360], [0, 0, 1]])
    distortion = np.array([-0.32, 0.11, 0.001, -0.002, -0.02])
    lens = UndistortionMap.of_camera(camera, distortion, CropRegion(0, 100, 1280, 620), 320, 155)
    check(shim, road(pixel_format), DesiredModel(320, 155, undistortion=lens))


def test_a_map_without_distortion_is_a_crop_and_resize() -> None:
    image = road(PixelFormat.BGR).image.planes[0]
    camera = np.array([[900.0, 0, 640], [0, 900, 360], [0, 0, 1]])
    lens = UndistortionMap.of_camera(camera, np.zeros(5), CropRegion(40, 120, 960, 540), 320, 180)
    mapped = cv2.remap(image, lens.positions, lens.fractions, cv2.INTER_LINEAR)
    resized = cv2.resize(image[120:660, 40:1000], (320, 180), interpolation=cv2.INTER_LINEAR)
    assert np.abs(mapped.astype(int) - resized).max() <= 1


@pytest.mark.parametrize("pixel_format", PixelFormat)
def test_the_frames_of_a_batch_may_lie_anywhere(shim: Shim, pixel_format: PixelFormat) -> None:
    batch = [CameraFrame.random(pixel_format, 62, 38, seed) for seed in range(16)]
    wish = DesiredModel(21, 30)
    expected = np.stack([by_integers(frame, wish) for frame in batch])
    np.testing.assert_array_equal(shim.run(batch, wish), expected)


@pytest.mark.parametrize(
    ("sizes", "share"),
    [
        # Exact thirds: a third of the luma's rows has weight, and each of the chroma's.
        ((960, 540, 320, 180), 0.56),
        ((640, 360, 320, 180), 1.06),
        ((640, 360, 426, 240), 1.25),
        # Chroma is enlarged: eight rows of output need four of its rows and one on either side.
        ((320, 180, 320, 180), 1.34),
    ],
)
def test_a_frame_is_read_about_once(
    shim: Shim, sizes: tuple[int, int, int, int], share: float
) -> None:
    width, height, out_width, out_height = sizes
    frame = CameraFrame.random(PixelFormat.NV12, width, height)
    shim.take_copied_bytes()
    shim.run([frame], DesiredModel(out_width, out_height, half=True))
    assert 0 < shim.take_copied_bytes() <= share * width * height * 1.5
