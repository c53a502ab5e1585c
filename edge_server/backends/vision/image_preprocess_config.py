"""The preprocessing of an `image_preprocess` model, read from its configuration, and the frames of
its requests: their pixel format, colours and size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import cv2
import numpy as np

from edge_server.backends.contract import BackendParameters, check_parameters, parameters_of
from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.gpu.preprocess_kernel import MAX_SIDE_PX, size_fault
from edge_server.pixels import Colour, ColourMatrix, ColourRange, CropRegion, PixelFormat
from edge_server.tensors import DataType, Tensor, TensorSpec, element_count, shape_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.files import ModelFiles
    from edge_server.requests import Parameters

# The configuration's word for a model that takes frames of each format.
ANY = "any"

# The values per element of a packed array's last axis, and the format of an array that no parameter
# describes.
_CHANNELS = {PixelFormat.BGR: 3, PixelFormat.YUY2: 2}
_BY_CHANNELS = {3: PixelFormat.BGR, 2: PixelFormat.YUY2, 1: PixelFormat.GREY}

# The parameters of a request that describe its frames.
_OF_FRAMES = ("pixel_format", "color_matrix", "color_range", "crop")
# Of so many kinds of frames what follows from them is kept, for cameras that share an instance.
SIZES_KEPT = 16

_Choice = TypeVar("_Choice", bound=Enum)


class RequestFrames(NamedTuple):
    """The frames of one request, all alike; their size is in px, whatever the array's shape.
    `region` is the part of each that is resized; None is not known yet."""

    frame_count: int
    pixel_format: PixelFormat
    colour: Colour
    height: int
    width: int
    region: CropRegion | None = None


def frames_of_request(
    dims: tuple[int, ...],
    parameters: Parameters,
    only: PixelFormat | None,
    default: Colour,
    frame_count: int,
) -> RequestFrames:
    """Return the frames that a request describes with `pixel_format`, `color_matrix` and
    `color_range`, each of which may be absent; the colours have no effect on BGR.

    Args:
        dims: of one frame's array, two or three.
        only: the only pixel format that the model takes; None for any.
        default: colours where the parameters do not name them.

    Raises: ValueError: a parameter is invalid, or contradicts the shape or the model."""
    colour = Colour(
        choice(ColourMatrix, "color_matrix", parameters.get("color_matrix", default.matrix.value)),
        choice(ColourRange, "color_range", parameters.get("color_range", default.range.value)),
    )
    named: PixelFormat | None = None
    if (text := parameters.get("pixel_format")) is not None:
        named = choice(PixelFormat, "pixel_format", text)
    if only is not None and named not in (None, only):
        raise ValueError(
            f"parameter 'pixel_format' is '{text}', the model takes {only.value}; send "
            f'{only.value} frames, or give the model pixel_format "{ANY}" and dims [-1,-1,-1]'
        )
    channels = dims[2] if len(dims) == 3 else 1
    pixel_format = only or named or _BY_CHANNELS.get(channels)
    if pixel_format is None:
        raise ValueError(
            "the last of the dims is 3 for bgr, 2 for yuy2, 1 for grey, nv12 and i420 (parameter "
            "'pixel_format')"
        )
    wanted = _CHANNELS.get(pixel_format, 1)
    if channels != wanted:
        raise ValueError(
            f"parameter 'pixel_format' is '{pixel_format.value}', whose frames have {wanted} as "
            f"the last of the dims, not {shape_text(dims)}; send such a frame, or leave "
            "'pixel_format' out for bgr, yuy2 and grey"
        )
    rows, width = dims[:2]
    if not pixel_format.is_subsampled:
        return RequestFrames(frame_count, pixel_format, colour, rows, width)
    if rows % 3:
        raise ValueError(
            f"the {pixel_format.value} frame has H rows of luma and then H/2 of chroma, H even"
        )
    return RequestFrames(frame_count, pixel_format, colour, rows // 3 * 2, width)


def choice(of: type[_Choice], name: str, value: object, *more: str) -> _Choice:
    for each in of:
        if each.value == value:
            return each
    known = ", ".join([str(each.value) for each in of] + list(more))
    raise ValueError(f"parameter '{name}' is '{value}'; it is one of {known}")


# 256 MiB of floats; a larger network input is a typing error.
MAX_ELEMENTS = 64 * 1024 * 1024
# A GPU instance allocates a whole batch at once; on the CPU, a small request of tiny frames may
# need as much.
MOST_BATCH_BYTES = 1 << 30

_Number = TypeVar("_Number", int, float)

_FLOATS = (DataType.FP32, DataType.FP16)

# Dimensions of the input, by pixel format; None is any.
_FRAME_DIMS = {
    None: (-1, -1, -1),
    PixelFormat.BGR: (-1, -1, 3),
    PixelFormat.GREY: (-1, -1, 1),
    PixelFormat.YUY2: (-1, -1, 2),
    PixelFormat.NV12: (-1, -1),
    PixelFormat.I420: (-1, -1),
}
# k1 k2 p1 p2, k3, k4 k5 k6, thin prism, tilt: the counts that cv2.calibrateCamera returns.
_DISTORTION_COUNTS = (4, 5, 8, 12, 14)


class ImagePreprocessParameters(BackendParameters, frozen=True):
    scale: float = 1 / 255
    pixel_format: str = "bgr"
    color_matrix: str = "bt601"
    color_range: str = "limited"
    crop: str = ""
    camera_matrix: str = ""
    distortion: str = ""
    calibrated_size: str = ""


@dataclass(frozen=True, eq=False)
class UndistortionMap:
    """The position in the camera's frame of every network pixel: (H, W, 2) int16, column and row,
    and (H, W) uint16, row fraction << 5 | column fraction, each in 1/32 px.

    One map for undistortion, crop and resize together: each pixel is interpolated once. The
    fixed-point form is that of OpenCV's 8-bit remap of every version; with float maps the results
    depend on version and processor. Pixels outside the frame are black."""

    positions: NDArray[np.int16]
    fractions: NDArray[np.uint16]

    @classmethod
    def of_camera(
        cls,
        camera_matrix: NDArray[np.float64],
        distortion: NDArray[np.float64],
        region: CropRegion,
        width: int,
        height: int,
    ) -> UndistortionMap:
        """Return the map that undistorts and resizes `region` of the undistorted frame, in px of
        the full frame, to the network's `width` and `height`. `camera_matrix`, (3, 3), is of the
        full frame, as cv2.calibrateCamera returns it, `distortion` OpenCV's k1 k2 p1 p2 [k3
        ...]."""
        # Sample centres lie at half pixels, as in the resize.
        step_x, step_y = region.width / width, region.height / height
        network = np.array(camera_matrix, np.float64)
        network[0] /= step_x
        network[1] /= step_y
        network[0, 2] = (camera_matrix[0, 2] + 0.5 - region.x) / step_x - 0.5
        network[1, 2] = (camera_matrix[1, 2] + 0.5 - region.y) / step_y - 0.5
        positions, fractions = cv2.initUndistortRectifyMap(
            camera_matrix, distortion, None, network, (width, height), cv2.CV_16SC2
        )
        return cls(positions, fractions)

    @classmethod
    def of_points(cls, x: NDArray[np.float32], y: NDArray[np.float32]) -> UndistortionMap:
        """Return the map of columns and rows in px of the frame, each (H, W) float32."""
        return cls(*cv2.convertMaps(x, y, cv2.CV_16SC2))

    @cached_property
    def by_step(self) -> Mapping[tuple[int, int], UndistortionMap]:
        """The map of each layer of an image, by the layer's columns and rows in px per pixel."""
        columns = self.positions[..., 0] * np.int32(_STEPS) + (self.fractions & _STEPS - 1)
        rows = self.positions[..., 1] * np.int32(_STEPS) + (self.fractions >> 5)
        half_columns, half_rows = _halved(columns), _halved(rows)
        return {
            (1, 1): self,
            (2, 1): _map_of(half_columns, rows),
            (2, 2): _map_of(half_columns, half_rows),
        }

    def sample(
        self, pixels: NDArray[np.uint8], step_px: tuple[int, int], black: tuple[int, ...]
    ) -> NDArray[np.uint8]:
        """Return the undistorted pixels of one layer of an image; see `cameras.colour.bgr_of`."""
        of_layer = self.by_step[step_px]
        return cv2.remap(  # type: ignore[no-any-return]  # OpenCV has no types
            pixels,
            of_layer.positions,
            of_layer.fractions,
            cv2.INTER_LINEAR,
            borderMode=cv2.BORDER_CONSTANT,
            borderValue=black,
        )


