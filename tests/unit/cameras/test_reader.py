"""A reader on real threads, over drivers that hang where the test wants them to."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.cameras.camera import Camera
from edge_server.cameras.frame import Frame
from edge_server.cameras.source import SourceKind
from edge_server.cameras.status import CameraState
from edge_server.errors import SourceError, SourceUriError
from edge_server.pixels import Image, PixelFormat
from edge_server.process.threads import AwakeTime, Backoff, check_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from edge_server.cameras.source_uri import SourceOptions, SourceUri

    Step: TypeAlias = "Image | BaseException | Gate"

IMAGE = Image.of_bgr(np.zeros((4, 6, 3), np.uint8))
WAIT_S = 30.0


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
        self._open.wait(2 * WAIT_S)


class Source:
    """Gives its steps one after the other, then the end."""

    corrupt = 0

    def __init__(self, steps: Sequence[Step], closing: Gate | None = None) -> None:
        self._steps = iter(steps)
        self._closing = closing
        self.closed = threading.Event()

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
        if self._closing is not None:
            self._closing.pass_through()
        self.closed.set()


class Device:
    """What stands behind the scheme `scripted`: one source for each time it is opened.

    A gate is passed by opening, an error is raised by it.
    """

    def __init__(self, *sources: Source | Gate | SourceError) -> None:
        self._sources = iter(sources)

    def open(self, _uri: SourceUri, _options: SourceOptions) -> Source:
        for source in self._sources:
            if isinstance(source, SourceError):
                raise source
            if isinstance(source, Source):
                return source
            source.pass_through()
        raise AssertionError("opened once too often")


class Clock:
    """Runs ahead of the monotonic clock by as much as the test says."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s

    def run_ahead(self, camera: Camera, seconds: float) -> None:
        """Run ahead so far, with a look of `camera` in every tenth of a second of it, or until the
        camera leaves its reader behind."""

        def left_behind() -> int:
            return camera.faults["stuck"] + camera.faults["no_frames"]

        before = left_behind()
        for _ in range(round(10 * seconds)):
            if left_behind() != before:
                break
            self.ahead_s += 0.1
            camera.supervise(self())


def camera_on(device: Device, *, live: bool = True, clock: Clock | None = None) -> Camera:
    kinds = {"scripted": SourceKind(device.open, live=live)}
    return Camera(
        "front", "scripted://it", kinds=kinds, retry_first_s=0.0, clock=clock or time.monotonic
    )


def wait_for(camera: Camera, true: Callable[[], bool]) -> None:
    """Until frames or states have made it true."""
    until = time.monotonic() + WAIT_S
    with camera._changed:
        while not true():
            assert time.monotonic() < until
            camera._changed.wait(0.05)


def frames_to_the_end(camera: Camera) -> list[Frame]:
    frames = []
    until = time.monotonic() + WAIT_S
    while not camera.ended:
        assert time.monotonic() < until
        frame = camera.next_frame(WAIT_S)
        if frame is not None:
            frames.append(frame)
    return frames


def test_a_source_that_raises_is_opened_again_and_each_is_closed() -> None:
    ends = Gate(), Gate(), Gate()
    sources = [Source([IMAGE, end, SourceError("cable out")]) for end in ends]
    camera = camera_on(Device(*sources))
    camera.start()
    for number, end in enumerate(ends):
        end.wait_until_reached()
        frame = camera.next_frame(WAIT_S)
        assert frame is not None
        assert frame.id == number
        assert camera.state is CameraState.LIVE
        assert camera.reconnects == number
        if number < 2:
            end.let_on()
    ends[2].let_on()
    camera.stop()
    assert all(source.closed.wait(WAIT_S) for source in sources)


def test_a_frame_that_no_inspection_foresaw_costs_its_source_and_is_no_hot_loop() -> None:
    nothing = Image(PixelFormat.BGR, ())
    end = Gate()
    camera = camera_on(Device(Source([nothing]), Source([IMAGE, end])))
    camera.start()
    end.wait_until_reached()
    assert camera.faults["lost"] == 1
    assert camera.state is CameraState.LIVE
    end.let_on()
    camera.stop()


def test_a_waiting_caller_gets_the_frame_that_arrives() -> None:
    gate, end = Gate(), Gate()
    camera = camera_on(Device(Source([gate, IMAGE, end])))
    camera.start()
    gate.wait_until_reached()
    taken: list[Frame | None] = []
    taker = threading.Thread(target=lambda: taken.append(camera.next_frame(WAIT_S)))
    taker.start()
    gate.let_on()
    taker.join(WAIT_S)
    assert [frame.id for frame in taken if frame] == [0]
    end.let_on()
    camera.stop()


def test_a_recording_ends_the_camera_and_its_threads() -> None:
    source = Source([IMAGE])
    camera = camera_on(Device(source), live=False)
    camera.open()
    camera.open()
    camera.start()
    assert [frame.id for frame in frames_to_the_end(camera)] == [0]
    assert camera.next_frame(WAIT_S) is None  # at once
    camera.stop()
    assert source.closed.is_set()
    assert not camera.worker.alive
    assert camera.state is CameraState.ENDED


