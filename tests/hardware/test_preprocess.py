"""The kernels give the CPU's numbers on a real GPU, bit for bit, and so does the backend.

Both are held against whole numbers (tests/support/integer_colours.py), not against the OpenCV of a
board.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from google.protobuf import text_format
from support.integer_colours import COLOURS, bgr_by_integers, random_image
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.contract import LoadContext
from edge_server.backends.vision import image_preprocess
from edge_server.backends.vision.image_preprocess_config import UndistortionMap
from edge_server.backends.vision.preprocess_cpu import scale_frame
from edge_server.gpu.memory import BufferPool, CudaArray, DeviceMemory, MappedMemory
from edge_server.gpu.preprocess_kernel import (
    FrameAddress,
    FrameLayout,
    FramePreprocess,
    PreprocessArgs,
    kernel_image,
)
from edge_server.gpu.stream import Module, Stream
from edge_server.inference.registry import ModelEntry, ModelState, Snapshot
from edge_server.inference.scheduling import Scheduling
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.files import ModelFiles
from edge_server.pixels import Colour, ColourMatrix, ColourRange, CropRegion, Image, PixelFormat
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from edge_server.gpu.device import Device, Devices

pytestmark = pytest.mark.hardware

SCALE = np.float32(1 / 255)
# Frame, network and, as x, y, width, height, what of the frame is taken.
SIZES = {
    "1080p": (1920, 1080, 640, 360, None),
    "720p": (1280, 720, 640, 360, None),
    "region": (1920, 1080, 640, 360, (13, 301, 1801, 701)),
    "odd network": (640, 480, 333, 77, None),
    "up": (160, 90, 320, 180, None),
    "few pixels": (6, 4, 5, 3, (1, 1, 3, 2)),
    "very wide": (32766, 2, 3, 5, None),
}


@pytest.fixture(scope="module")
def module(device: Device) -> Module:
    return Module(device, kernel_image(device.compute_capability, device.driver_version))


class CameraFrame:
    """Random bytes as a camera gives them, with gaps between the rows."""

    def __init__(self, pixel_format: PixelFormat, width: int, height: int, colour: Colour) -> None:
        self.image = random_image(pixel_format, width, height, width, colour)
        rows = [plane.reshape(len(plane), -1) for plane in self.image.planes]
        padded = [np.pad(plane, ((0, 0), (0, 20))) for plane in rows]
        self.bytes = np.concatenate([plane.reshape(-1) for plane in padded])
        strides = [plane.shape[1] for plane in padded]
        self.layout = FrameLayout(pixel_format, width, height, *strides[:2])

    def at(self, pointer: int) -> FrameAddress:
        return self.layout.address(pointer)


def scaled(bgr: np.ndarray, dtype: type[np.floating]) -> np.ndarray:
    """(3, H, W) of BGR pixels."""
    return (bgr.transpose(2, 0, 1) * SCALE).astype(dtype, order="C")


@pytest.mark.parametrize("mapped", [False, True], ids=["copied", "in place"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("pixel_format", PixelFormat)
def test_resized(
    module: Module,
    pixel_format: PixelFormat,
    sizes: tuple[int, int, int, int, tuple[int, int, int, int] | None],
    dtype: type[np.floating],
    mapped: bool,
) -> None:
    width, height, out_width, out_height, taken = sizes
    region = CropRegion(*taken) if taken else CropRegion(0, 0, width, height)
    for colour in COLOURS:
        frame = CameraFrame(pixel_format, width, height, colour)
        geometry = FramePreprocess(
            frame.layout,
            out_width,
            out_height,
            scale=float(SCALE),
            half=dtype is np.float16,
            colour=colour,
            region=region,
        )
        expected = scaled(bgr_by_integers(frame.image, out_width, out_height, region), dtype)
        on_cpu = np.empty_like(expected)
        scale_frame(frame.image, SCALE, on_cpu, None, region)
        np.testing.assert_array_equal(on_cpu, expected)
        got = run(module, frame, geometry, expected, mapped=mapped)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("pixel_format", PixelFormat)
def test_undistorted(module: Module, pixel_format: PixelFormat, dtype: type[np.floating]) -> None:
    colour = Colour(ColourMatrix.BT709, ColourRange.FULL)
    frame = CameraFrame(pixel_format, 1280, 720, colour)
    random = np.random.default_rng(0)
    shape = (180, 322)
    # Points beyond every border, too: black.
    lens = UndistortionMap.of_points(
        random.uniform(-9, 1289, shape).astype(np.float32),
        random.uniform(-9, 729, shape).astype(np.float32),
    )
    device = module.device
    stream = Stream(device)
    maps = [np.ascontiguousarray(lens.positions), np.ascontiguousarray(lens.fractions)]
    on_device = [DeviceMemory(device, each.nbytes) for each in maps]
    for memory, each in zip(on_device, maps, strict=True):
        stream.to_device(memory, each)
    stream.synchronize()
    geometry = FramePreprocess(
        frame.layout,
        shape[1],
        shape[0],
        scale=float(SCALE),
        half=dtype is np.float16,
        colour=colour,
        undistortion=(on_device[0].pointer, on_device[1].pointer),
    )
    expected = scaled(bgr_by_integers(frame.image, lens=lens), dtype)
    on_cpu = np.empty_like(expected)
    scale_frame(frame.image, SCALE, on_cpu, lens)
    np.testing.assert_array_equal(on_cpu, expected)
    got = run(module, frame, geometry, expected, mapped=False)
    np.testing.assert_array_equal(got, expected)


def run(
    module: Module,
    frame: CameraFrame,
    geometry: FramePreprocess,
    like: np.ndarray,
    *,
    mapped: bool,
) -> np.ndarray:
    """What the kernel makes of `frame`."""
    device = module.device
    stream = Stream(device)
    memory: object
    if mapped:
        if not device.can_map_host_memory:
            pytest.skip("this GPU cannot map host memory")
        memory = MappedMemory(device, frame.bytes.shape, np.uint8)
        memory.array[:] = frame.bytes
    else:
        memory = DeviceMemory(device, frame.bytes.nbytes)
        stream.to_device(memory, frame.bytes)
    out = DeviceMemory(device, like.nbytes)
    launch = geometry.launch([frame.at(memory.pointer)], out.pointer)
    kernel = module.kernel(launch.kernel, f"{ctypes.sizeof(PreprocessArgs)}s")
    stream.launch(kernel, launch.grid, launch.block, launch.args)
    made = np.empty_like(like)
    stream.to_host(made, out)
    stream.synchronize()
    return made


CONFIG = """
name: "p" backend: "image_preprocess" max_batch_size: 20
input { name: "image" data_type: TYPE_UINT8 dims: [-1, -1, 3] }
output { name: "input" data_type: TYPE_FP16 dims: [3, 360, 640] }
instance_group { name: "p" kind: KIND_GPU gpus: 0 count: 1 }
"""


# NV12, a lens and a crop: all that a configuration can ask for at once.
CAMERA = (
    CONFIG.replace("[-1, -1, 3]", "[-1, -1]")
    + """
