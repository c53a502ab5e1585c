"""The compiled preprocessing kernels, by GPU and driver, and the arguments of their launches.

`preprocess.cu` holds two kernels for each pixel format, `preprocess_args.h` declares their
arguments; only this module fills that struct. It computes sizes and addresses without CUDA, so it
runs and is tested on any machine; the caller passes the result to the driver.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from edge_server.errors import Unavailable
from edge_server.gpu.device import version_text
from edge_server.pixels import Colour, CropRegion, PixelFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

# Compute capability → image, and the oldest driver that loads the image; the last entry not newer
# than the GPU applies. scripts/build_kernels gives the reasons. Code for 8.0 also runs on 8.6 and
# 8.9.
_IMAGES = {
    (7, 5): ("preprocess_sm_75.cubin", 11040),
    (8, 0): ("preprocess_sm_80.cubin", 11040),
    (8, 7): ("preprocess_sm_87.cubin", 11040),
    (8, 8): ("preprocess_sm_80.cubin", 11040),
    (9, 0): ("preprocess_sm_90.cubin", 11080),
    (10, 0): ("preprocess.fatbin", 13000),
}


def image_name(compute_capability: tuple[int, int], driver_version: int) -> str:
    """Return the file in this directory that a driver can load for its GPU.

    Args:
        compute_capability: of the GPU, (8, 7) for an Orin; `OLDEST_CAPABILITY` or newer.
        driver_version: the newest CUDA version that the driver supports, as cuDriverGetVersion
            returns it: 12060 for 12.6.
    """
    name, needed = _IMAGES[max(known for known in _IMAGES if known <= compute_capability)]
    if driver_version < needed:
        raise Unavailable(
            f"the preprocessing kernels need a driver for CUDA {version_text(needed)} or newer, "
            f"this one is for {version_text(driver_version)}; update the driver, or preprocess on "
            "the CPU (instance_group KIND_CPU)"
        )
    return name


def kernel_image(compute_capability: tuple[int, int], driver_version: int) -> bytes:
    """Return the image's bytes, in the form that cuModuleLoadData takes; see `image_name`."""
    name = image_name(compute_capability, driver_version)
    return (resources.files("edge_server.gpu") / "kernels" / name).read_bytes()


MAX_FRAMES = 16
# A map stores a pixel's position in 16 signed bits; OpenCV has the same bound.
MAX_SIDE_PX = 32767

# preprocess_args.h gives the reasons for these.
_LANES = 32
_STAGED_BYTES = 24576

_DEFAULT_COLOUR = Colour()


