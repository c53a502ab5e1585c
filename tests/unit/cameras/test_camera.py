from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.cameras.camera import Camera, CameraState
from edge_server.cameras.frame import Frame
from edge_server.cameras.source import SourceKind
from edge_server.errors import SourceError
from edge_server.pixels import Image

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from edge_server.cameras.source import SourceOptions
    from edge_server.cameras.source_uri import SourceUri

    Step: TypeAlias = "Image | BaseException | Gate"

IMAGE = Image.of_bgr(np.zeros((4, 6, 3), np.uint8))
BROKEN = SourceError("cable out")
WAIT_S = 5.0


class Gate:
    """A step of a script: the reading thread waits here until the test lets it on."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._open = threading.Event()

    def wait_until_reached(self) -> None:
        assert self._reached.wait(WAIT_S)

    def let_on(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self._reached.set()
        self._open.wait(12 * WAIT_S)


class ScriptedSource:
    """Gives its steps one after the other, then the end."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = iter(steps)
        self.closed = 0

    def read(self) -> Frame | None:
        for step in self._steps:
            if isinstance(step, Gate):
                step.pass_through()
            elif isinstance(step, BaseException):
                raise step
            else:
                return Frame.arrived(0, step)
        return None

    def close(self) -> None:
        self.closed += 1


class Device:
    """What stands behind the scheme `scripted`: one script for each time it is opened.

    A script that is an error is raised by opening.
    """

    def __init__(self, *scripts: Sequence[Step] | SourceError) -> None:
        self._scripts = iter(scripts)
        self.opened_at: list[float] = []
        self.sources: list[ScriptedSource] = []

    def open(self, _uri: SourceUri, _options: SourceOptions) -> ScriptedSource:
        self.opened_at.append(time.monotonic())
        script = next(self._scripts)
        if isinstance(script, SourceError):
            raise script
        self.sources.append(ScriptedSource(script))
        return self.sources[-1]


def camera_on(device: Device, *, live: bool = True, first_s: float = 0.0) -> Camera:
    kinds = {"scripted": SourceKind(device.open, live=live)}
    return Camera(
        "front", "scripted://it", kinds=kinds, retry_first_s=first_s, retry_longest_s=8 * first_s
    )


def frames_to_the_end(camera: Camera) -> list[Frame]:
    """Everything that is handed out until the camera has ended."""
    frames = []
    while not camera.ended:
        frame = camera.next_frame(WAIT_S)
        if frame is not None:
            frames.append(frame)
    return frames


def test_newest_wins_drops_are_counted_and_ids_count_them_too() -> None:
    gate, newest = Gate(), Image.of_bgr(np.ones((4, 6, 3), np.uint8))
    camera = camera_on(Device([IMAGE, IMAGE, newest, gate]))
    camera.start()
    gate.wait_until_reached()
    frame = camera.next_frame(WAIT_S)
    assert frame is not None
    assert frame.image is newest  # not a copy
    assert frame.id == 2
    assert (camera.captured, camera.dropped) == (3, 2)
    gate.let_on()
    camera.stop()


def test_a_frame_is_handed_out_once() -> None:
    gate = Gate()
    camera = camera_on(Device([IMAGE, gate]))
    camera.start()
    gate.wait_until_reached()
    assert camera.next_frame(WAIT_S) is not None
    assert camera.next_frame(0.0) is None
    gate.let_on()
    camera.stop()


@given(st.lists(st.booleans()))
def test_every_frame_is_taken_dropped_or_waiting(deliveries: list[bool]) -> None:
    camera = camera_on(Device())
    taken = []
    for delivered in deliveries:
        if delivered:
            camera._deliver(Frame.arrived(0, IMAGE))
        elif (frame := camera.next_frame(0)) is not None:
            taken.append(frame.id)
    waiting = camera.next_frame(0) is not None
    assert len(taken) + camera.dropped + waiting == camera.captured == sum(deliveries)
    assert taken == sorted(set(taken))


