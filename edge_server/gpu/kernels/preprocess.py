"""Geometry and arguments of the preprocessing kernels' launches, without CUDA.

`preprocess.cu` holds six kernels, `preprocess_args.h` declares their arguments; only this module
fills that struct. The module only computes sizes and addresses, so it runs and is tested on any
machine; the caller passes the result to the driver.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from edge_server.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_FRAMES = 16
# A map stores a pixel's position in 16 signed bits; OpenCV has the same bound.
MAX_SIDE_PX = 32767

# preprocess_args.h gives the reasons for these.
_LANES = 32
_STAGED_BYTES = 24576


class PixelFormat(Enum):
    """Memory format of a camera's frames: BGR interleaved, NV12 in two planes, YUY2 in pairs of
    pixels."""

    BGR = "bgr"
    NV12 = "nv12"
    YUY2 = "yuy2"


class PreprocessArgs(ctypes.Structure):
    """`struct PreprocessArgs` of preprocess_args.h, field by field."""

    _fields_: ClassVar = [
        ("out", ctypes.c_uint64),
        ("map_position", ctypes.c_uint64),
        ("map_fraction", ctypes.c_uint64),
        ("pixels", ctypes.c_uint64 * MAX_FRAMES),
        ("chroma", ctypes.c_uint64 * MAX_FRAMES),
        ("step_x", ctypes.c_double),
        ("step_y", ctypes.c_double),
        ("pixels_stride_bytes", ctypes.c_int32),
        ("chroma_stride_bytes", ctypes.c_int32),
        ("frame_width", ctypes.c_int32),
        ("frame_height", ctypes.c_int32),
        ("region_x", ctypes.c_int32),
        ("region_y", ctypes.c_int32),
        ("region_width", ctypes.c_int32),
        ("region_height", ctypes.c_int32),
        ("out_width", ctypes.c_int32),
        ("out_height", ctypes.c_int32),
        ("tile_width", ctypes.c_int32),
        ("out_is_half", ctypes.c_int32),
        ("scale", ctypes.c_float),
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


@dataclass(frozen=True)
class CropRegion:
    """A rectangle of a frame in px, whole pixels; any parity, for NV12 and YUY2 too."""

    x: int
    y: int
    width: int
    height: int

    def is_within(self, width: int, height: int) -> bool:
        """Return whether the region is not empty, and lies within a frame of that size in px."""
        return (
            min(self.x, self.y) >= 0
            and min(self.width, self.height) >= 1
            and self.x + self.width <= width
            and self.y + self.height <= height
        )


class FrameAddress(NamedTuple):
    """Device address of a frame, of any alignment. `chroma` is NV12's second plane, otherwise 0."""

    pixels: int
    chroma: int = 0


@dataclass(frozen=True)
class FrameLayout:
    """A frame's format, size in px, and row stride in bytes.

    NV12 has `height` rows of luma and half as many of chroma, YUY2 two bytes per pixel.

    Raises:
        InvalidRequest: the format does not allow the size or the stride.
    """

    pixel_format: PixelFormat
    width: int
    height: int
    stride_bytes: int
    chroma_stride_bytes: int = 0

    @classmethod
    def packed(cls, pixel_format: PixelFormat, width: int, height: int) -> FrameLayout:
        """Return the layout with rows without gaps."""
        chroma = width if pixel_format is PixelFormat.NV12 else 0
        return cls(pixel_format, width, height, width * _BYTES_PER_PIXEL[pixel_format], chroma)

    def __post_init__(self) -> None:
        name = self.pixel_format.name
        if fault := size_fault(self.pixel_format, self.width, self.height):
            raise InvalidRequest(fault)
        row_bytes = self.width * _BYTES_PER_PIXEL[self.pixel_format]
        if self.stride_bytes < row_bytes:
            raise InvalidRequest(
                f"a {name} frame {self.width} px wide has {row_bytes} bytes in a row, "
                f"its stride is {self.stride_bytes}"
            )
        if self.pixel_format is PixelFormat.NV12 and self.chroma_stride_bytes < self.width:
            raise InvalidRequest(
                f"a {name} frame {self.width} px wide has as many bytes in a row of chroma, "
                f"its chroma stride is {self.chroma_stride_bytes}"
            )


_BYTES_PER_PIXEL = {PixelFormat.BGR: 3, PixelFormat.NV12: 1, PixelFormat.YUY2: 2}


def size_fault(pixel_format: PixelFormat, width: int, height: int) -> str:
    """Return why there is no frame of that size in px; empty where there is."""
    if not (0 < width <= MAX_SIDE_PX and 0 < height <= MAX_SIDE_PX):
        return f"a side has at most {MAX_SIDE_PX} px"
    if pixel_format is not PixelFormat.BGR and width % 2:
        return f"the width of {pixel_format.value} frames is even"
    if pixel_format is PixelFormat.NV12 and height % 2:
        return f"the height of {pixel_format.value} frames is even"
    return ""


def kernel_name(pixel_format: PixelFormat, *, undistorted: bool) -> str:
    """Return the name of the kernel in preprocess.cu for such a launch."""
    return f"{pixel_format.value}_to_nchw" + ("_undistorted" if undistorted else "")


