"""The modes of a video device (format, size, rate) in GStreamer's caps, and the best of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# What `format` of a v4l2 URI may be, and GStreamer's name for it.
V4L2_FORMATS: Mapping[str, str] = MappingProxyType(
    {"mjpeg": "JPEG", "yuy2": "YUY2", "nv12": "NV12", "i420": "I420", "grey": "GRAY8"}
)
# Formats of a device in the order of preference at the same size and rate: those that go untouched
# to the preprocessing, then JPEG, which has to be decoded, then what has to be converted.
_RANKS = ("NV12", "YUY2", "I420", "GRAY8", "BGR", "JPEG")
# A larger image costs more than a lane network gains from it; a slower one is late.
_LARGEST_PX = 1920 * 1080
_SLOWEST_FPS = 25
_USUAL_FPS = 30

_STRUCTURE = re.compile(r"(video/x-raw|image/jpeg)(?:\([^)]*\))?((?:,[^;]*)?)")
_FIELD = re.compile(r"(\w[\w-]*)=(?:\([\w ]+\))?(\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"|[^,;]+)")


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


def parse_modes(caps: str) -> list[VideoMode]:
    """Return the modes in `caps`, the text of the caps that v4l2src offers.

    Of a range the modes are the usual sizes and the highest rate in it.
    """
    modes = set()
    for media, fields in _STRUCTURE.findall(caps):
        values = {key: value.strip() for key, value in _FIELD.findall(fields)}
        formats = ["JPEG"] if media == "image/jpeg" else _words(values.get("format", ""))
        for name in formats:
            for size in _sizes(values.get("width", ""), values.get("height", "")):
                for fps in _rates(values.get("framerate", "")):
                    modes.add(VideoMode(name, size, fps))
    return sorted(modes, key=lambda mode: (mode.format, mode.size, mode.fps))


def best_mode(
    modes: Sequence[VideoMode],
    width: int = 0,
    height: int = 0,
    fps: Fraction = Fraction(0),
    name: str = "",
) -> VideoMode:
    """Return the best of `modes`: the largest image of at most 1920 x 1080 that comes at 25 fps or
    more, then the rate nearest to 30 fps, then the format that costs least.

    Args:
        modes: of the device.
        width: in px; with `height` the only size that is taken; 0 leaves the choice.
        height: in px.
        fps: the only rate that is taken; 0 leaves the choice.
        name: the only format that is taken; "" leaves the choice.

    Raises:
        SourceError: the device has no such mode; the text lists what it has.
    """
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
        raise SourceError(f"the device has no {wanted}; it has: {offered}", reason="unavailable")
    return max(fitting, key=_rank)


def _rank(mode: VideoMode) -> tuple[bool, bool, int, float, int]:
    area = mode.size[0] * mode.size[1]
    small = area <= _LARGEST_PX
    rank = _RANKS.index(mode.format) if mode.format in _RANKS else len(_RANKS)
    quick = mode.fps >= _SLOWEST_FPS
    return small, quick, area if small else -area, -abs(float(mode.fps) - _USUAL_FPS), -rank


def _summary(modes: Iterable[VideoMode]) -> list[str]:
    fastest: dict[tuple[str, tuple[int, int]], Fraction] = {}
    for mode in modes:
        key = (mode.format, mode.size)
        fastest[key] = max(mode.fps, fastest.get(key, mode.fps))
    return [str(VideoMode(name, size, fps)) for (name, size), fps in sorted(fastest.items())]


def _words(value: str) -> list[str]:
    return [word.strip(' "') for word in value.strip("{}").split(",") if word.strip()]


# What a device that scales by itself is asked for.
_USUAL_SIZES = ((1920, 1080), (1280, 720), (640, 480))


def _sizes(width: str, height: str) -> list[tuple[int, int]]:
    if width.isdecimal() and height.isdecimal():
        return [(int(width), int(height))]
    lows_highs = []
    for value in (width, height):
        numbers = [int(number) for number in re.findall(r"\d+", value)]
        if not numbers:
            return []
        lows_highs.append((numbers[0], numbers[1] if value.startswith("[") else numbers[0]))
    (low_w, high_w), (low_h, high_h) = lows_highs
    usual = [(w, h) for w, h in _USUAL_SIZES if low_w <= w <= high_w and low_h <= h <= high_h]
    return usual or [(high_w, high_h)]


def _rates(value: str) -> list[Fraction]:
    rates = [
        Fraction(int(numerator), int(denominator))
        for numerator, denominator in re.findall(r"(\d+)/(\d+)", value)
        if int(denominator) and int(numerator)
    ]
    return [min(rates[-1], Fraction(_USUAL_FPS))] if value.startswith("[") and rates else rates
