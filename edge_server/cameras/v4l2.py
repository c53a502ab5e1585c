"""What V4L2 devices offer, read with ioctls (videodev2.h); no image is captured here."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from edge_server.errors import SourceError
from edge_server.process.logs import log_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from edge_server.cameras.source_uri import SourceUri

    Ioctl = Callable[[int, int, bytearray], int]

log = logging.getLogger(__name__)

# The formats of the kernel, by GStreamer's names, in the order of preference at the same size and
# rate: those that go untouched to the preprocessing, then JPEG, which has to be decoded, then what
# has to be converted.
FOURCC_NAMES = {
    "NV12": "NV12",
    "YUYV": "YUY2",
    "YU12": "I420",
    "GREY": "GRAY8",
    "BGR3": "BGR",
    "MJPG": "JPEG",
    "JPEG": "JPEG",
    "UYVY": "UYVY",
    "RGB3": "RGB",
    "NV21": "NV21",
    "YV12": "YV12",
}
_RANKS = tuple(dict.fromkeys(FOURCC_NAMES.values()))
# What `format` of a v4l2 URI may be.
V4L2_FORMATS = {"mjpeg": "JPEG", "yuy2": "YUY2", "nv12": "NV12", "i420": "I420", "grey": "GRAY8"}
# A larger image costs more than a lane network gains from it; a slower one is late.
_LARGEST_PX = 1920 * 1080
_SLOWEST_FPS = 25
_USUAL_FPS = 30
_CAPTURE = 1  # V4L2_BUF_TYPE_VIDEO_CAPTURE
_CAN_CAPTURE = 0x00000001
_HAS_DEVICE_CAPS = 0x80000000
_DISCRETE = 1
# Of a device that takes any size in a range: those that lane cameras use.
_USUAL_SIZES = ((3840, 2160), (1920, 1080), (1280, 720), (640, 480), (640, 360))
# Of a driver that lists no rates: the camera has one of its own.
_OWN_RATE = (Fraction(_USUAL_FPS),)


def _code(direction: int, number: int, size: int) -> int:
    return direction << 30 | size << 16 | ord("V") << 8 | number


_READ, _BOTH = 2, 3
_CAPABILITY = struct.Struct("<16s32s32s6I")
_FORMAT_DESCRIPTION = struct.Struct("<3I32s5I")
_FRAME_SIZE = struct.Struct("<11I")
_FRAME_INTERVAL = struct.Struct("<13I")
_FORMAT_BYTES = 208
VIDIOC_QUERYCAP = _code(_READ, 0, _CAPABILITY.size)
VIDIOC_ENUM_FMT = _code(_BOTH, 2, _FORMAT_DESCRIPTION.size)
VIDIOC_S_FMT = _code(_BOTH, 5, _FORMAT_BYTES)
VIDIOC_ENUM_FRAMESIZES = _code(_BOTH, 74, _FRAME_SIZE.size)
VIDIOC_ENUM_FRAMEINTERVALS = _code(_BOTH, 75, _FRAME_INTERVAL.size)


@dataclass(frozen=True)
class VideoMode:
    """One way in which a device gives images.

    Attributes:
        format: GStreamer's name (YUY2, NV12), or `JPEG`.
        size: width and height in px.
        fps: frames per second.
    """

    format: str
    size: tuple[int, int]
    fps: Fraction

    @property
    def caps(self) -> str:
        """In the notation of gst-launch-1.0."""
        media = "image/jpeg" if self.format == "JPEG" else f"video/x-raw,format={self.format}"
        width, height = self.size
        rate = f"{self.fps.numerator}/{self.fps.denominator}"
        return f"{media},width={width},height={height},framerate={rate}"

    def __str__(self) -> str:
        return f"{self.format} {self.size[0]} x {self.size[1]}, {float(self.fps):g} fps"


@dataclass(frozen=True)
class VideoDevice:
    """A device that captures video.

    Attributes:
        name: of the camera, as the driver gives it.
        driver: uvcvideo, tegra-video, ...
        modes: what it offers in formats that can be read; largest first.
        other_formats: four characters of each other format: raw Bayer of a CSI sensor, H264.
    """

    path: str
    name: str
    driver: str
    modes: tuple[VideoMode, ...]
    other_formats: tuple[str, ...]


def video_devices(folder: Path, ioctl: Ioctl = fcntl.ioctl) -> Iterator[VideoDevice | SourceError]:
    """Yield each capturing device of `folder` (/dev), or why it cannot be looked at.

    Devices that do not capture video, like the metadata node beside each webcam, are left out.
    """
    numbers = (each.name.removeprefix("video") for each in folder.glob("video*"))
    for number in sorted((each for each in numbers if each.isdecimal()), key=int):
        try:
            device = read_device(str(folder / f"video{number}"), ioctl)
        except SourceError as error:
            yield error
            continue
        if device is not None:
            yield device


def read_device(path: str, ioctl: Ioctl = fcntl.ioctl) -> VideoDevice | None:
    """Return what the device at `path` offers; None if it captures no video.

    Raises:
        SourceError: it is not there, closed to this user, or no video device.
    """
    file = _open(path)
    try:
        capability = bytearray(_CAPABILITY.size)
        ioctl(file, VIDIOC_QUERYCAP, capability)
        driver, card, _, _, all_nodes, this_node, *_ = _CAPABILITY.unpack(capability)
        if not (this_node if all_nodes & _HAS_DEVICE_CAPS else all_nodes) & _CAN_CAPTURE:
            return None
        fourccs = list(_formats(file, ioctl))
        modes = {
            VideoMode(FOURCC_NAMES[fourcc], size, fps)
            for fourcc in fourccs
            if fourcc in FOURCC_NAMES
            for size in _sizes(file, ioctl, fourcc)
            for fps in tuple(_rates(file, ioctl, fourcc, size)) or _OWN_RATE
        }
        others = tuple(fourcc for fourcc in fourccs if fourcc not in FOURCC_NAMES)
    except OSError as error:
        raise SourceError(
            f"{path}: {os.strerror(error.errno or 0)}; it is no video device, or was unplugged; "
            "edge-server cameras list shows those that are there",
            reason="unavailable",
        ) from error
    finally:
        os.close(file)
    ordered = sorted(modes, key=lambda mode: (mode.size, mode.fps, mode.format), reverse=True)
    return VideoDevice(path, _text(card), _text(driver), tuple(ordered), others)


def device_mode(uri: SourceUri) -> VideoMode:
    """Return the best mode of a device that its URI allows.

    Raises:
        SourceError: the device cannot be read, or has no such mode; the text says what it has.
    """
    device = read_device(uri.path)
    if device is None or not device.modes:
        raw = f"; it offers {', '.join(device.other_formats)}" if device else ""
        raise uri.fault(
            f"gives no images that can be read{raw}; edge-server cameras list shows "
            "the devices that do, and a CSI sensor is csi://0",
            "no_decoder",
        )
    mode = wanted_mode(uri, device.modes)
    log_once(log, f"{uri.label}: {device.name} takes {mode}, of {len(device.modes)} modes")
    return mode


def wanted_mode(uri: SourceUri, modes: Sequence[VideoMode]) -> VideoMode:
    """Return the best of a device's modes that the URI allows: the largest image of at most 1920 x
    1080 that comes at 25 fps or more, then the rate nearest to 30 fps, then the format that costs
    least. A size, a rate and a format in the URI are the only ones that are taken.

    Raises:
        SourceError: the device has no such mode; the text lists what it has.
    """
    name = V4L2_FORMATS.get(uri.query.get("format", ""), "")
    width, height = (uri.whole(side, 0, 0, 16384) for side in ("width", "height"))
    fps = Fraction(uri.fps() or 0).limit_denominator(1001)
    fitting = [
        mode
        for mode in modes
        if (not width or mode.size == (width, height))
        and (not fps or mode.fps == fps)
        and name in ("", mode.format)
    ]
    if not fitting:
        offered = "; ".join(_summary(modes)) or "no format that can be read"
        size = f"{width} x {height}" if width else ""
        rate = f"{float(fps):g} fps" if fps else ""
        wanted = " ".join(part for part in (name, size, rate) if part) or "mode"
        raise uri.fault(f"the device has no {wanted}; it has: {offered}")
    return max(fitting, key=_rank)


def _rank(mode: VideoMode) -> tuple[bool, bool, int, float, int]:
    area = mode.size[0] * mode.size[1]
    small = area <= _LARGEST_PX
    quick = mode.fps >= _SLOWEST_FPS
    return (
        small,
        quick,
        area if small else -area,
        -abs(float(mode.fps) - _USUAL_FPS),
        -_RANKS.index(mode.format),
    )


def _summary(modes: Iterable[VideoMode]) -> list[str]:
    fastest: dict[tuple[str, tuple[int, int]], Fraction] = {}
    for mode in modes:
        key = (mode.format, mode.size)
        fastest[key] = max(mode.fps, fastest.get(key, mode.fps))
    return [str(VideoMode(name, size, fps)) for (name, size), fps in sorted(fastest.items())]


def check_free(path: str, mode: VideoMode, ioctl: Ioctl = fcntl.ioctl) -> None:
    """Set the device's format, which fails where another program captures from it.

    Raises:
        SourceError: the device is held by another program.
    """
    fourcc = fourcc_of(mode)
    pix = struct.pack("<I4x4I", _CAPTURE, *mode.size, _number(fourcc), 0)
    file = _open(path)
    try:
        ioctl(file, VIDIOC_S_FMT, bytearray(pix.ljust(_FORMAT_BYTES, b"\0")))
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise _busy(path) from error
        raise SourceError(
            f"{path}: {mode}: {os.strerror(error.errno or 0)}; choose another format or size",
            reason="unavailable",
        ) from error
    finally:
        os.close(file)


def fourcc_of(mode: VideoMode) -> str:
    """Return the kernel's four characters for the format of `mode`."""
    return next(fourcc for fourcc, name in FOURCC_NAMES.items() if name == mode.format)