class FramePreprocess:
    """Converts frames of one layout to a network's input of one size; immutable.

    The output is (frames, 3, out_height, out_width), planes B, G, R, C order: float32, or IEEE half
    if `half`. Its values equal those of `backends.vision.preprocess_cpu` bit for bit.

    Args:
        frame: the memory layout of every frame.
        out_width, out_height: the network's size in px.
        scale: factor applied to the 8-bit values.
        region: the region of the frame that is resized; the whole frame if None. Pixels outside are
            never mixed in.
        undistortion: device addresses of a map's positions and fractions, (out_height, out_width,
            2) int16 and (out_height, out_width) uint16, as in `preprocess_cpu.UndistortionMap`;
            None resizes. A map includes its own region.

    Raises:
        InvalidRequest: the region lies outside the frame, or the network's size exceeds
            `MAX_SIDE_PX`.
    """

    def __init__(
        self,
        frame: FrameLayout,
        out_width: int,
        out_height: int,
        *,
        scale: float,
        half: bool = False,
        region: CropRegion | None = None,
        undistortion: tuple[int, int] | None = None,
    ) -> None:
        if not (0 < out_width <= MAX_SIDE_PX and 0 < out_height <= MAX_SIDE_PX):
            raise InvalidRequest(
                f"a network input of {out_width}x{out_height} px: each side is 1 to "
                f"{MAX_SIDE_PX} px"
            )
        region = region or CropRegion(0, 0, frame.width, frame.height)
        if not region.is_within(frame.width, frame.height):
            raise InvalidRequest(
                f"the region {region.width}x{region.height} px at {region.x},{region.y} is not "
                f"within the frame of {frame.width}x{frame.height} px"
            )
        # OpenCV computes the step by way of the inverse; the plain quotient differs in the last
        # bit.
        step_x = 1.0 / (out_width / region.width)
        step_y = 1.0 / (out_height / region.height)
        self._kernel = kernel_name(frame.pixel_format, undistorted=undistortion is not None)
        if undistortion is None:
            tile_width, tile_height = _tile(frame.pixel_format, step_x, region.width)
        else:
            tile_width, tile_height = _TILE_WIDTHS[0], _TILE_HEIGHTS[0]
        self._grid = (math.ceil(out_width / tile_width), math.ceil(out_height / tile_height))
        self._block = (_LANES, tile_height, 1)
        self._has_chroma = frame.pixel_format is PixelFormat.NV12
        self._args = PreprocessArgs(
            map_position=undistortion[0] if undistortion else 0,
            map_fraction=undistortion[1] if undistortion else 0,
            step_x=step_x,
            step_y=step_y,
            pixels_stride_bytes=frame.stride_bytes,
            chroma_stride_bytes=frame.chroma_stride_bytes,
            frame_width=frame.width,
            frame_height=frame.height,
            region_x=region.x,
            region_y=region.y,
            region_width=region.width,
            region_height=region.height,
            out_width=out_width,
            out_height=out_height,
            tile_width=tile_width,
            out_is_half=half,
            scale=scale,
        )

    def launch(self, frames: Sequence[FrameAddress], out: int) -> Launch:
        """Return the launch that writes 1 to `MAX_FRAMES` frames to the device address `out`.

        With `out` a multiple of 16 and the width a multiple of 4 px the kernel uses wide stores;
        any address aligned to the elements works.
        """
        if not 1 <= len(frames) <= MAX_FRAMES:
            raise ValueError(f"{len(frames)} frames: a launch takes 1 to {MAX_FRAMES}")
        args = PreprocessArgs.from_buffer_copy(self._args)
        args.out = out
        for i, frame in enumerate(frames):
            if not frame.pixels or self._has_chroma != bool(frame.chroma):
                raise ValueError(f"frame {i}: {frame} does not fit {self._kernel}")
            args.pixels[i], args.chroma[i] = frame
        return Launch(self._kernel, (*self._grid, len(frames)), self._block, bytes(args))


_TILE_WIDTHS = (128, 64, 32, 16, 8, 4, 2, 1)
_TILE_HEIGHTS = (8, 4, 2, 1)


def _tile(pixel_format: PixelFormat, step_x: float, region_width: int) -> tuple[int, int]:
    """Return the largest output tile whose part of the frame fits into shared memory.

    A narrow tile leaves lanes idle, a low one only makes smaller blocks; so height shrinks first.
    One column needs two pixels, which always fit.
    """
    tiles = [(_TILE_WIDTHS[0], height) for height in _TILE_HEIGHTS]
    tiles += [(width, 1) for width in _TILE_WIDTHS[1:]]
    for width, height in tiles:
        # From the first column's left tap to the last column's right tap; 1 for the floor of each.
        pixels = min(region_width, math.ceil((width - 1) * step_x) + 3)
        # Two rows of the frame for each output row.
        if 2 * height * _row_bytes(pixel_format, pixels) <= _STAGED_BYTES:
            return width, height
    raise AssertionError("a tile of one column fits")


def _row_bytes(pixel_format: PixelFormat, pixels: int) -> int:
    """Return the shared memory for `pixels` of one row, which may begin anywhere in a 16-byte
    word."""

    def words(row_bytes: int) -> int:
        return (row_bytes + 30) & ~15

    match pixel_format:
        case PixelFormat.BGR:
            return words(3 * pixels)
        case PixelFormat.YUY2:
            return words(2 * (pixels + 2))
        case PixelFormat.NV12:
            return words(pixels) + words(pixels + 2)
