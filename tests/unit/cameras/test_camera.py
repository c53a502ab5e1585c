"""The states of a camera: each is entered and left at its time, on a clock that the test moves."""

from __future__ import annotations

import logging
import random
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from support.scripted_camera import IMAGE, PERIOD_S, Rig, ScriptedDevice

from edge_server.cameras.camera import Camera
from edge_server.cameras.frame import Frame
from edge_server.cameras.source import SourceKind
from edge_server.cameras.status import CameraState
from edge_server.errors import SourceError, SourceUriError
from edge_server.pixels import Image, PixelFormat
from edge_server.process.text import remember_login


def state_of(rig: Rig) -> tuple[CameraState, str]:
    return rig.camera.status.state, rig.camera.status.reason


def test_a_camera_is_live_from_its_first_frame_on() -> None:
    rig = Rig()
    assert state_of(rig) == (CameraState.STARTING, "starting")
    assert not rig.camera.status.usable
    rig.go_live(1)
    assert state_of(rig) == (CameraState.LIVE, "")
    assert rig.camera.status.usable
    assert rig.camera.reconnects == 0


def test_the_newest_frame_wins_and_ids_count_the_dropped_ones_too() -> None:
    rig = Rig()
    newest = Image.of_bgr(np.ones((4, 6, 3), np.uint8))
    rig.go_live(2)
    rig.frame(newest)
    frame = rig.camera.next_frame(0)
    assert frame is not None
    assert frame.image is newest  # not a copy
    assert frame.id == 2
    assert (rig.camera.captured, rig.camera.dropped) == (3, 2)
    assert rig.camera.next_frame(0) is None


def test_a_frame_after_stop_is_dropped() -> None:
    rig = Rig()
    rig.go_live(1)
    rig.camera.next_frame(0)
    rig.camera.stop()
    assert rig.reader.leaving
    rig.frame()
    assert (rig.camera.captured, rig.camera.dropped) == (2, 1)
    assert rig.camera.next_frame(5.0) is None  # at once
    assert state_of(rig) == (CameraState.STOPPED, "")


def test_the_age_of_the_newest_frame_counts_from_its_capture() -> None:
    rig = Rig()
    assert rig.camera.last_frame_age_s(rig.now) is None
    rig.advance(0.0)
    rig.frame(age_s=0.125)
    assert rig.camera.last_frame_age_s(rig.now + 3) == pytest.approx(3.125)


@pytest.mark.parametrize("reason", ["unavailable", "unauthorized", "not_found", "no_decoder"])
def test_the_reason_of_a_source_is_the_camera_s(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    rig.advance(0.0)
    for _ in range(3):
        rig.lose(reason)
        assert state_of(rig) == (CameraState.LOST, reason)
        assert rig.camera.status.text == "cable out"
        rig.advance(6.0)
    assert caplog.text.count("cable out") == 1  # one line for one state
    assert rig.camera.faults[reason] == 1


def test_attempts_are_delayed_more_and_more_until_a_source_has_run_for_long() -> None:
    rig = Rig()
    rig.camera._reopening._backoff._draw = lambda: 1.0
    rig.advance(0.0)
    delays_s = []
    for _ in range(7):
        rig.lose()
        lost_at, readers = rig.now, len(rig.readers)
        while len(rig.readers) == readers:
            rig.advance(0.01)
        delays_s.append(rig.now - lost_at)
    assert delays_s == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0], abs=0.02)
    rig.go_live(200)  # 6.7 s
    rig.lose()
    rig.advance(0.25)
    assert not rig.reader.leaving


def test_a_live_camera_whose_stream_ends_is_lost_and_live_again_when_it_is_back() -> None:
    rig = Rig()
    rig.go_live()
    rig.reader.fails(None)
    assert state_of(rig) == (CameraState.LOST, "lost")
    rig.advance(1.0)
    assert len(rig.readers) == 1  # the source is not closed yet
    rig.reader.closes()
    rig.advance(0.1)
    assert len(rig.readers) == 2
    assert state_of(rig) == (CameraState.LOST, "lost")
    assert rig.camera.reconnects == 0
    rig.go_live(1)
    assert state_of(rig) == (CameraState.LIVE, "")
    assert rig.camera.reconnects == 1
    frame = rig.camera.next_frame(0)
    assert frame is not None
    assert frame.id == 10  # ids continue


