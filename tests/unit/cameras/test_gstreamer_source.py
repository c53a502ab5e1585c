"""A camera read through a pipeline: deadlines, ends, damaged frames, changes. The pipeline is a
stand-in; tests/integration/test_gstreamer.py runs the real one, and holds the two together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.cameras.gstreamer import GstreamerSource
from edge_server.cameras.gstreamer_frames import PulledFrame
from edge_server.cameras.gstreamer_player import BusMessage, CameraPlace
from edge_server.errors import SourceError
from edge_server.pixels import Image, PixelFormat

if TYPE_CHECKING:
    from collections.abc import Iterator

MS = 1_000_000
RTSP = CameraPlace("rtsp", "rtsp://camera/live")
WEBCAM = CameraPlace("v4l2", "/dev/video0", device="/dev/video0")
PERIOD_MS = 40


class FakePlayer:
    """A pipeline that plays a script: a frame, messages, or None for a pull without a frame."""

    def __init__(self, *script: PulledFrame | list[BusMessage] | None, live: bool = True) -> None:
        self.live = live
        self.arrived = 0
        self.damaged = 0
        self.arrives_with_nothing = False
        self.now_ns = 1000 * MS
        self.closed = 0
        self._script = list(script)
        self._messages: list[BusMessage] = []

    def play(self, *script: PulledFrame | list[BusMessage] | None) -> None:
        self._script.extend(script)

    def pull(self, timeout_s: float) -> PulledFrame | None:
        if self._script and isinstance(self._script[0], PulledFrame):
            self.now_ns += PERIOD_MS * MS
            self.arrived += 1
            return self._script.pop(0)  # type: ignore[return-value]
        self.now_ns += int(timeout_s * 1e9)
        self.arrived += self.arrives_with_nothing
        if self._script and self._script[0] is None:
            self._script.pop(0)
        return None

    def messages(self) -> Iterator[BusMessage]:
        while self._script and isinstance(self._script[0], list):
            yield from self._script.pop(0)  # type: ignore[misc]

    def close(self) -> None:
        self.closed += 1


def frame(width: int = 64, *, corrupt: bool = False, period_ms: int = PERIOD_MS) -> PulledFrame:
    image = Image.of_packed(PixelFormat.NV12, np.zeros((72, width, 1), np.uint8))
    return PulledFrame(image, None, None, period_ms * MS, corrupt)


def opened(player: FakePlayer, place: CameraPlace = RTSP) -> GstreamerSource:
    return GstreamerSource(
        player,
        place,
        "arrival",
        monotonic_ns=lambda: player.now_ns,
        epoch_ns=lambda: 5_000_000 * MS + player.now_ns,
    )


def failure(source: GstreamerSource) -> SourceError:
    try:
        while source.read() is not None:
            pass
    except SourceError as error:
        return error
    raise AssertionError("the source ended without an error")


def test_frames_count_from_zero_and_have_their_time_in_both_clocks() -> None:
    player = FakePlayer(*[frame()] * 3)
    source = opened(player)
    frames = [source.read() for _ in range(3)]
    assert [each.id for each in frames if each] == [0, 1, 2]
    for each in frames:
        assert each is not None
        assert each.capture_epoch_ns - each.capture_mono_ns == 5_000_000 * MS
        assert each.clock == "arrival"


def test_a_camera_that_stops_sending_is_stalled_half_a_second_later() -> None:
    player = FakePlayer(frame())
    source = opened(player)
    source.read()
    last = player.now_ns
    assert failure(source).reason == "stalled"
    assert 500 * MS < player.now_ns - last <= 600 * MS


def test_a_slow_camera_has_three_periods() -> None:
    player = FakePlayer(frame(period_ms=500))
    source = opened(player)
    source.read()
    last = player.now_ns
    assert failure(source).reason == "stalled"
    assert 1500 * MS < player.now_ns - last <= 1600 * MS


def test_the_rate_of_a_camera_that_states_none_is_measured() -> None:
    player = FakePlayer(*[each for _ in range(5) for each in (frame(period_ms=0), None, None)])
    source = opened(player)
    for _ in range(5):
        source.read()
    last = player.now_ns
    assert failure(source).reason == "stalled"
    assert player.now_ns - last > 3 * 2 * 100 * MS


def test_no_first_frame_is_an_error_and_closes_the_pipeline() -> None:
    player = FakePlayer()
    with pytest.raises(SourceError, match="no frame within 8 s") as caught:
        opened(player)
    assert caught.value.reason == "unavailable"
    assert player.closed == 1


def test_the_end_of_a_live_camera_is_a_loss_and_of_a_file_the_end() -> None:
    player = FakePlayer(frame(), [BusMessage("end")])
    assert failure(opened(player)).reason == "lost"
    ended = opened(FakePlayer(frame(), [BusMessage("end")], live=False))
    assert ended.read() is not None
    assert ended.read() is None
    with pytest.raises(SourceError, match="without a frame"):
        opened(FakePlayer([BusMessage("end")], live=False))


def test_an_error_of_the_pipeline_ends_the_reading_at_once() -> None:
    unauthorized = BusMessage("error", "gst-resource-error-quark", 15, "Unauthorized")
    player = FakePlayer([unauthorized])
    with pytest.raises(SourceError, match="password refused"):
        opened(player)
    assert player.closed == 1


def test_the_status_of_http_goes_before_the_error_that_it_leads_to() -> None:
    http = CameraPlace("http", "http://camera/mjpeg")
    stream = BusMessage("error", "gst-stream-error-quark", 1, "Internal data stream error.")
    with pytest.raises(SourceError, match="check the path"):
        opened(FakePlayer([stream, BusMessage("status", code=404)]), http)
    assert opened(FakePlayer([BusMessage("status", code=200)], frame()), http).read() is not None


def test_damaged_frames_are_counted_and_not_delivered() -> None:
    decode = BusMessage("warning", "gst-stream-error-quark", 7, "Could not decode.")
    player = FakePlayer(frame(), frame(corrupt=True), [decode], frame(corrupt=True), frame())
    source = opened(player)
    assert [source.read() is not None for _ in range(2)] == [True, True]
    assert source.corrupt == 3


def test_only_damaged_frames_are_a_fault_after_three_seconds() -> None:
    player = FakePlayer(frame(), *[frame(corrupt=True)] * 200)
    source = opened(player)
    source.read()
    begin = player.now_ns
    assert failure(source).reason == "corrupt"
    assert 3000 * MS < player.now_ns - begin < 3200 * MS


def test_images_that_come_and_cannot_be_decoded_are_no_stall() -> None:
    player = FakePlayer(frame())
    player.arrives_with_nothing = True
    source = opened(player)
    source.read()
    begin = player.now_ns
    assert failure(source).reason == "corrupt"
    assert 3000 * MS < player.now_ns - begin < 3400 * MS


def test_a_new_size_is_the_next_images_and_counted() -> None:
    source = opened(FakePlayer(frame(64), frame(32), frame(32)))
    sizes = [each.image.width for each in (source.read(), source.read(), source.read()) if each]
    assert sizes == [64, 32, 32]
    assert source.size_changes == 1


def test_a_driver_stamps_a_frame_up_to_a_period_late() -> None:
    player = FakePlayer()
    player.play(frame()._replace(stamp_ns=player.now_ns + 30 * MS))
    source = GstreamerSource(player, WEBCAM, "sensor", monotonic_ns=lambda: player.now_ns)
    found = source.read()
    assert found is not None
    assert (found.clock, found.uncertainty_ns) == ("sensor", PERIOD_MS * MS)
    assert found.capture_mono_ns == 1030 * MS


def test_a_closed_source_reads_nothing_and_closes_once() -> None:
    player = FakePlayer(frame(), frame())
    source = opened(player)
    source.close()
    source.close()
    assert player.closed == 1
    source.read()
    assert failure(source).reason == "lost"
