"""The `parameters` of an `image_preprocess` model, parsed and validated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.backends.parameters import Parameters, read_parameters
from edge_server.gpu.kernels.preprocess import MAX_SIDE_PX, CropRegion, PixelFormat

if TYPE_CHECKING:
    from edge_server.model_config.config import ModelConfig

# k1 k2 p1 p2, k3, k4 k5 k6, thin prism, tilt: the counts that cv2.calibrateCamera returns.
_DISTORTION_COUNTS = (4, 5, 8, 12, 14)


class ImagePreprocessParameters(Parameters, frozen=True):
    """The parameters in config.pbtxt; see `image_preprocess`."""

    scale: float = 1 / 255
    pixel_format: str = "bgr"
    crop: str = ""
    camera_matrix: str = ""
    distortion: str = ""
    calibrated_size: str = ""


@dataclass(frozen=True)
class Lens:
    """A camera's calibration; pixels are those of frames of `width` x `height`."""

    camera_matrix: tuple[tuple[float, float, float], ...]
    distortion: tuple[float, ...]
    width: int
    height: int


@dataclass(frozen=True)
class FrameParameters:
    """Pixel format, crop and lens of a model's frames.

    Attributes:
        crop: region of the frame, or of the undistorted frame, to resize; None for the whole frame.
        lens: the lens whose distortion is removed; None without undistortion.
    """

    scale: float
    pixel_format: PixelFormat
    crop: CropRegion | None
    lens: Lens | None

    @staticmethod
    def of(config: ModelConfig) -> FrameParameters:
        """Parse the parameters.

        Raises:
            ValueError: a value is invalid, alone or beside the others; the text names the remedy.
        """
        parameters = read_parameters(config, ImagePreprocessParameters)
        pixel_format = _pixel_format(parameters.pixel_format)
        crop = _crop(parameters.crop) if parameters.crop else None
        lens = _lens(parameters)
        if lens is not None:
            fault = even_fault(pixel_format, lens.width, lens.height)
            if fault:
                raise ValueError(f"'calibrated_size' is '{parameters.calibrated_size}': {fault}")
            if crop is not None and not fits(crop, lens.width, lens.height):
                raise ValueError(
                    f"'crop' is '{parameters.crop}', which is not within the undistorted frame of "
                    f"{lens.width}x{lens.height} px ('calibrated_size'); make it smaller"
                )
        return FrameParameters(parameters.scale, pixel_format, crop, lens)


def fits(region: CropRegion, width: int, height: int) -> bool:
    """Return whether the whole region lies within a frame of that size, in px."""
    return region.x + region.width <= width and region.y + region.height <= height


def even_fault(pixel_format: PixelFormat, width: int, height: int) -> str:
    """Return why the format does not allow a frame of that size in px; empty when it does."""
    name = pixel_format.value
    if pixel_format is not PixelFormat.BGR and width % 2:
        return f"the width of {name} frames is even"
    if pixel_format is PixelFormat.NV12 and height % 2:
        return f"the height of {name} frames is even"
    return ""


def _pixel_format(text: str) -> PixelFormat:
    try:
        return PixelFormat(text)
    except ValueError:
        known = ", ".join(each.value for each in PixelFormat)
        raise ValueError(f"'pixel_format' is '{text}'; it is one of {known}") from None


def _crop(text: str) -> CropRegion:
    try:
        x, y, width, height = (int(each) for each in text.split(","))
    except ValueError:
        x = y = width = height = -1
    if min(x, y) < 0 or min(width, height) < 1 or max(x + width, y + height) > MAX_SIDE_PX:
        raise ValueError(
            f"'crop' is '{text}'; it is x,y,width,height in px of the frame, for example "
            f"0,360,1920,720, and ends within {MAX_SIDE_PX} px"
        )
    return CropRegion(x, y, width, height)


def _lens(texts: ImagePreprocessParameters) -> Lens | None:
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
    matrix = _numbers(texts.camera_matrix)
    if len(matrix) != 4 or min(matrix[:2]) <= 0:
        raise ValueError(
            f"'camera_matrix' is '{texts.camera_matrix}'; it is fx,fy,cx,cy in px of a frame of "
            "'calibrated_size', fx and fy more than 0"
        )
    distortion = _numbers(texts.distortion)
    if len(distortion) not in _DISTORTION_COUNTS:
        raise ValueError(
            f"'distortion' is '{texts.distortion}'; it is k1,k2,p1,p2[,k3[,k4,k5,k6[,s1,s2,s3,s4"
            "[,tau_x,tau_y]]]], as cv2.calibrateCamera gives them"
        )
    fx, fy, cx, cy = matrix
    width, height = _size(texts.calibrated_size)
    return Lens(((fx, 0.0, cx), (0.0, fy, cy), (0.0, 0.0, 1.0)), distortion, width, height)


def _numbers(text: str) -> tuple[float, ...]:
    """Return the finite numbers between commas; an empty tuple where one part is no finite
    number."""
    try:
        numbers = tuple(float(each) for each in text.split(","))
    except ValueError:
        return ()
    return numbers if all(map(math.isfinite, numbers)) else ()


def _size(text: str) -> tuple[int, int]:
    try:
        width, height = (int(each) for each in text.split("x"))
    except ValueError:
        width = height = 0
    if not (0 < width <= MAX_SIDE_PX and 0 < height <= MAX_SIDE_PX):
        raise ValueError(
            f"'calibrated_size' is '{text}'; it is the width and height in px of the frames that "
            f"the camera was calibrated with, for example 1920x1080, at most {MAX_SIDE_PX} each"
        )
    return width, height