def test_stop_releases_a_source_that_was_never_read_and_may_be_called_twice() -> None:
    source = Source([IMAGE])
    camera = camera_on(Device(source), live=False)
    camera.open()
    camera.stop()
    camera.stop()
    assert source.closed.is_set()
    assert camera.state is CameraState.STOPPED


def test_stop_wakes_who_waits_for_a_frame_though_the_driver_hangs() -> None:
    gate = Gate()
    camera = camera_on(Device(Source([gate])))
    camera.start()
    gate.wait_until_reached()
    got: list[Frame | None] = []
    taker = threading.Thread(target=lambda: got.append(camera.next_frame(60.0)))
    taker.start()
    camera.stop(0.0)  # the reader's thread is left behind
    taker.join(WAIT_S)
    assert got == [None]
    gate.let_on()
    camera.stop()


def test_stop_does_not_wait_for_the_next_attempt() -> None:
    camera = camera_on(Device(SourceError("away")))
    camera._reopening._backoff = Backoff(3600.0, 3600.0)
    camera.start()
    wait_for(camera, lambda: camera.state is CameraState.LOST)
    before = time.monotonic()
    camera.stop(WAIT_S)
    assert time.monotonic() - before < WAIT_S
    assert camera.state is CameraState.STOPPED


def test_a_live_camera_that_is_away_is_opened_later() -> None:
    end = Gate()
    camera = camera_on(Device(SourceError("away", reason="unavailable"), Source([IMAGE, end])))
    camera.open()
    assert camera.state is CameraState.LOST
    assert camera.status.reason == "unavailable"
    camera.start()
    assert camera.next_frame(WAIT_S) is not None
    assert camera.reconnects == 0
    end.let_on()
    camera.stop()


def test_a_mistake_in_the_uri_of_a_live_camera_raises() -> None:
    camera = camera_on(Device(SourceUriError("unknown option")))
    with pytest.raises(SourceUriError, match="unknown option"):
        camera.open()
    camera.stop()


@pytest.mark.parametrize("call", ["open", "read", "close"])
def test_a_driver_that_hangs_is_left_behind_and_a_new_reader_delivers(call: str) -> None:
    hang, end, clock = Gate(), Gate(), Clock()
    steps: list[Step] = [hang] if call == "read" else []
    closing = hang if call == "close" else None
    left_behind = Source([IMAGE, *steps, SourceError("gone")], closing)
    replacement = Source([IMAGE, end])
    script = [hang, replacement, left_behind] if call == "open" else [left_behind, replacement]
    camera = camera_on(Device(*script), clock=clock)
    camera.start()
    hang.wait_until_reached()
    camera.next_frame(0)
    clock.run_ahead(camera, 11.0)
    assert camera.faults["stuck"] == 1
    assert camera.next_frame(WAIT_S) is not None
    assert camera.state is CameraState.LIVE
    hang.let_on()
    end.let_on()
    camera.stop()
    assert left_behind.closed.wait(WAIT_S)
    assert replacement.closed.wait(WAIT_S)


def test_a_camera_whose_drivers_hang_costs_itself_alone_and_comes_back() -> None:
    hangs, clock = (Gate(), Gate()), Clock()
    end = Gate()
    back = Source([IMAGE, end])
    camera = camera_on(Device(*(Source([hang]) for hang in hangs), back), clock=clock)
    camera.worker.deadline_s = 100.0
    for hang in hangs:
        camera.supervise(clock())
        hang.wait_until_reached()
        clock.run_ahead(camera, 11.0)
    assert camera.status.reason == "out_of_service"
    camera.start()
    hangs[1].let_on()
    assert camera.next_frame(WAIT_S) is not None
    assert camera.state is CameraState.LIVE
    awake = AwakeTime(1.0)
    awake.look(time.monotonic())
    check_progress([camera.worker], awake)
    hangs[0].let_on()
    end.let_on()
    camera.stop()


def test_a_synthetic_camera_runs_from_end_to_end() -> None:
    camera = Camera("front", "synthetic://road?fps=0&width=160&height=90&frames=20")
    camera.open()
    camera.start()
    frames = frames_to_the_end(camera)
    # In lock-step, with the steps of 30 frames a second.
    assert [frame.id for frame in frames] == list(range(20))
    assert {later.capture_mono_ns - frame.capture_mono_ns for frame, later in pairwise(frames)} == {
        33_333_333
    }
    assert {frame.age_ns(time.monotonic_ns()) for frame in frames} == {0}
    assert (camera.captured, camera.dropped) == (20, 0)
    camera.stop()


def test_who_is_stopped_waits_for_no_frame_to_be_taken() -> None:
    camera = Camera("front", "synthetic://road?fps=0&width=160&height=90")
    camera.open()
    camera.start()
    assert camera.next_frame(WAIT_S) is not None
    assert camera.wait_for_frame(WAIT_S)
    for _ in range(3):  # nobody takes it, and the camera has not stalled
        camera.supervise(time.monotonic() + 60)
    assert camera.state is CameraState.LIVE
    camera.stop()
    assert camera.hanging == 0
