"""The kernels on this CPU, and frames in memory that ends where they end."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from support.integer_colours import COLOURS, bgr_by_integers, random_image

from edge_server.backends.vision.preprocess_cpu import scale_frame
from edge_server.gpu.preprocess_kernel import (
    FrameAddress,
    FrameLayout,
    FramePreprocess,
    Launch,
)
from edge_server.pixels import Colour, CropRegion, Image, PixelFormat

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.backends.vision.image_preprocess_config import UndistortionMap

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NO_ACCESS = 0


class Guarded:
    """Bytes at the end (or the beginning) of memory whose neighbours cannot be touched.

    A kernel that reads or writes one byte beyond dies on the spot.
    """

    def __init__(self, size_bytes: int, *, at_end: bool = True) -> None:
        page = mmap.PAGESIZE
        pages = -(-size_bytes // page)
        self._memory = mmap.mmap(-1, (pages + 2) * page)
        whole = np.frombuffer(self._memory, np.uint8)
        start = whole.ctypes.data
        for guard in (start, start + (pages + 1) * page):
            assert _libc.mprotect(guard, page, _NO_ACCESS) == 0
        first = (pages + 1) * page - size_bytes if at_end else page
        self.bytes = whole[first : first + size_bytes]
        self.address = start + first


class Plane:
    """Rows of bytes with junk between them, guarded on both sides."""

    def __init__(self, rows: np.ndarray, gap_bytes: int, *, at_end: bool) -> None:
        height, row_bytes = rows.shape
        self.stride_bytes = row_bytes + gap_bytes
        # The last row has no gap after it.
        self._memory = Guarded(self.stride_bytes * height - gap_bytes, at_end=at_end)
        self._memory.bytes[:] = 0xEE
        self.view = np.lib.stride_tricks.as_strided(
            self._memory.bytes, (height, row_bytes), (self.stride_bytes, 1)
        )
        self.view[:] = rows
        self.address = self._memory.address


class CameraFrame:
    """A frame as a camera gives it; the same bytes for the kernel and for who checks it."""

    def __init__(self, image: Image, *, gap_bytes: int = 0, at_end: bool = True) -> None:
        self._planes = [
            Plane(plane.reshape(len(plane), -1), gap_bytes, at_end=at_end) for plane in image.planes
        ]
        views = (
            plane.view.reshape(given.shape)
            for plane, given in zip(self._planes, image.planes, strict=True)
        )
        # Read where the kernel reads.
        self.image = Image(image.pixel_format, tuple(views), image.colour)
        strides = [plane.stride_bytes for plane in self._planes]
        self.layout = FrameLayout(image.pixel_format, image.width, image.height, *strides[:2])
        self.address = FrameAddress(*(plane.address for plane in self._planes))

    @classmethod
    def random(
        cls,
        pixel_format: PixelFormat,
        width: int,
        height: int,
        seed: int = 0,
        *,
        colour: Colour = COLOURS[0],
        gap_bytes: int = 0,
        at_end: bool = True,
    ) -> CameraFrame:
        image = random_image(pixel_format, width, height, seed, colour)
        return cls(image, gap_bytes=gap_bytes, at_end=at_end)


@dataclass(frozen=True)
class DesiredModel:
    """What is made of a frame."""

    width: int
    height: int
    scale: float = 1 / 255
    half: bool = False
    region: CropRegion | None = None
    undistortion: UndistortionMap | None = None
    # Bytes by which the output misses an alignment to 16.
    out_offset_bytes: int = 0

    @property
    def dtype(self) -> type[np.float16] | type[np.float32]:
        return np.float16 if self.half else np.float32


def by_integers(frame: CameraFrame, wish: DesiredModel) -> np.ndarray:
    """(3, H, W) in whole numbers, times `scale`."""
    size = (wish.width, wish.height)
    bgr = bgr_by_integers(frame.image, *size, wish.region, wish.undistortion)
    scaled = bgr.transpose(2, 0, 1) * np.float32(wish.scale)
    return scaled.astype(wish.dtype)


def by_cpu(frame: CameraFrame, wish: DesiredModel) -> np.ndarray:
    """(3, H, W) as the backend makes it on the CPU, by the OpenCV that is here."""
    out = np.empty((3, wish.height, wish.width), wish.dtype)
    scale_frame(frame.image, np.float32(wish.scale), out, wish.undistortion, wish.region)
    return out


class Shim:
    """`preprocess.cu` on this CPU."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.take_copied_bytes.restype = ctypes.c_uint64

    def launch(self, launch: Launch) -> None:
        """As cuLaunchKernel takes it: kernelParams, one pointer per parameter."""
        args = ctypes.create_string_buffer(launch.args, len(launch.args))
        params = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        run = getattr(self._library, f"launch_{launch.kernel}")
        run.restype = None
        run(params, *launch.grid, *launch.block)

    def take_copied_bytes(self) -> int:
        """What was read from frames in 16-byte words since the last call."""
        taken = self._library.take_copied_bytes()
        assert isinstance(taken, int)
        return taken

    def run(self, frames: list[CameraFrame], wish: DesiredModel) -> np.ndarray:
        """(frames, 3, H, W), as the kernel writes it."""
        undistortion = None
        if wish.undistortion is not None:
            positions = np.ascontiguousarray(wish.undistortion.positions)
            fractions = np.ascontiguousarray(wish.undistortion.fractions)
            undistortion = (positions.ctypes.data, fractions.ctypes.data)
        preprocess = FramePreprocess(
            frames[0].layout,
            wish.width,
            wish.height,
            scale=wish.scale,
            half=wish.half,
            colour=frames[0].image.colour,
            region=wish.region,
            undistortion=undistortion,
        )
        shape = (len(frames), 3, wish.height, wish.width)
        size_bytes = int(np.prod(shape)) * np.dtype(wish.dtype).itemsize
        # Rounded up: what is not the output's must keep its bytes.
        memory = Guarded(-(-(size_bytes + wish.out_offset_bytes) // 16) * 16, at_end=True)
        memory.bytes[:] = 0x5A
        first = wish.out_offset_bytes
        addresses = [frame.address for frame in frames]
        self.launch(preprocess.launch(addresses, memory.address + first))
        assert (memory.bytes[:first] == 0x5A).all()
        assert (memory.bytes[first + size_bytes :] == 0x5A).all()
        made = memory.bytes[first : first + size_bytes].copy()
        return made.view(wish.dtype).reshape(shape)


class BuildShim(Protocol):
    def __call__(self, source: Path) -> Shim: ...