class PreprocessArgs(ctypes.Structure):
    """`struct PreprocessArgs` of preprocess_args.h, field by field."""

    _fields_: ClassVar = [
        ("out", ctypes.c_uint64),
        ("map_position", ctypes.c_uint64),
        ("map_fraction", ctypes.c_uint64),
        ("pixels", ctypes.c_uint64 * MAX_FRAMES),
        ("chroma", ctypes.c_uint64 * MAX_FRAMES),
        ("chroma_v", ctypes.c_uint64 * MAX_FRAMES),
        ("step_x", ctypes.c_double),
        ("step_y", ctypes.c_double),
        ("chroma_step_x", ctypes.c_double),
        ("chroma_step_y", ctypes.c_double),
        ("pixels_stride_bytes", ctypes.c_int32),
        ("chroma_stride_bytes", ctypes.c_int32),
        ("frame_width", ctypes.c_int32),
        ("frame_height", ctypes.c_int32),
        ("region_x", ctypes.c_int32),
        ("region_y", ctypes.c_int32),
        ("region_width", ctypes.c_int32),
        ("region_height", ctypes.c_int32),
        ("chroma_region_x", ctypes.c_int32),
        ("chroma_region_y", ctypes.c_int32),
        ("chroma_region_width", ctypes.c_int32),
        ("chroma_region_height", ctypes.c_int32),
        ("out_width", ctypes.c_int32),
        ("out_height", ctypes.c_int32),
        ("tile_width", ctypes.c_int32),
        ("out_is_half", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("black", ctypes.c_int32),
        ("luma", ctypes.c_int32),
        ("blue_u", ctypes.c_int32),
        ("green_u", ctypes.c_int32),
        ("green_v", ctypes.c_int32),
        ("red_v", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class Launch:
    """One kernel launch: `args` is the kernel's single parameter, by value; no dynamic shared
    memory."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: bytes


class FrameAddress(NamedTuple):
    """Device addresses of a frame's planes, of any alignment; 0 for planes that it does not have.

    `chroma` is NV12's second plane, or I420's U; `chroma_v` is I420's V.
    """

    pixels: int
    chroma: int = 0
    chroma_v: int = 0


_BYTES_PER_PIXEL = {PixelFormat.BGR: 3, PixelFormat.YUY2: 2}
_PLANES = {PixelFormat.NV12: 2, PixelFormat.I420: 3}


@dataclass(frozen=True)
class FrameLayout:
    """A frame's format, size in px, and row strides in bytes: of the first plane, and of the planes
    behind it, where there are some."""

    pixel_format: PixelFormat
    width: int
    height: int
    stride_bytes: int
    chroma_stride_bytes: int = 0

    @classmethod
    def packed(cls, pixel_format: PixelFormat, width: int, height: int) -> FrameLayout:
        chroma = _chroma_row_bytes(pixel_format, width)
        return cls(pixel_format, width, height, _row_bytes(pixel_format, width), chroma)

    @property
    def planes(self) -> int:
        return _PLANES.get(self.pixel_format, 1)

    def address(self, first: int) -> FrameAddress:
        """Return the addresses of a frame at `first` whose planes follow each other."""
        chroma = first + self.height * self.stride_bytes
        chroma_v = chroma + self.height // 2 * self.chroma_stride_bytes
        return FrameAddress(*(first, chroma, chroma_v)[: self.planes])


def _row_bytes(pixel_format: PixelFormat, width: int) -> int:
    return width * _BYTES_PER_PIXEL.get(pixel_format, 1)


def _chroma_row_bytes(pixel_format: PixelFormat, width: int) -> int:
    return {PixelFormat.NV12: width, PixelFormat.I420: width // 2}.get(pixel_format, 0)


def size_fault(pixel_format: PixelFormat, width: int, height: int) -> str:
    """Return why there is no frame of that size in px; empty where there is."""
    if not (0 < width <= MAX_SIDE_PX and 0 < height <= MAX_SIDE_PX):
        return f"a side has at most {MAX_SIDE_PX} px"
    if pixel_format.has_chroma and width % 2:
        return f"the width of {pixel_format.value} frames is even"
    if pixel_format.is_subsampled and height % 2:
        return f"the height of {pixel_format.value} frames is even"
    return ""


def kernel_name(pixel_format: PixelFormat, *, undistorted: bool) -> str:
    return f"{pixel_format.value}_to_nchw" + ("_undistorted" if undistorted else "")


class FramePreprocess:
    """Converts frames of one layout to a network's input of one size; immutable.

    The output is (frames, 3, out_height, out_width), planes B, G, R, C order: float32, or IEEE half
    if `half`. Its values equal those of `backends.vision.preprocess_cpu` bit for bit.

    Args:
        frame, out_width, out_height, region: valid, see `size_fault` and `CropRegion.is_within`.
        colour: what the values of YUV and GREY frames mean.
        region: the region of the frame that is resized; the whole frame if None. Pixels outside are
            never mixed in.
        undistortion: device addresses of a map's positions and fractions, (out_height, out_width,
            2) int16 and (out_height, out_width) uint16, as in `preprocess_cpu.UndistortionMap`;
            None resizes. A map includes its own region.
    """

    def __init__(
        self,
        frame: FrameLayout,
        out_width: int,
        out_height: int,
        *,
        scale: float,
        half: bool = False,
        colour: Colour = _DEFAULT_COLOUR,
        region: CropRegion | None = None,
        undistortion: tuple[int, int] | None = None,
    ) -> None:
        region = region or CropRegion(0, 0, frame.width, frame.height)
        chroma = region.of_chroma(frame.pixel_format)
        step_x, chroma_step_x = _step(region.width, out_width), _step(chroma.width, out_width)
        self._kernel = kernel_name(frame.pixel_format, undistorted=undistortion is not None)
        if undistortion is None:
            columns = [(region.width, step_x), (chroma.width, chroma_step_x)]
            tile_width, tile_height = _tile(frame.pixel_format, columns)
        else:
            tile_width, tile_height = _TILE_WIDTHS[0], _TILE_HEIGHTS[0]
        self._grid = (math.ceil(out_width / tile_width), math.ceil(out_height / tile_height))
        self._block = (_LANES, tile_height, 1)
        is_bgr = frame.pixel_format is PixelFormat.BGR
        black, luma, blue_u, green_u, green_v, red_v = colour.to_bgr
        self._args = PreprocessArgs(
            map_position=undistortion[0] if undistortion else 0,
            map_fraction=undistortion[1] if undistortion else 0,
            step_x=step_x,
            step_y=_step(region.height, out_height),
            chroma_step_x=chroma_step_x,
            chroma_step_y=_step(chroma.height, out_height),
            pixels_stride_bytes=frame.stride_bytes,
            chroma_stride_bytes=frame.chroma_stride_bytes,
            frame_width=frame.width,
            frame_height=frame.height,
            region_x=region.x,
            region_y=region.y,
            region_width=region.width,
            region_height=region.height,
            chroma_region_x=chroma.x,
            chroma_region_y=chroma.y,
            chroma_region_width=chroma.width,
            chroma_region_height=chroma.height,
            out_width=out_width,
            out_height=out_height,
            tile_width=tile_width,
            out_is_half=half,
            scale=scale,
            black=0 if is_bgr else black,
            luma=luma,
            blue_u=blue_u,
            green_u=green_u,
            green_v=green_v,
            red_v=red_v,
        )

    def launch(self, frames: Sequence[FrameAddress], out: int) -> Launch:
        """Return the launch that writes 1 to `MAX_FRAMES` frames to the device address `out`.

        With `out` a multiple of 16 and the width a multiple of 4 px the kernel uses wide stores;
        any address aligned to the elements works.
        """
        args = PreprocessArgs.from_buffer_copy(self._args)
        args.out = out
        for i, frame in enumerate(frames):
            args.pixels[i], args.chroma[i], args.chroma_v[i] = frame
        return Launch(self._kernel, (*self._grid, len(frames)), self._block, bytes(args))


_TILE_WIDTHS = (128, 64, 32, 16, 8, 4, 2, 1)
_TILE_HEIGHTS = (8, 4, 2, 1)


def _step(region: int, out: int) -> float:
    """Return the px of the region per px of the output, to the bit as OpenCV computes it: by way of
    the inverse; the plain quotient differs in the last bit."""
    return 1.0 / (out / region)


def _tile(pixel_format: PixelFormat, columns: list[tuple[int, float]]) -> tuple[int, int]:
    """Return the largest output tile whose part of the frame fits into shared memory.

    A narrow tile leaves lanes idle, a low one only makes smaller blocks; so height shrinks first.
    One column needs two pixels, which always fit.

    Args:
        columns: the width of the region and its step, of the first plane and of the chroma.
    """
    tiles = [(_TILE_WIDTHS[0], height) for height in _TILE_HEIGHTS]
    tiles += [(width, 1) for width in _TILE_WIDTHS[1:]]
    for width, height in tiles:
        # From the first column's left tap to the last column's right tap; 1 for the floor of each.
        pixels, chroma = (
            min(region, math.ceil((width - 1) * step) + 3) for region, step in columns
        )
        # Two rows of the frame for each output row.
        if 2 * height * _staged_bytes(pixel_format, pixels, chroma) <= _STAGED_BYTES:
            return width, height
    raise AssertionError("a tile of one column fits")


def _staged_bytes(pixel_format: PixelFormat, pixels: int, chroma: int) -> int:
    """Return the shared memory for one row of each plane, which may begin anywhere in a 16-byte
    word."""

    def words(row_bytes: int) -> int:
        return (row_bytes + 30) & ~15

    match pixel_format:
        case PixelFormat.BGR:
            return words(3 * pixels)
        case PixelFormat.GREY:
            return words(pixels)
        case PixelFormat.YUY2:
            # The chroma of the first and last column lies up to 4 px beside their luma.
            return words(2 * (pixels + 8))
        case PixelFormat.NV12:
            return words(pixels) + words(2 * chroma)
        case PixelFormat.I420:
            return words(pixels) + 2 * words(chroma)