parameters { key: "pixel_format" value { string_value: "nv12" } }
parameters { key: "camera_matrix" value { string_value: "1010,1005,957,541" } }
parameters { key: "distortion" value { string_value: "-0.31,0.11,0.001,-0.002,-0.02" } }
parameters { key: "calibrated_size" value { string_value: "1920x1080" } }
parameters { key: "crop" value { string_value: "61,301,1801,701" } }
"""
)


@pytest.fixture
def preprocess(devices: Devices) -> Snapshot:
    return snapshot(CONFIG, devices)


def snapshot(text: str, devices: Devices) -> Snapshot:
    files = ModelFiles("p", Path("p"), {1: Path("p/1")})
    config = ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))
    config = image_preprocess.complete(files, 1, config)
    model = image_preprocess.load(LoadContext(Path("p/1"), config, devices))
    loaded = Scheduling().model(config, 1, model)
    return Snapshot({("p", 1): ModelEntry("p", 1, ModelState.READY, loaded=loaded)})


def frames(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 1080, 1920, 3), np.uint8)


def by_opencv(images: np.ndarray) -> np.ndarray:
    made = np.empty((len(images), 3, 360, 640), np.float16)
    for image, out in zip(images, made, strict=True):
        scale_frame(Image.of_bgr(image), SCALE, out)
    return made


def ask(preprocess: Snapshot, image: np.ndarray | CudaArray) -> CudaArray:
    request = InferRequest("p", {"image": Tensor(image)}, on_device=True)
    array = preprocess.infer(request).outputs["input"].on_device
    assert isinstance(array, CudaArray)
    return array


def test_frames_that_are_overwritten_at_once_arrive_all_the_same(preprocess: Snapshot) -> None:
    made = []
    for seed in range(12):
        image = frames(1, seed)
        expected = by_opencv(image)
        made.append((ask(preprocess, image), expected))
        image[:] = 0
    for array, expected in made:
        np.testing.assert_array_equal(array.on_host(), expected)


def test_a_batch_larger_than_a_launch(preprocess: Snapshot) -> None:
    image = frames(18, 0)
    np.testing.assert_array_equal(ask(preprocess, image).on_host(), by_opencv(image))


def test_frames_on_the_device_are_read_before_their_memory_is_written_again(
    preprocess: Snapshot, device: Device
) -> None:
    stream = Stream(device)
    pool = BufferPool(device, 1 << 26, "camera")
    made = []
    for seed in range(6):
        image = frames(1, seed)
        there = pool.take(stream, image.shape, np.uint8)
        stream.to_device(there, image)
        there.written(stream)
        made.append((ask(preprocess, there), by_opencv(image)))
        del there
    for array, expected in made:
        np.testing.assert_array_equal(array.on_host(), expected)
    counted = preprocess.find("p", "").statistics.counts().copies
    assert counted["to_device"].count == 0


def test_a_cameras_format_and_lens_are_those_of_the_cpu(devices: Devices) -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 1620, 1920), np.uint8)
    camera = np.array([[1010.0, 0, 957], [0, 1005, 541], [0, 0, 1]])
    distortion = np.array([-0.31, 0.11, 0.001, -0.002, -0.02])
    lens = UndistortionMap.of_camera(camera, distortion, CropRegion(61, 301, 1801, 701), 640, 360)
    expected = np.empty((2, 3, 360, 640), np.float16)
    for image, out in zip(images, expected, strict=True):
        frame = Image.of_packed(PixelFormat.NV12, image[..., np.newaxis])
        out[:] = scaled(bgr_by_integers(frame, lens=lens), np.float16)
    made = ask(snapshot(CAMERA, devices), images).on_host()
    np.testing.assert_array_equal(made, expected)


ANY = (
    CONFIG.replace("[-1, -1, 3]", "[-1, -1, -1]")
    + 'parameters { key: "pixel_format" value { string_value: "any" } }'
)


def test_each_request_has_its_own_format_and_colours(devices: Devices) -> None:
    model = snapshot(ANY, devices)
    for pixel_format in PixelFormat:
        for colour in COLOURS:
            image = random_image(pixel_format, 1920, 1080, colour=colour)
            request = InferRequest(
                "p",
                {"image": Tensor(image.packed()[np.newaxis])},
                parameters={
                    "pixel_format": pixel_format.value,
                    "color_matrix": colour.matrix.value,
                    "color_range": colour.range.value,
                },
            )
            made = model.infer(request).outputs["input"].array
            expected = scaled(bgr_by_integers(image, 640, 360), np.float16)
            np.testing.assert_array_equal(made[0], expected)