def _busy(path: str) -> SourceError:
    return SourceError(
        f"{path}: another program holds the camera; fuser -v {path} shows which: close it",
        reason="unavailable",
    )


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise SourceError(
            f"{path}: no such device; check the camera's plug and cable: edge-server cameras list "
            "shows the cameras that are there",
            reason="unavailable",
        ) from error
    except PermissionError as error:
        raise SourceError(
            f"{path}: closed to this user; sudo usermod -aG video USER, then log in again, or "
            "restart the daemon",
            reason="unauthorized",
        ) from error
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise _busy(path) from error
        raise SourceError(
            f"{path}: {error.strerror}; check the camera's plug and cable", reason="unavailable"
        ) from error


def _formats(file: int, ioctl: Ioctl) -> Iterator[str]:
    for fields in _entries(file, ioctl, VIDIOC_ENUM_FMT, _FORMAT_DESCRIPTION, _CAPTURE):
        yield fields[4].to_bytes(4, "little").decode("latin-1")


def _sizes(file: int, ioctl: Ioctl, fourcc: str) -> Iterator[tuple[int, int]]:
    for found in _entries(file, ioctl, VIDIOC_ENUM_FRAMESIZES, _FRAME_SIZE, _number(fourcc)):
        if found[2] == _DISCRETE:
            yield found[3], found[4]
            continue
        low_width, width, _, low_height, height, _ = found[3:9]
        for usual in {*_USUAL_SIZES, (width, height)}:
            if low_width <= usual[0] <= width and low_height <= usual[1] <= height:
                yield usual
        return