def test_a_waiting_caller_gets_the_frame_that_is_delivered() -> None:
    camera = camera_on(Device())
    taken: list[Frame | None] = []
    taker = threading.Thread(target=lambda: taken.append(camera.next_frame(WAIT_S)))
    taker.start()
    camera._deliver(Frame.arrived(0, IMAGE))
    taker.join(WAIT_S)
    assert [frame.id for frame in taken if frame] == [0]


def test_a_frame_that_comes_after_stop_is_dropped() -> None:
    camera = camera_on(Device())
    camera.stop()
    camera._deliver(Frame.arrived(0, IMAGE))
    assert camera.dropped == 1
    assert camera.next_frame(0) is None


def test_a_frame_carries_the_moment_its_image_was_there() -> None:
    gate, end = Gate(), Gate()
    camera = camera_on(Device([gate, IMAGE, end]))
    camera.start()
    gate.wait_until_reached()
    assert camera.last_frame_age_s(time.monotonic()) is None
    before_mono_ns, before_epoch_ns = time.monotonic_ns(), time.time_ns()
    gate.let_on()
    frame = camera.next_frame(WAIT_S)
    assert frame is not None
    assert before_mono_ns <= frame.capture_mono_ns <= time.monotonic_ns()
    assert before_epoch_ns <= frame.capture_epoch_ns <= time.time_ns()
    assert camera.last_frame_age_s(frame.capture_mono_ns / 1e9 + 3.0) == pytest.approx(3.0)
    end.let_on()
    camera.stop()


def test_a_source_that_ends_ends_the_camera_after_its_last_frame() -> None:
    device = Device([IMAGE])
    camera = camera_on(device)
    camera.start()
    camera.worker._thread.join(WAIT_S)
    assert camera.state is CameraState.ENDED
    assert not camera.ended  # the last frame waits
    assert [frame.id for frame in frames_to_the_end(camera)] == [0]
    assert camera.next_frame(WAIT_S) is None  # at once
    assert camera.failure is None
    camera.stop()
    assert camera.state is CameraState.ENDED
    assert device.sources[0].closed == 1


def test_a_source_that_raises_is_opened_again_and_ids_go_on() -> None:
    gates = Gate(), Gate(), Gate()
    device = Device([IMAGE, gates[0], BROKEN], [IMAGE, gates[1], BROKEN], [IMAGE, gates[2]])
    camera = camera_on(device)
    camera.start()
    for number, gate in enumerate(gates):
        gate.wait_until_reached()
        frame = camera.next_frame(WAIT_S)
        assert frame is not None
        assert frame.id == number
        assert camera.state is CameraState.LIVE
        assert camera.reconnects == number
        gate.let_on()
    camera.stop()
    assert [source.closed for source in device.sources] == [1, 1, 1]


def test_a_lost_camera_has_a_reason_until_frames_come_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    opening, end = Gate(), Gate()
    camera = camera_on(Device([IMAGE, BROKEN], BROKEN, BROKEN, [opening, IMAGE, end]))
    camera.start()
    opening.wait_until_reached()
    assert camera.state is CameraState.LOST
    assert camera.failure == "cable out"
    assert caplog.text.count("cable out") == 1  # one line for one state
    opening.let_on()
    end.wait_until_reached()
    assert camera.state is CameraState.LIVE
    assert camera.failure is None
    assert camera.reconnects == 1
    end.let_on()
    camera.stop()


def test_delays_between_attempts_double() -> None:
    first_s = 0.01
    device = Device(BROKEN, BROKEN, [BROKEN], [IMAGE, BROKEN], [IMAGE])
    camera = camera_on(device, first_s=first_s)
    camera.start()
    frames_to_the_end(camera)
    gaps_s = np.diff(device.opened_at)
    assert len(gaps_s) == 4
    assert np.all(gaps_s >= first_s / 2 * np.array([1, 2, 4, 8]))
    camera.stop()


