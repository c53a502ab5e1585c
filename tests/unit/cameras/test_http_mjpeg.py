"""A stream of JPEGs with a clock of its own: newest first, stalls, damage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest

from edge_server.cameras.http_mjpeg import HttpMjpegSource, MultipartParser
from edge_server.cameras.jpeg import JpegDecoder
from edge_server.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable

S = 1_000_000_000
MS = 1_000_000


def part(level: int, width: int = 64, *, damage: bool = False) -> bytes:
    image = np.full((48, width, 3), level, np.uint8)
    jpeg = cv2.imencode(".jpg", image)[1].tobytes()
    jpeg = jpeg[:-8] if damage else jpeg
    return b"--b\r\nContent-Length: %d\r\n\r\n%s\r\n" % (len(jpeg), jpeg)


class ScriptedStream:
    """Each step is (ms until its bytes come, the bytes, whether more are here already)."""

    def __init__(self, steps: Iterable[tuple[int, bytes, bool]]) -> None:
        self._steps = list(steps)
        self.now_ns = 1000 * S
        self.closed = 0

    def receive(self, timeout_s: float) -> bytes:
        waits_ms, data, _ = self._steps[0]
        if waits_ms * MS > timeout_s * S:
            self.now_ns += int(timeout_s * S)
            raise TimeoutError
        self.now_ns += waits_ms * MS
        self._last = self._steps.pop(0)
        return data

    def ready(self) -> bool:
        return self._last[2]

    def close(self) -> None:
        self.closed += 1


def source_of(stream: ScriptedStream) -> HttpMjpegSource:
    return HttpMjpegSource(
        stream,
        MultipartParser(b"b"),
        "http://cam/x",
        JpegDecoder("http://cam/x"),
        monotonic_ns=lambda: stream.now_ns,
        epoch_ns=lambda: stream.now_ns + 5 * S,
    )


def level(source: HttpMjpegSource) -> int:
    frame = source.read()
    assert frame is not None
    return int(frame.image.planes[0].mean().round())


def steady(*levels: int, every_ms: int = 40) -> list[tuple[int, bytes, bool]]:
    return [(every_ms, part(each), False) for each in levels]


def test_frames_have_the_time_of_their_arrival() -> None:
    source = source_of(ScriptedStream(steady(10, 20)))
    first, second = source.read(), source.read()
    assert first is not None
    assert second is not None
    assert (first.id, second.id) == (0, 1)
    assert first.clock == "arrival"
    assert second.capture_mono_ns - first.capture_mono_ns == 40 * MS
    assert first.capture_epoch_ns - first.capture_mono_ns == 5 * S


def test_of_images_that_wait_only_the_newest_is_decoded() -> None:
    waiting = [(0, part(each), True) for each in (30, 40, 50)]
    source = source_of(ScriptedStream([*steady(10), *waiting, *steady(60, 70)]))
    assert level(source) == 10
    # 60 comes after those that wait; whether it is here as well, the socket says.
    assert level(source) == 60
    assert source.skipped == 3


def test_damaged_images_are_counted_and_not_delivered() -> None:
    broken = (40, part(0, damage=True), False)
    source = source_of(ScriptedStream([*steady(10), broken, *steady(20), *[broken] * 10]))
    assert level(source) == 10
    assert level(source) == 20
    assert source.corrupt == 1
    with pytest.raises(
        SourceError, match=r"the last 10 images are all damaged .its end is missing"
    ) as caught:
        source.read()
    assert caught.value.reason == "corrupt"


@pytest.mark.parametrize("every_ms", [500, 1700])
def test_damaged_images_of_a_slow_camera_do_not_hold_its_reader(every_ms: int) -> None:
    broken = (every_ms, part(0, damage=True), False)
    stream = ScriptedStream([*steady(10, 20, 30, 40, every_ms=every_ms), *[broken] * 20])
    source = source_of(stream)
    for _ in range(4):
        source.read()
    before_ns = stream.now_ns
    with pytest.raises(SourceError) as caught:
        source.read()
    assert caught.value.reason == "corrupt"
    assert stream.now_ns - before_ns < max(2.0, 6 * every_ms / 1000) * S
    stream = ScriptedStream([broken] * 20)
    with pytest.raises(SourceError, match="all damaged"):
        source_of(stream)
    assert stream.now_ns - 1000 * S < 6 * S


def test_a_camera_that_never_pauses_gives_frames_all_the_same() -> None:
    drops = [(1, bytes([each]), True) for level in range(9) for each in part(20 * level)]
    stream = ScriptedStream([*steady(10), *drops])
    source = source_of(stream)
    source.read()
    before_ns = stream.now_ns
    source.read()
    assert stream.now_ns - before_ns < 1 * S


def test_a_silent_camera_has_stalled_after_half_a_second() -> None:
    stream = ScriptedStream([*steady(10, 20, 30, 40, 50), (9000, b"", False)])
    source = source_of(stream)
    for _ in range(5):
        source.read()
    before_ns = stream.now_ns
    with pytest.raises(SourceError, match=r"no frame for 0\.5 s") as caught:
        source.read()
    assert caught.value.reason == "stalled"
    assert stream.now_ns - before_ns == 500 * MS


def test_bytes_that_make_no_image_do_not_delay_that() -> None:
    drops = [(100, b"x", False)] * 99
    stream = ScriptedStream([*steady(10, 20, 30, 40), *drops])
    source = source_of(stream)
    for _ in range(4):
        source.read()
    with pytest.raises(SourceError) as caught:
        source.read()
    assert caught.value.reason == "stalled"


def test_a_camera_of_one_frame_a_second_is_read() -> None:
    source = source_of(ScriptedStream(steady(*range(10, 90, 10), every_ms=1000)))
    assert [level(source) for _ in range(8)] == list(range(10, 90, 10))


def test_a_closed_stream_is_lost() -> None:
    source = source_of(ScriptedStream([*steady(10), (0, b"", False)]))
    source.read()
    with pytest.raises(SourceError, match="closed the stream") as caught:
        source.read()
    assert caught.value.reason == "lost"


def test_a_camera_without_a_first_frame_is_closed() -> None:
    stream = ScriptedStream([(9000, b"", False)])
    with pytest.raises(SourceError, match="no image within 4 s") as caught:
        source_of(stream)
    assert caught.value.reason == "unavailable"
    assert stream.closed == 1


def test_a_new_size_is_delivered_as_it_is() -> None:
    source = source_of(ScriptedStream([*steady(10), (40, part(20, 128), False)]))
    source.read()
    frame = source.read()
    assert frame is not None
    assert frame.size == (128, 48)