def _rates(file: int, ioctl: Ioctl, fourcc: str, size: tuple[int, int]) -> Iterator[Fraction]:
    wanted = _number(fourcc), *size
    for found in _entries(file, ioctl, VIDIOC_ENUM_FRAMEINTERVALS, _FRAME_INTERVAL, *wanted):
        seconds, per = found[5], found[6]
        if found[4] != _DISCRETE:
            # Its first interval is the shortest.
            yield min(Fraction(per, seconds or 1) or _OWN_RATE[0], _OWN_RATE[0])
            return
        if seconds and per:
            yield Fraction(per, seconds)


def _entries(
    file: int, ioctl: Ioctl, code: int, layout: struct.Struct, *wanted: int
) -> Iterator[tuple[Any, ...]]:
    """Yield the fields of each entry of a list that the driver has of what is `wanted`."""
    for index in range(256):
        data = bytearray(layout.size)
        struct.pack_into(f"<{1 + len(wanted)}I", data, 0, index, *wanted)
        try:
            ioctl(file, code, data)
        except OSError as error:
            # A driver without frame sizes or intervals has ENOTTY for their list.
            if error.errno in {errno.EINVAL, errno.ENOTTY}:
                return
            raise
        yield layout.unpack(data)


def _number(fourcc: str) -> int:
    return int.from_bytes(fourcc.encode("latin-1"), "little")


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode(errors="replace")
