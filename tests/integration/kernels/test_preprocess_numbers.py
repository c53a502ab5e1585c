"""The kernels give the CPU's numbers, bit for bit (the rule asks for 1/255).

Colours are those of whole numbers (tests/integer_colours.py), not of the OpenCV that is here;
sizes and lenses are OpenCV's.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.backends.vision.preprocess_cpu import UndistortionMap
from edge_server.cameras.synthetic.road_renderer import render
from edge_server.cameras.synthetic.road_scene import RoadScene
from edge_server.gpu.kernels.preprocess import CropRegion, PixelFormat
from tests.integration.kernels.shim import CameraFrame, DesiredModel, by_opencv

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn

    from tests.integration.kernels.shim import Shim

FORMATS = st.sampled_from(PixelFormat)


def check(shim: Shim, frame: CameraFrame, wish: DesiredModel) -> None:
    np.testing.assert_array_equal(shim.run([frame], wish)[0], by_opencv(frame, wish))


@st.composite
def frames(draw: DrawFn, longest_px: int = 90) -> CameraFrame:
    """Any size that the format allows, any stride, any alignment."""
    pixel_format = draw(FORMATS)
    width = draw(st.integers(1, longest_px))
    height = draw(st.integers(1, longest_px))
    if pixel_format is not PixelFormat.BGR:
        width += width % 2
    if pixel_format is PixelFormat.NV12:
        height += height % 2
    return CameraFrame.random(
        pixel_format,
        width,
        height,
        draw(st.integers(0, 2**31)),
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
def test_any_frame_is_resized_as_opencv_does(shim: Shim, data: st.DataObject) -> None:
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
def test_any_frame_is_undistorted_as_opencv_does(shim: Shim, data: st.DataObject) -> None:
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


def every_colour(pixel_format: PixelFormat) -> CameraFrame:
    """Each U beside each V, under luma of all sixteenths and both ends."""
    lumas = np.array([*range(0, 256, 16), 15, 17, 235, 254, 255, 1], np.uint8)
    u, v = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    pairs = np.tile(np.stack([u, v], axis=-1), (len(lumas), 1, 1))
    rows = np.repeat(lumas, 256)
    if pixel_format is PixelFormat.YUY2:
        luma = np.repeat(rows[:, None], 512, axis=1)
        return CameraFrame(pixel_format, np.stack([luma, pairs.reshape(len(rows), 512)], axis=-1))
    luma = np.repeat(np.repeat(rows, 2)[:, None], 512, axis=1)
    return CameraFrame(pixel_format, luma, pairs.reshape(len(rows), 512))


@pytest.mark.parametrize("pixel_format", [PixelFormat.NV12, PixelFormat.YUY2])
def test_every_colour_is_that_of_whole_numbers(shim: Shim, pixel_format: PixelFormat) -> None:
    frame = every_colour(pixel_format)
    width, height = frame.layout.width, frame.layout.height
    # As large as it is, nothing is interpolated.
    made = shim.run([frame], DesiredModel(width, height, scale=1.0))[0]
    np.testing.assert_array_equal(made, frame.bgr().transpose(2, 0, 1))


def opencv_has_its_own_colours() -> bool:
    """Not so on ARM before 4.9: Carotene's are others, for NV12."""
    version = tuple(int(part) for part in cv2.__version__.split(".")[:2])
    return platform.machine() != "aarch64" or version >= (4, 9)


@pytest.mark.skipif(not opencv_has_its_own_colours(), reason="this OpenCV's colours are Carotene's")
@pytest.mark.parametrize("pixel_format", [PixelFormat.NV12, PixelFormat.YUY2])
def test_opencv_gives_whole_numbers_too(pixel_format: PixelFormat) -> None:
    frame = every_colour(pixel_format)
    np.testing.assert_array_equal(frame.bgr_by_opencv(), frame.bgr())


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
def test_cameras_sizes_are_resized_as_opencv_does(
    shim: Shim, sizes: tuple[int, int, int, int], pixel_format: PixelFormat
) -> None:
    width, height, out_width, out_height = sizes
    frame = CameraFrame.random(pixel_format, width, height)
    check(shim, frame, DesiredModel(out_width, out_height))


def road(pixel_format: PixelFormat) -> CameraFrame:
    """A rendered road as a camera of that format gives it."""
    image, _ = render(RoadScene.for_camera(3), 120.0, 1280, 720)
    if pixel_format is PixelFormat.BGR:
        return CameraFrame(pixel_format, image)
    i420 = cv2.cvtColor(image, cv2.COLOR_BGR2YUV_I420)
    luma = i420[:720]
    u, v = i420[720:900].reshape(360, 640), i420[900:].reshape(360, 640)
    chroma = np.stack([u, v], axis=-1)
    if pixel_format is PixelFormat.NV12:
        return CameraFrame(pixel_format, luma, chroma.reshape(360, 1280))
    pairs = np.repeat(chroma, 2, axis=0).reshape(720, 1280)
    return CameraFrame(pixel_format, np.stack([luma, pairs], axis=-1))


@pytest.mark.parametrize("pixel_format", PixelFormat)
@pytest.mark.parametrize("region", [None, CropRegion(37, 251, 1201, 433)], ids=["whole", "crop"])
def test_a_road_is_prepared_as_opencv_does(
    shim: Shim, pixel_format: PixelFormat, region: CropRegion | None
) -> None:
    check(shim, road(pixel_format), DesiredModel(320, 180, half=True, region=region))


@pytest.mark.parametrize("pixel_format", PixelFormat)
def test_a_road_behind_a_lens_is_undistorted_as_opencv_does(
    shim: Shim, pixel_format: PixelFormat
) -> None:
    camera = np.array([[900.0, 0, 640], [0, 900, 360], [0, 0, 1]])
    distortion = np.array([-0.32, 0.11, 0.001, -0.002, -0.02])
    lens = UndistortionMap.of_camera(camera, distortion, CropRegion(0, 100, 1280, 620), 320, 155)
    check(shim, road(pixel_format), DesiredModel(320, 155, undistortion=lens))


def test_a_map_without_distortion_is_a_crop_and_resize() -> None:
    image = road(PixelFormat.BGR).bgr()
    camera = np.array([[900.0, 0, 640], [0, 900, 360], [0, 0, 1]])
    lens = UndistortionMap.of_camera(camera, np.zeros(5), CropRegion(40, 120, 960, 540), 320, 180)
    mapped = cv2.remap(image, lens.positions, lens.fractions, cv2.INTER_LINEAR)
    resized = cv2.resize(image[120:660, 40:1000], (320, 180), interpolation=cv2.INTER_LINEAR)
    assert np.abs(mapped.astype(int) - resized).max() <= 1


@pytest.mark.parametrize("pixel_format", PixelFormat)
def test_the_frames_of_a_batch_may_lie_anywhere(shim: Shim, pixel_format: PixelFormat) -> None:
    batch = [CameraFrame.random(pixel_format, 62, 38, seed) for seed in range(16)]
    wish = DesiredModel(21, 30)
    expected = np.stack([by_opencv(frame, wish) for frame in batch])
    np.testing.assert_array_equal(shim.run(batch, wish), expected)


@pytest.mark.parametrize(
    ("sizes", "share"),
    [
        # Exact thirds: a third of the rows has weight, and two thirds of the chroma's rows.
        ((960, 540, 320, 180), 0.47),
        ((640, 360, 320, 180), 1.06),
        ((640, 360, 426, 240), 1.25),
        ((320, 180, 320, 180), 1.15),
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
