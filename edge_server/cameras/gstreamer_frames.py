"""Frames in GStreamer's samples: pixels without a copy, colours, timestamps."""

from __future__ import annotations

import ctypes
import time
import weakref
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edge_server.cameras.frame import PictureTooLarge, check_size
from edge_server.cameras.live_source import Picture
from edge_server.errors import SourceError
from edge_server.pixels import Colour, ColourMatrix, ColourRange, Image, PixelFormat
from edge_server.process.threads import start_future

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from edge_server.cameras.source_uri import SourceOptions

# NTP counts from 1900, Unix from 1970.
_NTP_TO_UNIX_NS = 2_208_988_800 * 1_000_000_000
_FORMATS = {
    "NV12": PixelFormat.NV12,
    "I420": PixelFormat.I420,
    "YUY2": PixelFormat.YUY2,
    "BGR": PixelFormat.BGR,
    "GRAY8": PixelFormat.GREY,
}


class GstreamerApi(NamedTuple):
    """The modules of `gi.repository`."""

    gst: Any
    video: Any


@lru_cache(maxsize=1)
def load_gstreamer() -> GstreamerApi:
    """Import and start GStreamer.

    Raises:
        ImportError: PyGObject is missing, or belongs to another Python.
        ValueError: GStreamer's typelibs are missing.
    """
    import gi  # noqa: PLC0415  # no dependency

    gi.require_version("Gst", "1.0")
    gi.require_version("GstApp", "1.0")
    gi.require_version("GstRtsp", "1.0")
    gi.require_version("GstVideo", "1.0")
    # GstApp and GstRtsp give appsink and messages their methods, which are used by name.
    from gi.repository import Gst, GstApp, GstRtsp, GstVideo  # noqa: F401, PLC0415

    Gst.init(None)
    return GstreamerApi(Gst, GstVideo)


@lru_cache(maxsize=1)
def loading_gstreamer() -> Future[GstreamerApi] | None:
    """Call `load_gstreamer` on a thread of its own, once in the process; None where the system
    refuses one. Where GStreamer's list of plugins is missing or out of date, it looks through all
    of them, which takes long on a slow disk."""
    return start_future("load-gstreamer", load_gstreamer)


class SampleReader:
    """Reads the samples of one pipeline.

    Attributes:
        period_s: of the newest one, from its caps; 0 where they have none.

    Args:
        api: GStreamer.
        pipeline: whose clock stamps the samples.
        options: has colours that override those in the caps.
    """

    def __init__(self, api: GstreamerApi, pipeline: Any, options: SourceOptions) -> None:
        self.period_s = 0.0
        self._api = api
        self._pipeline = pipeline
        self._options = options
        self._layout: tuple[Any, _Layout] | None = None
        self._map = _mapping_of(api.gst)
        self._ntp_caps = api.gst.Caps.from_string("timestamp/x-ntp")

    def read(self, sample: Any) -> Picture:
        """Return the picture in a sample that the appsink gave.

        Raises:
            ValueError: the decoder marked it as damaged.
            SourceError: its pixel format is none of `PixelFormat`, or it is larger than
                `LARGEST_PX`.
        """
        caps, buffer = sample.get_caps(), sample.get_buffer()
        if self._layout is None or not self._layout[0].is_equal(caps):
            self._layout = caps, _layout_of(self._api, caps, self._options)
        layout = self._layout[1]
        self.period_s = layout.period_ns / 1e9
        if buffer.has_flags(self._api.gst.BufferFlags.CORRUPTED):
            raise ValueError("the decoder marks it so")
        pixels, unmap = self._map(buffer)
        # The mapping, and with it the buffer, lives as long as any view of the pixels.
        weakref.finalize(pixels, unmap).atexit = False
        meta = self._api.video.buffer_get_video_meta(buffer)
        image = layout.image(
            pixels,
            layout.offsets if meta is None else meta.offset,
            layout.strides if meta is None else meta.stride,
        )
        return Picture(image, *self._stamps(sample, buffer))

    def _stamps(self, sample: Any, buffer: Any) -> tuple[int | None, int | None]:
        gst = self._api.gst
        if buffer.pts == gst.CLOCK_TIME_NONE:
            return None, None
        running_ns = sample.get_segment().to_running_time(gst.Format.TIME, buffer.pts)
        clock = self._pipeline.get_clock()
        if running_ns == gst.CLOCK_TIME_NONE or clock is None:
            return None, None
        # The pipeline's clock is CLOCK_MONOTONIC, or is read beside it.
        age_ns = clock.get_time() - self._pipeline.get_base_time() - running_ns
        stamp_ns = time.monotonic_ns() - age_ns
        reference = buffer.get_reference_timestamp_meta(self._ntp_caps)
        if reference is None:
            return stamp_ns, None
        unix_ns = reference.timestamp - _NTP_TO_UNIX_NS
        return stamp_ns, time.monotonic_ns() - (time.time_ns() - unix_ns)


