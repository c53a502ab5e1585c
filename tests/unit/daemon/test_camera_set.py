"""Cameras come, go and change, and those whose settings stay the same notice nothing of it."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.waiting import wait_until
from unit.pipeline.given_lanes import GivenLanes, data_plane

from edge_server.cameras.frame import Frame, Pace
from edge_server.cameras.source import SourceKind
from edge_server.cameras.source_uri import Credentials
from edge_server.daemon import camera_set
from edge_server.daemon.camera_set import MOST_HANGING, Argus, CameraSet
from edge_server.daemon.parts import road_follower
from edge_server.errors import (
    SettingsError,
    SourceError,
    SourceUriError,
    StageStuck,
    Unavailable,
)
from edge_server.pipeline.event_log import EventLog
from edge_server.pipeline.vehicle import VehicleInputs
from edge_server.pixels import ColourMatrix, Image
from edge_server.settings import CameraSection, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from edge_server.backends.contract import Tensors
    from edge_server.cameras.source_uri import SourceOptions, SourceUri
    from edge_server.lanes.types import LaneFrame

WAIT_S = 30.0
# No two in a row are the same: a camera that repeats one is frozen.
IMAGES = [
    Image.of_bgr(image)
    for image in np.random.default_rng(7).integers(0, 255, (3, 9, 16, 3), np.uint8)
]


class Source:
    """A device that delivers 200 frames a second; that of `stuck://` hangs after one of them."""

    corrupt = 0

    def __init__(self, devices: Devices, uri: SourceUri, options: SourceOptions) -> None:
        if uri.host in devices.busy:
            raise SourceError(f"{uri.host} is open already")
        devices.busy.add(uri.host)
        self.device, self.options = uri.host, options
        self._devices, self._uri = devices, uri
        self._pace = Pace(200.0)
        self._read = 0

    def read(self) -> Frame | None:
        self._pace.wait()
        if self._uri.scheme == "stuck" and self._read:
            assert self._devices.let_go.wait(WAIT_S)
            raise SourceError("let go")
        self._read += 1
        return Frame.arrived(0, IMAGES[self._read % len(IMAGES)])

    def close(self) -> None:
        self._devices.busy.discard(self._uri.host)


class Devices:
    """All devices of the host; each opens once at a time."""

    def __init__(self) -> None:
        self.busy: set[str] = set()
        self.opened: list[Source] = []
        self.let_go = threading.Event()
        self.both = threading.Barrier(2)

    def open_beside(self, uri: SourceUri, options: SourceOptions) -> Source:
        self.both.wait(WAIT_S)
        return self.open(uri, options)

    def open(self, uri: SourceUri, options: SourceOptions) -> Source:
        self.opened.append(Source(self, uri, options))
        return self.opened[-1]

    def open_recording(self, uri: SourceUri, _: SourceOptions) -> Source:
        raise SourceError(f"{uri.label}: no such file")

    def kinds(self) -> dict[str, SourceKind]:
        return {
            "device": SourceKind(self.open, live=True),
            "stuck": SourceKind(self.open, live=True),
            "driver": SourceKind(self.open, live=True, device=True),
            "beside": SourceKind(self.open_beside, live=True),
            "gone": SourceKind(self.open_recording, live=True),
            "recording": SourceKind(self.open_recording, live=False),
        }


class Drive:
    """A camera set on `Devices`, with a model of its own, and what its listeners got."""

    def __init__(self, model: GivenLanes | None = None, **cameras: CameraSection) -> None:
        self.devices = Devices()
        self.lanes: dict[str, queue.Queue[LaneFrame]] = {
            name: queue.Queue() for name in ("front", "rear", "left")
        }
        self.delivered: Counter[str] = Counter()
        self.models: set[str] = set()
        self.removed: list[str] = []
        self.set = CameraSet(
            cameras,
            data_plane(model or GivenLanes()),
            [self._note],
            self.models,
            self.removed.append,
            road=lambda calibration: road_follower(
                Settings(), calibration, VehicleInputs(), EventLog()
            ),
            kinds=self.kinds(),
            argus=self.argus(),
        )
        self.set.open_recordings()
        self.set.validate(threading.Event())
        self.set.start()

    def kinds(self) -> dict[str, SourceKind]:
        return self.devices.kinds()

    def argus(self) -> Argus:
        return Argus(None)

    def _note(self, lane_frame: LaneFrame, _: Frame) -> None:
        self.delivered[lane_frame.camera] += 1
        self.lanes[lane_frame.camera].put(lane_frame)

    def names(self) -> list[str]:
        return [pipeline.camera.name for pipeline in self.set.pipelines]

    def next_lanes(self, name: str) -> LaneFrame:
        """The next frame from now on, without a failure."""
        while not self.lanes[name].empty():
            self.lanes[name].get()
        lane_frame = self.lanes[name].get(timeout=WAIT_S)
        assert not lane_frame.failure
        return lane_frame

    def stop(self) -> None:
        self.devices.let_go.set()
        self.set.ask_to_stop()
        self.set.stop(lambda: WAIT_S)


def section(uri: str, **more: object) -> CameraSection:
    return CameraSection(uri=uri, **more)


FRONT, REAR, LEFT = (section(f"device://{n}") for n in range(3))


@pytest.fixture
def drive() -> Iterator[Drive]:
    made = Drive(front=FRONT, rear=REAR)
    yield made
    made.stop()


def test_a_camera_whose_settings_stay_the_same_loses_no_frame(drive: Drive) -> None:
    front = drive.set.pipelines[0]
    drive.next_lanes("front")
    for sections in (
        {"front": FRONT, "left": LEFT},
        {"front": FRONT},
        {"front": FRONT, "rear": REAR},
    ):
        drive.set.change(sections)
        drive.next_lanes("front")
    assert drive.set.pipelines[0] is front
    assert [each.device for each in drive.devices.opened].count("0") == 1
    drive.stop()
    # Each was delivered or replaced by a newer one; one may still wait.
    waiting = front.camera.captured - front.camera.dropped - drive.delivered["front"]
    assert waiting in {0, 1}
    assert front.failed_frames == front.camera.reconnects == 0


def test_cameras_are_opened_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than the one that is opened waits for the other.
    monkeypatch.setattr(camera_set, "_FIRST_FRAMES_S", 2 * WAIT_S)
    drive = Drive(front=section("beside://0"), rear=section("beside://1"))
    try:
        assert not drive.devices.both.broken
        assert [each.camera.reconnects for each in drive.set.pipelines] == [0, 0]
        drive.next_lanes("rear")
    finally:
        drive.stop()


def test_what_changed_is_told_in_words(drive: Drive) -> None:
    assert drive.set.change({"front": FRONT, "rear": REAR}) == ""
    changes = drive.set.change({"rear": section("device://9"), "left": LEFT})
    assert changes == "added left; removed front; changed rear"
    assert drive.names() == ["rear", "left"]


def test_a_camera_that_was_added_has_lanes_and_a_removed_one_is_closed(drive: Drive) -> None:
    drive.set.change({"front": FRONT, "left": LEFT})
    drive.next_lanes("left")
    assert drive.removed == ["rear"]
    assert drive.devices.busy == {"0", "2"}
    assert drive.set.change({}) == "removed front, left"
    assert (drive.devices.busy, drive.models) == (set(), set())
    assert drive.set.workers() == []


def test_a_new_source_opens_after_the_old_one_of_the_same_device_has_closed(drive: Drive) -> None:
    drive.next_lanes("front")
    drive.set.change({"rear": section("device://0"), "front": section("device://1")})
    for name in ("front", "rear"):
        drive.next_lanes(name)
    assert all(pipeline.camera.captured for pipeline in drive.set.pipelines)
    assert drive.removed == []


def test_model_priority_and_age_change_without_reopening_the_source(drive: Drive) -> None:
    camera = drive.set.pipelines[0].camera
    before = drive.next_lanes("front")
    changed = section("device://0", priority=3, max_age_ms=150)
    assert drive.set.change({"front": changed, "rear": REAR}) == "changed front"
    after = drive.next_lanes("front")
    assert drive.set.pipelines[0].camera is camera
    assert (before.max_age_ms, after.max_age_ms) == (200, 150)
    assert after.frame_id > before.frame_id
    assert len(drive.devices.opened) == 2


def test_a_camera_that_keeps_its_source_keeps_its_counts_and_its_last_frame(drive: Drive) -> None:
    drive.next_lanes("front")
    before = drive.set.pipelines[0]
    before.failed_frames, before.too_old_frames, before.unusable_frames = 1, 2, 3
    drive.set.change({"front": section("device://0", priority=3), "rear": REAR})
    after = drive.set.pipelines[0]
    counts = after.failed_frames, after.too_old_frames, after.unusable_frames
    assert all(now >= then for now, then in zip(counts, (1, 2, 3), strict=True))
    assert after._last is not None


def test_a_removed_camera_s_late_lanes_reach_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(GivenLanes):
        holds = False
        begun, let_go = threading.Event(), threading.Event()

        def run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
            if self.holds:
                self.begun.set()
                assert self.let_go.wait(WAIT_S)
            return super().run(inputs, outputs)

    monkeypatch.setattr(camera_set, "_LEAVE_S", 0.05)
    model = Slow()
    drive = Drive(model, front=FRONT)
    drive.next_lanes("front")
    model.holds = True
    assert model.begun.wait(WAIT_S)
    leaving = drive.set.pipelines[0].worker
    assert drive.set.change({}) == "removed front"
    told = drive.delivered["front"]
    model.let_go.set()
    leaving._thread.join(WAIT_S)
    assert drive.delivered["front"] == told
    drive.stop()


def test_colours_and_reader_open_the_source_anew_with_them(drive: Drive) -> None:
    changed = section("device://0", color_matrix="bt709", color_range="full", reader="opencv")
    drive.set.change({"front": changed, "rear": REAR})
    drive.next_lanes("front")
    options = drive.devices.opened[-1].options
    assert (options.matrix, options.reader) == (ColourMatrix.BT709, "opencv")


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        (section("recording://x"), SourceError, "camera left: recording://x: no such file"),
        (section("devise://x"), SourceUriError, "camera left: devise://x: unknown kind"),
        (section("device://x", model="other"), Unavailable, "cameras.left.model: 'other' gives no"),
    ],
)
def test_a_bad_camera_leaves_everything_as_it_is(
    drive: Drive, bad: CameraSection, error: type[Exception], text: str
) -> None:
    pipelines = list(drive.set.pipelines)
    with pytest.raises(error) as raised:
        drive.set.change({"left": bad, "front": section("device://7")})
    assert text in str(raised.value)
    assert drive.set.pipelines == pipelines
    assert (drive.models, drive.removed) == ({"lane_detection"}, [])
    drive.next_lanes("front")
    drive.next_lanes("rear")


def test_a_live_camera_that_is_absent_is_added_all_the_same(drive: Drive) -> None:
    drive.set.change({"front": FRONT, "left": section("gone://it")})
    assert drive.names() == ["front", "left"]
    drive.next_lanes("front")
    drive.set.change({"front": FRONT, "left": LEFT})
    drive.next_lanes("left")


class FailsToOpen(Drive):
    """Two CSI cameras, which open once `opens` is set; time passes where the test says."""

    def __init__(self, folder: Path) -> None:
        self.opens = False
        self.now_s = 1000.0
        self.folder = folder
        super().__init__(front=section("csi://0"), rear=section("csi://1"))

    def argus(self) -> Argus:
        return Argus(self.folder, self.folder / "restarted", lambda: self.now_s)

    def kinds(self) -> dict[str, SourceKind]:
        return {"csi": SourceKind(self._open, live=True)}

    def _open(self, uri: SourceUri, options: SourceOptions) -> Source:
        if not self.opens:
            raise SourceError("timeout", reason="unavailable")
        return self.devices.open(uri, options)

    def fails(self, number: int) -> bool:
        return all(p.camera.failed_openings >= number for p in self.set.pipelines)

    @property
    def requested(self) -> bool:
        return (self.folder / "restart-argus").exists()

    def restart(self) -> None:
        """As edge-server-argus.service does."""
        (self.folder / "restart-argus").unlink()
        (self.folder / "restarted").write_text(f"{self.now_s} 4.00\n")

    def reasons(self) -> set[str]:
        return {p.camera.status.reason for p in self.set.pipelines}


def test_a_stuck_argus_is_restarted_and_then_a_reboot_is_needed(tmp_path: Path) -> None:
    drive = FailsToOpen(tmp_path)
    wait_until(lambda: drive.fails(2))
    drive.set.check(0.0)
    assert drive.requested
    assert not drive.fails(2)  # counted anew
    drive.restart()
    wait_until(lambda: drive.fails(2))
    drive.now_s += 20  # it starts yet
    drive.set.check(0.0)
    assert drive.reasons() == {"unavailable"}
    drive.now_s += 20
    drive.set.check(0.0)
    assert drive.reasons() == {"reboot_needed"}
    assert not drive.requested
    drive.now_s += 600
    drive.set.check(0.0)
    assert drive.requested
    drive.stop()


def test_argus_is_left_alone_while_one_csi_camera_works(tmp_path: Path) -> None:
    drive = FailsToOpen(tmp_path)
    drive.opens = True
    wait_until(lambda: drive.reasons() == {""})  # an attempt before may have failed
    drive.next_lanes("front")
    drive.next_lanes("rear")
    drive.set.pipelines[1].camera.failed_openings = 9
    drive.set.check(0.0)
    assert not drive.requested
    drive.stop()


def test_a_camera_that_hangs_in_its_driver_is_replaced(
    monkeypatch: pytest.MonkeyPatch, drive: Drive
) -> None:
    monkeypatch.setattr(camera_set, "_LEAVE_S", 0.05)
    drive.set.change({"front": FRONT, "left": section("stuck://3")})
    drive.lanes["left"].get(timeout=WAIT_S)
    stuck = drive.set.pipelines[1].camera
    drive.set.change({"front": FRONT, "left": LEFT})
    assert "3" in drive.devices.busy  # it hangs yet
    assert stuck.worker not in drive.set.workers()
    drive.next_lanes("front")
    drive.next_lanes("left")


def test_more_readers_that_hang_than_a_process_may_keep_end_it(
    monkeypatch: pytest.MonkeyPatch, drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(camera_set, "_LEAVE_S", 0.05)
    for number in range(MOST_HANGING + 1):
        drive.set.change({"front": FRONT, "left": section(f"stuck://{number + 3}")})
        drive.lanes["left"].get(timeout=WAIT_S)
        if drive.set.hanging <= MOST_HANGING:
            drive.set.check(0.0)
        drive.set.change({"front": FRONT})
        # A camera on a busy machine may have replaced a reader that hangs by a second one.
        assert drive.set.hanging > number
    with pytest.raises(StageStuck, match=r"\d+ readers of cameras hang"):
        drive.set.check(0.0)
    assert caplog.text.count("camera left: was removed while its reader hangs") == MOST_HANGING + 1


@pytest.mark.parametrize(
    ("scheme", "others_s", "ends"),
    [("driver", 10.5, True), ("driver", 9.5, False), ("stuck", 10.5, False)],
    ids=["alone", "another one gives frames", "no driver of this machine"],
)
def test_a_driver_that_hangs_is_worth_a_restart_where_no_camera_gives_frames(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, scheme: str, others_s: float, ends: bool
) -> None:
    drive.set.change({"front": FRONT, "left": section(f"{scheme}://3")})
    drive.lanes["left"].get(timeout=WAIT_S)
    front, left = (pipeline.camera for pipeline in drive.set.pipelines)
    monkeypatch.setattr(type(left), "hanging", property(lambda self: 2 * (self is left)))
    newest_s = max((each._last_mono_ns or 0) / 1e9 for each in (front, left))
    # The front camera goes on; what counts is the time that the watch is told.
    now = newest_s + others_s
    monkeypatch.setattr(front, "last_frame_age_s", lambda _: others_s)
    monkeypatch.setattr(left, "last_frame_age_s", lambda _: others_s + 10.0)
    if not ends:
        drive.set.check(now)
        return
    with pytest.raises(StageStuck, match="camera left: hangs in its driver, and no other camera"):
        drive.set.check(now)


def test_a_camera_that_changes_is_there_all_the_time_and_its_hang_ends_nothing() -> None:
    drive = Drive(front=FRONT, left=LEFT)
    seen: list[tuple[list[str], int]] = []
    drive.set._on_removed = lambda _: seen.append((drive.names(), len(drive.set.workers())))
    drive.set.change({"front": section("device://5")})
    assert seen == [(["front", "left"], 0)]
    assert (drive.names(), len(drive.set.workers())) == (["front"], 2)
    drive.stop()


def test_after_a_request_to_stop_no_camera_starts(drive: Drive) -> None:
    drive.set.ask_to_stop()
    with pytest.raises(Unavailable, match="the daemon stops"):
        drive.set.change({"left": LEFT})
    drive.set.change({"front": FRONT})
    assert [each.device for each in drive.devices.opened] == ["0", "1"]


def test_a_request_to_stop_ends_the_trial_of_new_cameras() -> None:
    class Counted(GivenLanes):
        runs = 0
        stop_at_next = False

        def run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
            self.runs += self.stop_at_next
            if self.stop_at_next:
                stopped.set.ask_to_stop()
            return super().run(inputs, outputs)

    model = Counted()
    stopped = Drive(model)
    model.stop_at_next = True
    with pytest.raises(Unavailable, match="the daemon stops"):
        stopped.set.change({"front": FRONT, "rear": REAR, "left": LEFT})
    assert (model.runs, stopped.names(), stopped.devices.opened) == (1, [], [])


def test_the_models_of_cameras_are_those_of_the_present_ones(drive: Drive) -> None:
    of_cameras = drive.models
    assert of_cameras == {"lane_detection"}
    drive.set.change({})
    assert of_cameras == set()
    drive.set.change({"front": FRONT})
    assert of_cameras == {"lane_detection"}


def test_a_changed_file_of_credentials_opens_the_source_anew(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("root:old")
    camera = section("device://0", credentials_file=str(file))
    drive = Drive(front=camera, rear=REAR)
    assert drive.set.change({"front": camera, "rear": REAR}) == ""
    file.write_text("root:new")
    assert drive.set.change({"front": camera, "rear": REAR}) == "changed front"
    drive.next_lanes("front")
    drive.stop()
    assert drive.devices.opened[-1].options.credentials == Credentials("root", "new")


def test_a_file_of_credentials_that_is_not_there_is_named_and_changes_nothing(drive: Drive) -> None:
    bad = section("device://7", credentials_file="/no/such/file")
    with pytest.raises(SettingsError, match=r"cameras\.left\.credentials_file: /no/such/file: can"):
        drive.set.change({"left": bad})
    assert drive.names() == ["front", "rear"]


def test_a_calibration_changes_without_reopening_the_source(drive: Drive, tmp_path: Path) -> None:
    file = tmp_path / "front.toml"
    lens = (
        '[lens]\nkind = "pinhole"\nwidth = 160\nheight = 90\nfx = 160\nfy = 160\ncx = 80\ncy = 45\n'
        "distortion = [0, 0, 0, 0, 0]\n[mounting]\nheight_m = "
    )
    file.write_text(f"{lens}1.4")
    camera = drive.set.pipelines[0].camera
    assert drive.next_lanes("front").calibration_id == ""
    sections = {"front": section("device://0", calibration=str(file)), "rear": REAR}
    assert drive.set.change(sections) == "changed front"
    first = drive.next_lanes("front").calibration_id
    assert first
    # The settings stay the same, the file does not.
    assert drive.set.change(sections) == ""
    file.write_text(f"{lens}1.5")
    assert drive.set.change(sections) == "changed front"
    second = drive.next_lanes("front").calibration_id
    assert second not in ("", first)
    # A damaged file changes nothing.
    file.write_text(f"{lens}'high'")
    with pytest.raises(SettingsError, match=r"cameras\.front\.calibration: .*mounting\.height_m"):
        drive.set.change(sections)
    assert drive.next_lanes("front").calibration_id == second
    assert drive.set.pipelines[0].camera is camera
    assert drive.next_lanes("rear").calibration_id == ""


def test_a_calibration_that_is_missing_is_a_mistake_in_the_settings(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.toml")
    with pytest.raises(SettingsError, match=r"cameras\.front\.calibration: .*absent\.toml: cannot"):
        Drive(front=section("device://0", calibration=absent))