# Steps of a position in a map, per px.
_STEPS = 32


def _halved(positions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the positions in a plane of half the pixels; its first centre lies at 0.5 px."""
    return (positions >> 1) - _STEPS // 4


def _map_of(columns: NDArray[np.int32], rows: NDArray[np.int32]) -> UndistortionMap:
    positions = np.stack([columns, rows], axis=-1)
    fractions = (rows & _STEPS - 1) << 5 | columns & _STEPS - 1
    return UndistortionMap((positions >> 5).astype(np.int16), fractions.astype(np.uint16))


@dataclass(frozen=True)
class FrameLens:
    """A camera's calibration; pixels are those of frames of `width` x `height`."""

    camera_matrix: tuple[tuple[float, float, float], ...]
    distortion: tuple[float, ...]
    width: int
    height: int


@dataclass(frozen=True)
class FrameParameters:
    """Pixel format (None is any), colours of frames whose request does not describe them, crop (of
    the undistorted frame where there is a lens) and lens of a model's frames."""

    scale: float
    pixel_format: PixelFormat | None
    colour: Colour
    crop: CropRegion | None
    lens: FrameLens | None

    @staticmethod
    def of(config: ModelConfig) -> FrameParameters:
        """Parse the parameters."""
        parameters = parameters_of(config, ImagePreprocessParameters)
        pixel_format = None
        if (named := parameters.pixel_format) != ANY:
            pixel_format = choice(PixelFormat, "pixel_format", named, ANY)
        colour = Colour(
            choice(ColourMatrix, "color_matrix", parameters.color_matrix),
            choice(ColourRange, "color_range", parameters.color_range),
        )
        crop = _crop(parameters.crop) if parameters.crop else None
        lens = _lens(parameters)
        if lens is not None:
            fault = size_fault(pixel_format or PixelFormat.BGR, lens.width, lens.height)
            if fault:
                raise ValueError(f"'calibrated_size' is '{parameters.calibrated_size}': {fault}")
            if crop is not None and not crop.is_within(lens.width, lens.height):
                raise ValueError(
                    f"'crop' is '{parameters.crop}', which is not within the undistorted frame of "
                    f"{lens.width}x{lens.height} px ('calibrated_size'); make it smaller"
                )
        return FrameParameters(parameters.scale, pixel_format, colour, crop, lens)


@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing of one model; the same wherever its instances run.

    Attributes:
        planes: the output for the network, [3,H,W].
        size: the name of the output for the image's size; None without such an output.
        undistortion: one map for lens, crop and resize; None without a lens.
        most_frames: the maximum number of frames in one batch."""

    image: str
    planes: TensorSpec
    size: str | None
    frame: FrameParameters
    undistortion: UndistortionMap | None
    scale: np.float32
    most_frames: int
    batched: bool

    @staticmethod
    def of(config: ModelConfig) -> Preprocessing:
        planes, size = _planes_output(config), _size_output(config)
        assert planes is not None  # noqa: S101 - `check_config` has validated it
        frame = FrameParameters.of(config)
        return Preprocessing(
            config.inputs[0].name,
            planes,
            size.name if size else None,
            frame,
            _undistortion(frame, planes),
            np.float32(frame.scale),
            max(1, config.max_batch_size),
            config.max_batch_size > 0,
        )

    def frames_of(self, shape: tuple[int, ...], parameters: Parameters) -> RequestFrames:
        """Return the frames of a request whose input has that shape."""
        described = [(name, parameters[name]) for name in _OF_FRAMES if name in parameters]
        return self._known_frames(shape, *described)

    @cached_property
    def _known_frames(self) -> Callable[..., RequestFrames]:
        # A camera's frames are all alike.
        return lru_cache(SIZES_KEPT)(self._frames)

    def _frames(self, shape: tuple[int, ...], *described: tuple[str, str]) -> RequestFrames:
        if 0 in shape:
            raise InvalidRequest(f"input '{self.image}': an image of {shape_text(shape)} is empty")
        count, dims = (shape[0], shape[1:]) if self.batched else (1, shape)
        try:
            frames = frames_of_request(
                dims, dict(described), self.frame.pixel_format, self.frame.colour, count
            )
        except ValueError as error:
            raise InvalidRequest(
                f"input '{self.image}': an image of {shape_text(shape)}; {error}"
            ) from None
        fault = self._size_fault(frames)
        if fault:
            raise InvalidRequest(f"input '{self.image}': an image of {shape_text(shape)}; {fault}")
        region = self.frame.crop or CropRegion(0, 0, frames.width, frames.height)
        if (text := dict(described).get("crop")) is not None:
            region = self._requested(str(text), frames)
        return frames._replace(region=region)

    def _requested(self, text: str, frames: RequestFrames) -> CropRegion:
        """Return the region that a request asks for."""
        fault = ""
        if self.frame.crop is not None or self.frame.lens is not None:
            fault = "the model has a crop or a lens of its own; leave the parameter out"
        else:
            try:
                region = _crop(text)
            except ValueError as error:
                fault = str(error)
            else:
                if region.is_within(frames.width, frames.height):
                    return region
                fault = f"the frame has {frames.width}x{frames.height} px"
        raise InvalidRequest(f"input '{self.image}': parameter 'crop' is '{text}': {fault}")

    def size_tensor(self, frames: RequestFrames) -> Tensor:
        region = frames.region
        assert region is not None  # noqa: S101 - of `frames_of`
        sizes = np.full((frames.frame_count, 2), (region.height, region.width), np.int32)
        return Tensor(sizes if self.batched else sizes[0])

    def _size_fault(self, frames: RequestFrames) -> str:
        frame, width, height = self.frame, frames.width, frames.height
        if fault := size_fault(frames.pixel_format, width, height):
            return fault
        if (lens := frame.lens) and (lens.width, lens.height) != (width, height):
            return (
                f"a frame of {width}x{height} px cannot be undistorted with a calibration for "
                f"{lens.width}x{lens.height}; send frames of that size, or calibrate with this one"
            )
        if (crop := frame.crop) and not crop.is_within(width, height):
            return (
                f"a frame of {width}x{height} px does not contain the model's crop, "
                f"{crop.width}x{crop.height} px at {crop.x},{crop.y}"
            )
        return ""


def check_config(files: ModelFiles, config: ModelConfig) -> None:
    where = files.config_path
    check_parameters(files, config, ImagePreprocessParameters)
    try:
        frame = FrameParameters.of(config)
    except ValueError as error:
        raise ModelConfigError(f"{where}: parameters: {error}") from error
    dims = _FRAME_DIMS[frame.pixel_format]
    if [(s.datatype, s.shape) for s in config.inputs] != [(DataType.UINT8, dims)]:
        raise ModelConfigError(
            f"{where}: image_preprocess has one input, TYPE_UINT8 with dims {shape_text(dims)} "
            f"for pixel_format {frame.pixel_format.value if frame.pixel_format else ANY}"
        )
    planes = _planes_output(config)
    if planes is None or len(config.outputs) > 2:
        raise ModelConfigError(
            f"{where}: image_preprocess has an output TYPE_FP32 or TYPE_FP16 with dims [3,H,W], "
            "and optionally one TYPE_INT32 with dims [2] for the frame's height and width"
        )
    if element_count(planes.shape) > MAX_ELEMENTS or max(planes.shape) > MAX_SIDE_PX:
        raise ModelConfigError(
            f"{where}: output '{planes.name}' of image_preprocess has dims "
            f"{shape_text(planes.shape)}; at most {MAX_ELEMENTS} elements are possible, and "
            f"{MAX_SIDE_PX} px a side"
        )
    frame_bytes = planes.datatype.numpy.itemsize * element_count(planes.shape)
    batch_bytes = max(1, config.max_batch_size) * frame_bytes
    if batch_bytes > MOST_BATCH_BYTES:
        raise ModelConfigError(
            f"{where}: output '{planes.name}' of image_preprocess takes {batch_bytes} bytes for a "
            f"batch of max_batch_size {config.max_batch_size}; at most {MOST_BATCH_BYTES} can be: "
            "make max_batch_size smaller"
        )
    for spec in config.outputs:
        if spec is not planes and spec != _size_output(config):
            raise ModelConfigError(
                f"{where}: output '{spec.name}' of image_preprocess: the frame's size is "
                "TYPE_INT32 with dims [2]"
            )


def _undistortion(frame: FrameParameters, planes: TensorSpec) -> UndistortionMap | None:
    if frame.lens is None:
        return None
    lens = frame.lens
    _, height, width = planes.shape
    return UndistortionMap.of_camera(
        np.array(lens.camera_matrix, np.float64),
        np.array(lens.distortion, np.float64),
        frame.crop or CropRegion(0, 0, lens.width, lens.height),
        width,
        height,
    )


def _planes_output(config: ModelConfig) -> TensorSpec | None:
    for spec in config.outputs:
        if spec.datatype in _FLOATS and len(spec.shape) == 3 and spec.shape[0] == 3:
            return spec if min(spec.shape) > 0 else None
    return None


def _size_output(config: ModelConfig) -> TensorSpec | None:
    for spec in config.outputs:
        if spec.datatype is DataType.INT32 and spec.shape == (2,):
            return spec
    return None


def _crop(text: str) -> CropRegion:
    numbers = _parts(text, ",", int)
    region = CropRegion(*numbers) if len(numbers) == 4 else CropRegion(0, 0, 0, 0)
    if not region.is_within(MAX_SIDE_PX, MAX_SIDE_PX):
        raise ValueError(
            f"'crop' is '{text}'; it is x,y,width,height in px of the frame, for example "
            f"0,360,1920,720, and ends within {MAX_SIDE_PX} px"
        )
    return region


def _lens(texts: ImagePreprocessParameters) -> FrameLens | None:
    given = {
        "camera_matrix": texts.camera_matrix,
        "distortion": texts.distortion,
        "calibrated_size": texts.calibrated_size,
    }
    missing = [name for name, text in given.items() if not text]
    if len(missing) == len(given):
        return None
    if missing:
        raise ValueError(
            f"'{missing[0]}' is missing; undistortion takes 'camera_matrix', 'distortion' and "
            "'calibrated_size' together, or none of them"
        )
    matrix = _parts(texts.camera_matrix, ",", float)
    if len(matrix) != 4 or min(matrix[:2]) <= 0:
        raise ValueError(
            f"'camera_matrix' is '{texts.camera_matrix}'; it is fx,fy,cx,cy in px of a frame of "
            "'calibrated_size', fx and fy more than 0"
        )
    distortion = _parts(texts.distortion, ",", float)
    if len(distortion) not in _DISTORTION_COUNTS:
        raise ValueError(
            f"'distortion' is '{texts.distortion}'; it is k1,k2,p1,p2[,k3[,k4,k5,k6[,s1,s2,s3,s4"
            "[,tau_x,tau_y]]]], as cv2.calibrateCamera gives them"
        )
    fx, fy, cx, cy = matrix
    width, height = _size(texts.calibrated_size)
    return FrameLens(((fx, 0.0, cx), (0.0, fy, cy), (0.0, 0.0, 1.0)), distortion, width, height)


def _size(text: str) -> tuple[int, int]:
    numbers = _parts(text, "x", int)
    if len(numbers) != 2 or min(numbers) < 1 or max(numbers) > MAX_SIDE_PX:
        raise ValueError(
            f"'calibrated_size' is '{text}'; it is the width and height in px of the frames that "
            f"the camera was calibrated with, for example 1920x1080, at most {MAX_SIDE_PX} each"
        )
    return numbers[0], numbers[1]


def _parts(text: str, separator: str, kind: type[_Number]) -> tuple[_Number, ...]:
    """Return the finite numbers in `text`; an empty tuple where one part is no finite number."""
    try:
        numbers = tuple(kind(each) for each in text.split(separator))
        return numbers if all(map(math.isfinite, numbers)) else ()
    except (ValueError, OverflowError):
        return ()