@dataclass(frozen=True)
class _Layout:
    """What the caps say of every frame."""

    pixel_format: PixelFormat
    width: int
    height: int
    strides: tuple[int, ...]
    offsets: tuple[int, ...]
    colour: Colour
    period_ns: int

    def image(self, pixels: NDArray[np.uint8], offsets: Any, strides: Any) -> Image:
        """Return the image in a buffer's `pixels`; the planes are views of them."""
        planes = []
        for number, shape in enumerate(self.pixel_format.shapes(self.width, self.height)):
            steps = (strides[number], *shape[2:], 1)
            planes.append(np.ndarray(shape, np.uint8, pixels, offsets[number], steps))
        return Image(self.pixel_format, tuple(planes), self.colour)


def _layout_of(api: GstreamerApi, caps: Any, options: SourceOptions) -> _Layout:
    info = api.video.VideoInfo.new_from_caps(caps)
    structure = caps.get_structure(0)
    pixel_format = _FORMATS.get(structure.get_string("format") or "")
    if info is None or pixel_format is None:
        raise SourceError(
            f"the pipeline gives {caps.to_string()}; end it in raw video: NV12, I420, YUY2, BGR "
            "or GRAY8",
            reason="corrupt",
        )
    width, height = info.width, info.height
    try:
        check_size(width, height)
    except PictureTooLarge as error:
        raise SourceError(str(error), reason="unavailable") from None
    if pixel_format not in (PixelFormat.BGR, PixelFormat.GREY):
        # A last odd row or column has half a chroma sample, and no model needs it.
        width &= ~1
    if pixel_format.is_subsampled:
        height &= ~1
    matrices, full = api.video.VideoColorMatrix, getattr(api.video.VideoColorRange, "0_255")
    colorimetry = info.colorimetry
    # BT.2020's weights are nearest to BT.709's.
    high = colorimetry.matrix in (matrices.BT709, matrices.SMPTE240M, matrices.BT2020)
    colour = Colour(
        options.matrix or (ColourMatrix.BT709 if high else ColourMatrix.BT601),
        options.range or (ColourRange.FULL if colorimetry.range == full else ColourRange.LIMITED),
    )
    period_ns = 1_000_000_000 * info.fps_d // info.fps_n if info.fps_n else 0
    return _Layout(
        pixel_format, width, height, tuple(info.stride), tuple(info.offset), colour, period_ns
    )


def _mapping_of(gst: Any) -> Callable[[Any], tuple[NDArray[np.uint8], Callable[[], None]]]:
    """Return how a buffer is mapped without a copy: into its bytes, and what unmaps it. gst-python
    (Debian's python3-gst-1.0) gives a memoryview; PyGObject alone copies, so then C maps it."""
    buffer = gst.Buffer.new_allocate(None, 16, None)
    mapped = buffer.map(gst.MapFlags.READ)
    is_view = isinstance(getattr(mapped, "data", None), memoryview)
    buffer.unmap(mapped if is_view else mapped[1])
    return partial(_map_by_gst_python, gst.MapFlags.READ) if is_view else _map_by_c


def _map_by_gst_python(read: Any, buffer: Any) -> tuple[NDArray[np.uint8], Callable[[], None]]:
    info = buffer.map(read)
    return np.frombuffer(info.data, np.uint8), partial(buffer.unmap, info)


_MAP_READ = 1


class _MapInfo(ctypes.Structure):
    """GstMapInfo of gstmemory.h."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("maxsize", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p * 4),
        ("_gst_reserved", ctypes.c_void_p * 4),
    )


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libgstreamer-1.0.so.0")
    for name in ("gst_buffer_map", "gst_buffer_unmap"):
        getattr(library, name).argtypes = [
            ctypes.c_void_p,
            ctypes.POINTER(_MapInfo),
            *[ctypes.c_int] * (name == "gst_buffer_map"),
        ]
    return library


def _map_by_c(buffer: Any) -> tuple[NDArray[np.uint8], Callable[[], None]]:
    library, info = _library(), _MapInfo()
    # A boxed object's hash is the address of what it wraps.
    if not library.gst_buffer_map(hash(buffer), ctypes.byref(info), _MAP_READ):
        raise SourceError("a frame's memory cannot be read", reason="corrupt")
    memory = (ctypes.c_ubyte * info.size).from_address(info.data)
    pixels: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    pixels.flags.writeable = False

    def unmap() -> None:
        library.gst_buffer_unmap(hash(buffer), ctypes.byref(info))

    return pixels, unmap