def test_a_recording_ends_after_its_last_frame(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(live=False)
    rig.go_live(1)
    with caplog.at_level("INFO"):
        rig.reader.fails(None)
    assert "with loop=true in its URI" in caplog.text
    assert state_of(rig) == (CameraState.ENDED, "ended")
    assert not rig.camera.ended  # the last frame waits
    assert rig.camera.next_frame(0) is not None
    assert rig.camera.ended
    rig.camera.stop()
    assert rig.camera.state is CameraState.ENDED


@pytest.mark.parametrize("fault", [None, ImportError("no GStreamer")])
def test_no_limit_of_a_camera_runs_while_its_library_loads(fault: Exception | None) -> None:
    library: Future[object] = Future()
    rig = Rig(library=library)
    rig.advance(600.0)
    assert state_of(rig) == (CameraState.STARTING, "loading_gstreamer")
    assert rig.camera.status.text == "loading GStreamer"
    assert rig.readers == []
    assert not rig.camera.faults.total()
    # A load that fails is told by the source, which cannot be opened then.
    library.set_exception(fault) if fault else library.set_result(None)
    rig.advance(0.25)
    assert state_of(rig) == (CameraState.STARTING, "starting")
    rig.advance(9.5)  # the limit of the first frame begins now
    assert not rig.reader.leaving
    rig.advance(1.0)
    assert state_of(rig) == (CameraState.LOST, "stuck")


def test_a_library_is_loaded_within_the_time_to_open_a_camera() -> None:
    library: Future[object] = Future()
    rig = Rig(library=library)
    rig.camera.open(0.0)
    assert rig.readers == []
    library.set_result(None)
    rig.camera.open(0.0)
    assert len(rig.readers) == 1


def test_openings_that_fail_are_counted_and_a_reboot_is_needed_until_a_frame_comes() -> None:
    rig = Rig()
    rig.advance(0.0)
    rig.lose("no_decoder")  # there is nothing to open it with
    assert rig.camera.failed_openings == 0
    for number in (1, 2):
        rig.advance(6.0)
        rig.lose("unavailable")
        assert rig.camera.failed_openings == number
    rig.camera.need_reboot()
    rig.advance(6.0)
    rig.lose("stuck")
    assert state_of(rig) == (CameraState.LOST, "reboot_needed")
    assert rig.camera.status.text.startswith("cable out; nvargus-daemon was restarted")
    rig.advance(6.0)
    rig.go_live(1)
    assert state_of(rig) == (CameraState.LIVE, "")
    assert rig.camera.failed_openings == 0
    rig.lose("lost")
    assert state_of(rig) == (CameraState.LOST, "lost")


@pytest.mark.parametrize(("period_s", "limit_s"), [(1 / 30, 0.3), (1 / 5, 0.6)])
def test_a_camera_stalls_after_three_periods_or_300_ms(period_s: float, limit_s: float) -> None:
    rig = Rig()
    rig.advance(0.0)
    rig.reader.calls("read")
    rig.play(10, period_s)
    rig.advance(limit_s - period_s - 0.02)
    assert state_of(rig) == (CameraState.LIVE, "")
    rig.advance(0.04)
    assert state_of(rig) == (CameraState.STALLED, "stalled")
    assert not rig.camera.status.usable


def test_a_short_silence_is_over_with_the_next_frame() -> None:
    rig = Rig()
    rig.go_live()
    rig.advance(0.4)
    assert rig.camera.state is CameraState.STALLED
    rig.camera.next_frame(0)
    rig.frame()
    assert rig.camera.state is CameraState.LIVE
    assert rig.camera.next_frame(0) is not None
    assert not rig.reader.leaving
    assert rig.camera.reconnects == 0


def test_what_comes_after_a_long_silence_is_a_backlog_and_the_source_is_opened_again() -> None:
    rig = Rig()
    rig.go_live()
    rig.camera.next_frame(0)
    rig.advance(1.0)
    rig.frame()  # 1 s old, and stamped as fresh
    assert rig.camera.next_frame(0) is None
    assert rig.reader.leaving
    assert state_of(rig) == (CameraState.STALLED, "stalled")
    rig.reader.closes()
    rig.advance(0.3)
    rig.go_live(1)
    assert rig.camera.state is CameraState.LIVE
    assert rig.camera.reconnects == 1


def test_a_driver_s_own_time_tells_the_age_of_a_backlog_which_needs_no_new_start() -> None:
    rig = Rig()
    rig.advance(0.0)
    rig.reader.calls("read")
    rig.play(10, clock="sensor")
    rig.advance(1.0)
    rig.frame(clock="sensor")
    assert not rig.reader.leaving
    assert rig.camera.next_frame(0) is not None


def test_a_slow_recording_has_not_stalled() -> None:
    rig = Rig(live=False)
    rig.advance(0.0)
    rig.reader.calls("read")
    rig.play(5, 2.0)
    assert rig.camera.state is CameraState.LIVE
    assert len(rig.readers) == 1


@pytest.mark.parametrize("call", ["open", "read"])
def test_no_first_frame_within_10_s_is_a_lost_camera(call: str) -> None:
    rig = Rig()
    rig.advance(0.0)
    rig.advance(4.0)
    if call == "read":
        rig.reader.calls("read")
    rig.advance(5.9)
    assert rig.camera.state is CameraState.STARTING
    rig.advance(0.2)
    assert state_of(rig) == (CameraState.LOST, "stuck" if call == "open" else "no_frames")
    rig.advance(1.0)
    assert len(rig.readers) == 2


def test_a_reader_that_hangs_is_abandoned_and_its_frames_are_ignored() -> None:
    rig = Rig()
    rig.go_live()
    rig.camera.next_frame(0)
    rig.advance(2.1)
    assert state_of(rig) == (CameraState.LOST, "stuck")
    rig.advance(0.5)
    hanging, _ = rig.readers
    hanging.reads(Frame.arrived(0, IMAGE))
    assert rig.camera.next_frame(0) is None
    rig.go_live(1)
    assert rig.camera.state is CameraState.LIVE
    hanging.fails(SourceError("finally"))
    hanging.closes()
    assert rig.camera.state is CameraState.LIVE


@pytest.mark.parametrize("call", ["open", "read", "close"])
def test_a_camera_whose_second_reader_hangs_is_out_of_service_until_one_returns(call: str) -> None:
    rig = Rig()
    rig.go_live()
    rig.advance(2.5)
    assert len(rig.readers) == 2
    if call == "read":
        rig.go_live()
    elif call == "close":
        rig.reader.fails(SourceError("gone"))
    rig.advance(100.0)
    assert state_of(rig) == (CameraState.LOST, "out_of_service")
    assert f"not returned from {call}" in rig.camera.status.text
    assert rig.camera.faults["out_of_service"] == 1
    assert (len(rig.readers), rig.camera.hanging) == (2, 2)
    rig.readers[0].closes()
    rig.advance(0.3)
    assert (len(rig.readers), rig.camera.hanging) == (3, 1)
    rig.go_live()
    assert rig.camera.state is CameraState.LIVE


def test_a_second_reader_that_hangs_after_the_first_came_back_is_replaced_too() -> None:
    rig = Rig()
    for _ in range(5):
        rig.go_live()
        hanging = rig.reader
        rig.advance(2.2)
        hanging.closes()
        rig.advance(5.0)
    assert len(rig.readers) == 6


def test_a_source_that_hangs_in_close_is_abandoned() -> None:
    rig = Rig()
    rig.go_live()
    rig.reader.fails(SourceError("gone"))
    rig.advance(2.2)
    assert state_of(rig) == (CameraState.LOST, "stuck")
    rig.advance(1.0)
    assert len(rig.readers) == 2


def test_a_driver_s_error_is_a_lost_camera_and_its_traceback_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    rig.go_live()
    for _ in range(3):
        rig.reader.fails(ZeroDivisionError("a bug"))
        rig.reader.closes()
        rig.advance(6.0)
    assert state_of(rig) == (CameraState.LOST, "lost")
    assert "a bug" in rig.camera.status.text
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_a_changed_size_is_noticed_and_the_frame_is_used() -> None:
    rig = Rig()
    rig.go_live()
    other = Image.of_bgr(np.zeros((8, 12, 3), np.uint8))
    rig.play(1, image=other)
    assert state_of(rig) == (CameraState.DEGRADED, "changed")
    assert "from 6 x 4 bgr to 12 x 8 bgr" in rig.camera.status.text
    assert rig.camera.status.usable
    frame = rig.camera.next_frame(0)
    assert frame is not None
    assert frame.image is other
    rig.play(62, image=other)
    assert state_of(rig) == (CameraState.LIVE, "")
    assert rig.camera.faults["changed"] == 1


def test_a_frame_from_before_its_predecessor_is_not_used() -> None:
    rig = Rig()
    rig.go_live()
    rig.camera.next_frame(0)
    rig.play(1, age_s=PERIOD_S + 0.01)
    assert state_of(rig) == (CameraState.DEGRADED, "changed")
    assert "ran back by 10 ms" in rig.camera.status.text
    assert rig.camera.next_frame(0) is None
    assert rig.camera.captured == 11
    rig.play(1)
    assert rig.camera.next_frame(0) is not None


def test_times_that_jump_are_noticed_and_a_source_that_goes_on_so_is_opened_again() -> None:
    rig = Rig()
    rig.go_live()
    rig.play(1, age_s=-5.0)
    assert state_of(rig) == (CameraState.DEGRADED, "changed")
    assert "jumped by 5000 ms" in rig.camera.status.text
    rig.play(2)  # both are from before the jump
    assert rig.reader.leaving
    assert state_of(rig) == (CameraState.LOST, "changed")


def test_a_camera_that_sends_in_bursts_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.go_live()
    for _ in range(20):
        rig.play(70, 0.001)
        rig.play(70, 0.003)
    # 5.6 s with 40 changes
    assert 1 <= caplog.text.count("the rate went") <= 2


def test_a_changed_rate_is_logged_and_changes_the_time_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    rig.go_live(40)
    rig.play(70, 0.2)
    assert "the rate went from 30 to 5 frames/s" in caplog.text
    assert rig.camera.faults["changed"] == 1
    assert rig.camera.state is CameraState.LIVE
    rig.advance(0.38)
    assert rig.camera.state is CameraState.LIVE
    rig.advance(0.05)
    assert rig.camera.state is CameraState.STALLED


def test_frames_that_are_not_whole_are_counted_and_many_of_them_open_the_source_again() -> None:
    rig = Rig()
    rig.go_live()
    rig.camera.next_frame(0)
    torn = Image(PixelFormat.NV12, (np.zeros((4, 6), np.uint8), np.zeros((1, 6), np.uint8)))
    rig.play(10, image=torn)
    assert state_of(rig) == (CameraState.DEGRADED, "corrupt")
    assert rig.camera.next_frame(0) is None
    assert rig.camera.corrupt == 10
    rig.play(1, image=torn)
    assert rig.reader.leaving
    assert state_of(rig) == (CameraState.LOST, "corrupt")


def test_a_state_has_the_time_of_its_begin_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig()
    rig.go_live(30)
    rig.lose()
    at = rig.now
    rig.advance(0.5)
    assert rig.camera.status.since_mono_ns == round(at * 1e9)
    assert rig.camera.status.since_epoch_ns > 0
    rig.camera.stop()
    texts = [record.message for record in caplog.records]
    assert texts == [
        "camera front: live: 6 x 4 bgr",
        "camera front: lost: cable out",
        "camera front: stopped",
    ]


def test_a_recording_that_cannot_be_opened_raises_before_anything_starts() -> None:
    def broken(*_: object) -> None:
        raise SourceError("no such file")

    kinds = {"scripted": SourceKind(broken, live=False)}
    camera = Camera("front", "scripted://it", kinds=kinds)
    with pytest.raises(SourceError, match="no such file"):
        camera.open()
    camera.stop()
    assert camera.next_frame(5.0) is None


def test_an_unknown_scheme_raises() -> None:
    with pytest.raises(SourceUriError, match="unknown kind of source"):
        Camera("front", "nonsense://x").open()


def test_a_frame_s_id_is_the_camera_s() -> None:
    rig = Rig()
    rig.advance(0.0)
    for _ in range(3):
        rig.reader.reads(replace(Frame.arrived(7, IMAGE), capture_mono_ns=round(rig.now * 1e9)))
    frame = rig.camera.next_frame(0)
    assert frame is not None
    assert frame.id == 2


def test_damaged_images_of_the_decoder_are_counted_and_noticed() -> None:
    rig = Rig()
    rig.go_live()
    rig.reader.corrupt = 3
    rig.play(1)
    assert state_of(rig) == (CameraState.DEGRADED, "corrupt")
    assert rig.camera.status.usable
    assert rig.camera.corrupt == 3
    rig.play(62)
    assert rig.camera.state is CameraState.LIVE
    rig.lose()
    rig.advance(0.3)
    rig.go_live(5)
    assert rig.camera.corrupt == 3


def test_a_black_picture_is_the_state_of_its_camera() -> None:
    rig = Rig()
    black = Image.of_bgr(np.zeros((36, 64, 3), np.uint8))
    rig.advance(0.0)
    rig.reader.calls("read")
    rig.play(40, image=black)
    assert state_of(rig) == (CameraState.DEGRADED, "black")
    assert not rig.camera.status.usable
    assert rig.camera.next_frame(0) is not None


def test_identical_pictures_of_a_sensor_make_its_camera_frozen() -> None:
    rig = Rig()
    pixels = np.random.default_rng(1).integers(0, 255, (36, 64, 2), np.uint8)
    picture = Image.of_packed(PixelFormat.YUY2, pixels)
    rig.advance(0.0)
    rig.reader.calls("read")
    rig.play(40, image=picture, clock="sensor")
    assert state_of(rig) == (CameraState.FROZEN, "frozen")
    assert not rig.camera.status.usable
    assert rig.camera.status.arriving


def test_the_published_state_shows_no_password() -> None:
    rig = Rig()
    remember_login("eve", "q8Zrstate")
    rig.advance(0.0)
    rig.reader.fails(SourceError("rtsp://eve:q8Zrstate@cam/x: refused", reason="unauthorized"))
    assert rig.camera.status.text == "rtsp://eve:***@cam/x: refused"


def test_a_source_that_is_there_again_is_opened_at_once() -> None:
    random.seed(1)  # of the delays
    device = ScriptedDevice()
    rig = Rig(device=device)
    rig.go_live()
    rig.lose()
    for _ in range(9):
        device.there = False
        rig.advance(2.6)
        if not rig.reader.done:
            rig.lose("unavailable")
    device.there = False
    rig.advance(0.3)
    attempts = len(rig.readers)
    assert rig.reader.done
    device.there = True
    rig.advance(0.3)
    assert len(rig.readers) == attempts + 1
    assert not rig.reader.done


def test_a_source_that_was_never_away_is_opened_when_it_is_due() -> None:
    device = ScriptedDevice()
    rig = Rig(retry_first_s=4.0, device=device)
    rig.go_live()
    rig.lose()
    rig.advance(1.9)
    assert device.looks > 5
    assert rig.reader.done


def test_a_source_that_comes_and_goes_is_not_opened_each_time() -> None:
    device = ScriptedDevice()
    rig = Rig(retry_first_s=60.0, device=device)
    rig.go_live()
    rig.lose()
    attempts = len(rig.readers)
    for _ in range(12):
        device.there = False
        rig.advance(0.3)
        device.there = True
        rig.advance(0.3)
        if not rig.reader.done:
            rig.lose("unavailable")
    assert len(rig.readers) == attempts + 3
