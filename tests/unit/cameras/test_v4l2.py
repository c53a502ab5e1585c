"""V4L2 devices through a stand-in for their ioctls.

No device was recorded: `StandInForUvc` is composed after videodev2.h and the lists that UVC webcams
give, as no kernel here has a /dev/video.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest

from edge_server.cameras.source_uri import parse_source_uri
from edge_server.cameras.v4l2 import (
    VIDIOC_ENUM_FMT,
    VIDIOC_ENUM_FRAMEINTERVALS,
    VIDIOC_ENUM_FRAMESIZES,
    VIDIOC_QUERYCAP,
    VIDIOC_S_FMT,
    VideoDevice,
    VideoMode,
    check_free,
    read_device,
    video_devices,
    wanted_mode,
)
from edge_server.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CAPTURE, METADATA = 0x04200001, 0x04A00000
DEVICE_CAPS = 0x80000000
WEBCAM = {
    "MJPG": {(1920, 1080): (30, 5), (1280, 720): (60, 30), (640, 480): (30,)},
    "YUYV": {(1280, 720): (10,), (640, 480): (30, 15)},
    "H264": {(1920, 1080): (30,)},
}
OFFERED = [
    VideoMode("YUY2", (1280, 720), Fraction(10)),
    VideoMode("YUY2", (640, 480), Fraction(30)),
    VideoMode("YUY2", (640, 480), Fraction(24)),
    VideoMode("JPEG", (1920, 1080), Fraction(30)),
    VideoMode("JPEG", (3840, 2160), Fraction(30)),
]


@dataclass
class StandInForUvc:
    """Fills the structs of videodev2.h as uvcvideo does."""

    formats: dict[str, dict[tuple[int, int], tuple[int, ...]]]
    this_node: int = CAPTURE
    name: bytes = b"HD Webcam: HD Webcam"
    s_fmt_error: int = 0
    stepwise: bool = False
    chosen: list[tuple[int, int, str]] = field(default_factory=list)

    def ioctl(self, file: int, code: int, data: bytearray) -> int:
        os.fstat(file)
        if code == VIDIOC_QUERYCAP:
            every = CAPTURE | METADATA | DEVICE_CAPS
            fields = (b"uvcvideo", self.name, b"usb-1", 0x60100, every, self.this_node, 0, 0, 0)
            data[:] = struct.pack("<16s32s32s6I", *fields)
            return 0
        if code == VIDIOC_S_FMT:
            if self.s_fmt_error:
                raise OSError(self.s_fmt_error, os.strerror(self.s_fmt_error))
            kind, width, height, fourcc = struct.unpack_from("<I4x3I", data)
            assert kind == 1
            self.chosen.append((width, height, fourcc.to_bytes(4, "little").decode()))
            return 0
        index, fourcc = struct.unpack_from("<II", data)
        try:
            if code == VIDIOC_ENUM_FMT:
                assert fourcc == 1  # the type of the buffers, in this struct
                name = list(self.formats)[index]
                struct.pack_into("<I32s4s", data, 8, 0, b"", name.encode())
                return 0
            sizes = self.formats[fourcc.to_bytes(4, "little").decode()]
            if code == VIDIOC_ENUM_FRAMESIZES:
                if self.stepwise:
                    struct.pack_into("<7I", data, 8, 3, 16, 1400, 2, 16, 1080, 2)
                else:
                    struct.pack_into("<3I", data, 8, 1, *list(sizes)[index])
                return 0
            assert code == VIDIOC_ENUM_FRAMEINTERVALS
            if self.stepwise:
                raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")
            rates = sizes[struct.unpack_from("<II", data, 8)]
            struct.pack_into("<3I", data, 16, 1, 1, rates[index])
        except IndexError:
            raise OSError(errno.EINVAL, "Invalid argument") from None
        return 0


@pytest.fixture
def device(tmp_path: Path) -> str:
    path = tmp_path / "video0"
    path.touch()
    return str(path)


def test_a_webcam_lists_its_modes(device: str) -> None:
    found = read_device(device, StandInForUvc(WEBCAM).ioctl)
    assert found is not None
    assert (found.name, found.driver) == ("HD Webcam: HD Webcam", "uvcvideo")
    assert found.other_formats == ("H264",)
    assert len(found.modes) == 8
    assert found.modes[0] == VideoMode("JPEG", (1920, 1080), Fraction(30))
    assert VideoMode("YUY2", (640, 480), Fraction(15)) in found.modes


@pytest.mark.parametrize(
    ("query", "mode"),
    [
        ("", VideoMode("JPEG", (1920, 1080), Fraction(30))),
        ("?format=yuy2", VideoMode("YUY2", (640, 480), Fraction(30))),
        ("?width=640&height=480", VideoMode("YUY2", (640, 480), Fraction(30))),
        ("?width=1280&height=720&fps=60", VideoMode("JPEG", (1280, 720), Fraction(60))),
    ],
)
def test_the_best_mode_that_the_uri_allows_is_taken(
    device: str, query: str, mode: VideoMode
) -> None:
    found = read_device(device, StandInForUvc(WEBCAM).ioctl)
    assert found is not None
    assert wanted_mode(parse_source_uri(f"v4l2:///dev/video0{query}"), found.modes) == mode


def test_a_mode_that_the_webcam_lacks_names_those_it_has(device: str) -> None:
    found = read_device(device, StandInForUvc(WEBCAM).ioctl)
    assert found is not None
    uri = parse_source_uri("v4l2:///dev/video0?width=1600&height=1200")
    with pytest.raises(SourceError, match=r"1600 x 1200.*1920 x 1080"):
        wanted_mode(uri, found.modes)


def test_a_device_with_a_range_of_sizes_and_no_rates_has_the_usual_ones(device: str) -> None:
    found = read_device(device, StandInForUvc({"YUYV": {}}, stepwise=True).ioctl)
    assert found is not None
    assert [mode.size for mode in found.modes] == [
        (1400, 1080),
        (1280, 720),
        (640, 480),
        (640, 360),
    ]


def test_the_metadata_node_of_a_webcam_is_no_camera(device: str) -> None:
    assert read_device(device, StandInForUvc(WEBCAM, this_node=METADATA).ioctl) is None


def test_a_camera_in_use_is_named_with_the_way_to_find_who_uses_it(device: str) -> None:
    mode = VideoMode("YUY2", (640, 480), Fraction(30))
    webcam = StandInForUvc(WEBCAM)
    check_free(device, mode, webcam.ioctl)
    assert webcam.chosen == [(640, 480, "YUYV")]
    webcam.s_fmt_error = errno.EBUSY
    with pytest.raises(SourceError, match="another program holds the camera; fuser -v"):
        check_free(device, mode, webcam.ioctl)


def test_an_absent_camera_names_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no such device; check .* edge-server cameras list"):
        read_device(str(tmp_path / "video7"))


def test_a_file_is_no_camera(device: str) -> None:
    with pytest.raises(SourceError, match="it is no video device"):
        read_device(device)


def test_devices_are_listed_by_number_and_a_fault_of_one_hides_no_other(tmp_path: Path) -> None:
    for name in ("video10", "video2", "video0", "videos"):
        (tmp_path / name).touch()
    webcam = StandInForUvc(WEBCAM)
    names = [
        each.path.rpartition("/")[2]
        for each in video_devices(tmp_path, webcam.ioctl)
        if isinstance(each, VideoDevice)
    ]
    assert names == ["video0", "video2", "video10"]
    assert len([each for each in video_devices(tmp_path) if isinstance(each, SourceError)]) == 3


def best_mode(modes: Sequence[VideoMode], query: str = "") -> VideoMode:
    return wanted_mode(parse_source_uri(f"v4l2:///dev/video0{query}"), modes)


def test_the_largest_image_up_to_full_hd_that_is_quick_enough_is_the_best() -> None:
    assert str(best_mode(OFFERED)) == "JPEG 1920 x 1080, 30 fps"


def test_raw_goes_before_jpeg_at_the_same_size_and_rate() -> None:
    both = [VideoMode(name, (1280, 720), Fraction(30)) for name in ("UYVY", "JPEG", "YUY2")]
    assert best_mode(both).format == "YUY2"
    assert best_mode(both[:2]).format == "JPEG"


def test_a_device_that_is_only_slow_or_only_large_is_read_all_the_same() -> None:
    slow = [
        VideoMode("YUY2", (1280, 720), Fraction(10)),
        VideoMode("YUY2", (640, 480), Fraction(5)),
    ]
    assert best_mode(slow).size == (1280, 720)
    large = [VideoMode("JPEG", size, Fraction(30)) for size in ((3840, 2160), (2592, 1944))]
    assert best_mode(large).size == (2592, 1944)


def test_the_options_of_a_uri_are_obeyed_exactly() -> None:
    assert best_mode(OFFERED, "?width=1280&height=720").fps == 10
    assert best_mode(OFFERED, "?fps=24").size == (640, 480)
    assert best_mode(OFFERED, "?format=yuy2").size == (640, 480)
    with pytest.raises(SourceError, match=r"no YUY2 1920 x 1080; it has: JPEG 1920 x 1080, 30"):
        best_mode(OFFERED, "?width=1920&height=1080&format=yuy2")


def test_the_caps_of_a_mode_are_those_of_gst_launch() -> None:
    mode = VideoMode("NV12", (640, 360), Fraction(30000, 1001))
    assert mode.caps == "video/x-raw,format=NV12,width=640,height=360,framerate=30000/1001"


def test_a_device_without_any_mode_says_so() -> None:
    with pytest.raises(SourceError, match="no mode; it has: no format that can be read"):
        best_mode([])