def test_a_source_that_ran_long_is_opened_again_after_the_first_delay() -> None:
    camera = camera_on(Device([BROKEN], [BROKEN], [BROKEN]), first_s=0.01)
    for _ in range(2):
        camera.open()
        camera._tick(time.monotonic() + 1)
    assert camera._backoff._whole_s == pytest.approx(0.04)
    camera.open()
    camera._opened_at -= 10.0
    camera._tick(time.monotonic())
    assert camera._backoff._whole_s == pytest.approx(0.02)


def test_waiting_for_a_lost_camera_is_progress_and_stop_does_not_wait_for_it() -> None:
    opening = Gate()
    device = Device([opening, BROKEN])
    camera = camera_on(device, first_s=3600.0)
    camera.start()
    opening.wait_until_reached()
    opening.let_on()
    before = time.monotonic()
    camera.stop(WAIT_S)
    assert time.monotonic() - before < WAIT_S
    assert not camera.worker.alive
    assert len(device.opened_at) == 1
    assert camera.state is CameraState.STOPPED


def test_one_wait_for_a_lost_camera_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    camera = camera_on(Device(BROKEN), first_s=4.0)
    monkeypatch.setattr(camera.worker, "wait", waits.append)
    camera.open()
    for late_s in (0.0, 3.5):
        camera._tick(camera._retry_at - 4.0 + late_s)
    assert waits == pytest.approx([1.0, 0.5])


def test_a_recording_that_cannot_be_opened_is_an_error_before_anything_starts() -> None:
    camera = camera_on(Device(BROKEN), live=False)
    with pytest.raises(SourceError, match="cable out"):
        camera.open()
    camera.stop()
    assert camera.next_frame(WAIT_S) is None


def test_a_live_camera_that_is_away_is_opened_later() -> None:
    device = Device(BROKEN, [IMAGE])
    camera = camera_on(device)
    camera.open()
    assert camera.state is CameraState.LOST
    assert camera.failure == "cable out"
    camera.start()
    assert [frame.id for frame in frames_to_the_end(camera)] == [0]
    assert camera.reconnects == 0
    camera.stop()


def test_an_unknown_scheme_is_an_error_for_a_live_camera_too() -> None:
    with pytest.raises(SourceError, match="known: csi, v4l2, rtsp"):
        Camera("front", "nonsense://x").open()


def test_what_open_opened_is_what_start_reads() -> None:
    device = Device([IMAGE])
    camera = camera_on(device)
    camera.open()
    camera.open()
    camera.start()
    assert len(frames_to_the_end(camera)) == 1
    assert len(device.opened_at) == 1
    camera.stop()


def test_stop_releases_a_source_that_was_never_started_and_may_be_called_twice() -> None:
    device = Device([IMAGE])
    camera = camera_on(device)
    camera.open()
    camera.stop()
    camera.stop()
    assert device.sources[0].closed == 1
    assert camera.state is CameraState.STOPPED


def test_stop_wakes_who_waits_for_a_frame() -> None:
    gate = Gate()
    camera = camera_on(Device([gate]))
    camera.start()
    gate.wait_until_reached()
    got: list[Frame | None] = []
    taker = threading.Thread(target=lambda: got.append(camera.next_frame(60.0)))
    taker.start()
    camera.stop(0.0)  # the source hangs: its thread is left behind
    taker.join(WAIT_S)
    assert got == [None]
    gate.let_on()
    camera.stop()


def test_a_capture_thread_that_dies_is_a_lost_camera() -> None:
    device = Device([IMAGE, ZeroDivisionError("a bug")])
    camera = camera_on(device)
    camera.start()
    camera.worker._thread.join(WAIT_S)
    assert camera.state is CameraState.LOST
    assert camera.failure is not None
    assert "a bug" in camera.failure
    assert not camera.ended
    assert device.sources[0].closed == 1
    camera.stop()


def test_a_synthetic_camera_runs_from_end_to_end() -> None:
    camera = Camera("front", "synthetic://road?fps=0&width=160&height=90&frames=20")
    camera.open()
    camera.start()
    frames = frames_to_the_end(camera)
    assert frames[-1].id == 19
    assert len(frames) + camera.dropped == camera.captured == 20
    camera.stop()
