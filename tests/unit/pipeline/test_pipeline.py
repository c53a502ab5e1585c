"""The camera loop: newest frame in, LaneFrame out, and a failing model costs only its frames."""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from unit.pipeline.given_lanes import LANES, OF_ANY_AGE_MS, GivenLanes, data_plane, frame

from edge_server.board.board import Identity
from edge_server.cameras.calibration import Calibration
from edge_server.cameras.frame import Frame, UsefulSize
from edge_server.cameras.status import CameraState, CameraStatus
from edge_server.errors import SettingsError, Unavailable
from edge_server.inference.data_plane import MODEL_STUCK_S, DataPlane
from edge_server.inference.registry import ModelRegistry
from edge_server.pipeline import messages
from edge_server.pipeline.fair_shares import FairShares
from edge_server.pipeline.lane_pipeline import FRAME_DEADLINE_S, LanePipeline
from edge_server.pixels import Image
from edge_server.process.logs import SAME_LINES, LineLimits
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from edge_server.backends.contract import Tensors
    from edge_server.lanes.types import LaneFrame


class OneCamera:
    """A camera that was filled beforehand."""

    name = "front"
    dropped = 3
    ended = False
    is_live = False
    lockstep = False

    def __init__(self, *frames: Frame) -> None:
        self._frames = list(frames)
        self.status = CameraStatus(CameraState.LIVE)
        self.useful = UsefulSize()

    def become(self, state: CameraState, reason: str = "", text: str = "") -> None:
        self.status = CameraStatus(state, reason, text, 5_000, 9_000)
        self.ended = state is CameraState.ENDED

    def wait_for_frame(self, timeout_s: float) -> bool:
        return bool(self._frames)

    @property
    def newest(self) -> Frame | None:
        return self._frames[0] if self._frames else None

    def next_frame(self, timeout_s: float) -> Frame | None:
        return self._frames.pop(0) if self._frames else None


def pipeline(
    model: GivenLanes | DataPlane,
    *frames: Frame,
    max_age_ms: int = OF_ANY_AGE_MS,
    **more: Any,
) -> tuple[LanePipeline, list[LaneFrame]]:
    """The loop of a camera with these frames, and what it delivers."""
    delivered: list[LaneFrame] = []
    loop = LanePipeline(
        OneCamera(*frames),
        model if isinstance(model, DataPlane) else data_plane(model),
        "lane_detection",
        [lambda lane_frame, _frame: delivered.append(lane_frame)],
        max_age_ms=max_age_ms,
        **more,
    )
    return loop, delivered


def camera_of(loop: LanePipeline) -> OneCamera:
    assert isinstance(loop.camera, OneCamera)
    return loop.camera


def test_a_lane_frame_carries_what_a_consumer_needs() -> None:
    captured = frame(41)
    loop, delivered = pipeline(GivenLanes(), captured)
    loop.tick(0.0)
    (lane_frame,) = delivered
    assert (lane_frame.camera, lane_frame.frame_id, lane_frame.dropped) == ("front", 41, 3)
    assert lane_frame.capture_mono_ns == captured.capture_mono_ns
    assert lane_frame.capture_epoch_ns == captured.capture_epoch_ns
    assert (lane_frame.width, lane_frame.height) == (16, 9)
    assert (lane_frame.model_name, lane_frame.model_version) == ("lane_detection", "4")
    assert lane_frame.latency_us.queue >= 0


def test_a_lane_that_is_not_finite_is_no_empty_road() -> None:
    class Broken(GivenLanes):
        def run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
            made = super().run(inputs, outputs)
            return {**made, "lane_points": Tensor(np.full_like(LANES, np.nan))}

    loop, delivered = pipeline(Broken(), frame(0))
    loop.tick(0.0)
    message = json.loads(
        messages.frame_payload(
            delivered[0], Identity("d", "0", "b", "c"), 0, delivered[0].capture_mono_ns
        )
    )
    assert message["status"] == "FRAME_STATUS_DEGRADED"
    assert message["reasons"] == ["lane_not_finite"]
    assert message["lanes"] == []


def test_a_recording_in_lockstep_waits_for_what_its_listeners_hold() -> None:
    holding: list[str] = []
    holds = [lambda _: False, lambda name: name in holding]
    loop, delivered = pipeline(GivenLanes(), frame(0), frame(1), holds=holds)
    camera = camera_of(loop)
    loop.worker.ask_to_stop()  # so that no tick waits
    camera.lockstep = True
    loop.tick(0.0)
    holding.append("front")
    loop.tick(0.1)
    assert [each.frame_id for each in delivered] == [0]
    # Other cameras take the newest frame, and wait for nobody.
    camera.lockstep = False
    loop.tick(0.2)
    assert [each.frame_id for each in delivered] == [0, 1]
    # Neither does that the recording has ended replace its last lanes.
    camera.lockstep = True
    camera.become(CameraState.ENDED, "ended", "it ended after 2 frames")
    loop.tick(0.3)
    assert len(delivered) == 2
    holding.clear()
    loop.tick(0.4)
    assert delivered[-1].failure_reason == "ended"


def test_after_a_recording_has_ended_the_listeners_learn_so_every_second() -> None:
    loop, delivered = pipeline(GivenLanes(), frame(41))
    loop.tick(0.0)
    camera_of(loop).become(CameraState.ENDED, "ended", "it ended after 42 frames")
    loop.worker.ask_to_stop()  # so that no tick waits
    for now in (0.2, 0.4, 1.1, 1.3):
        loop.tick(now)
    _, *ended = delivered
    assert [(each.frame_id, each.failure_reason) for each in ended] == [(41, "ended")] * 2
    message = json.loads(messages.frame_payload(ended[0], Identity("d", "0", "b", "c"), 0, 0))
    assert message["status"] == "FRAME_STATUS_INVALID"
    assert message["reason_details"] == [
        {"code": "REASON_CODE_ENDED", "text": "it ended after 42 frames"}
    ]


def test_a_frame_is_let_go_at_once_where_its_model_fails() -> None:
    model = GivenLanes()
    model.broken = True
    pixels = np.zeros((9, 16, 3), np.uint8)
    held = weakref.ref(pixels)
    loop, delivered = pipeline(model, Frame.arrived(0, Image.of_bgr(pixels)))
    del pixels
    gc.disable()
    try:
        loop.tick(0.0)
        assert delivered[0].failure == "broken"
        assert held() is None
    finally:
        gc.enable()


def test_a_model_that_fails_every_other_frame_logs_lines_that_fold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = GivenLanes()
    loop, _ = pipeline(model, *(frame(n) for n in range(40)))
    limits = LineLimits(logging.NullHandler(), lambda: 0.0)
    with caplog.at_level(logging.INFO, "edge_server.pipeline.lane_pipeline"):
        for n in range(40):
            model.broken = n % 2 == 0
            loop.tick(0.0)
    assert len(caplog.records) == 40
    assert sum(map(limits.filter, caplog.records)) == 2 * SAME_LINES


def test_a_failing_model_costs_its_frames_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = GivenLanes()
    loop, delivered = pipeline(model, *(frame(n) for n in range(4)))
    with caplog.at_level(logging.INFO, "edge_server.pipeline.lane_pipeline"):
        model.broken = True
        for _ in range(3):
            loop.tick(0.0)
        model.broken = False
        loop.tick(0.0)
    assert [(each.frame_id, each.failure) for each in delivered] == [
        (0, "broken"),
        (1, "broken"),
        (2, "broken"),
        (3, ""),
    ]
    assert not delivered[0].lanes
    assert delivered[3].lanes
    assert loop.failed_frames == 3
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]


def test_why_there_are_no_lanes_is_known_until_there_are_again() -> None:
    model = GivenLanes()
    loop, _ = pipeline(model, frame(0), frame(1))
    model.broken = True
    loop.tick(0.0)
    assert loop.failure == "broken"
    model.broken = False
    loop.tick(0.0)
    assert loop.failure == ""


@pytest.mark.parametrize(
    "points",
    [LANES[:0], np.concatenate([LANES, LANES]), LANES.astype(np.int32), LANES.astype(object)],
    ids=["empty", "two", "whole-numbers", "texts"],
)
def test_what_is_no_lanes_costs_its_frame_and_not_the_loop(points: np.ndarray) -> None:
    class Other(GivenLanes):
        def run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
            return {**super().run(inputs, outputs), "lane_points": Tensor(points)}

    loop, delivered = pipeline(Other(), frame(0))
    loop.tick(0.0)
    assert "lanes are (1, K, 72, 2)" in delivered[0].failure


def test_a_model_that_gives_no_lanes_is_refused_by_name() -> None:
    loop, _ = pipeline(data_plane(GivenLanes(), rows=36))
    with pytest.raises(SettingsError, match=r"cameras\.front\.model: 'lane_detection' gives no"):
        loop.validate()


def test_a_model_that_gives_something_else_under_the_same_names_is_refused_too() -> None:
    class Other(GivenLanes):
        def run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
            return {**super().run(inputs, outputs), "lane_points": Tensor(LANES[0, 0])}

    loop, _ = pipeline(Other())
    with pytest.raises(SettingsError, match=r"lanes are \(1, K, 72, 2\) and \(1, K\)"):
        loop.validate()


@pytest.mark.parametrize("dims", ["[-1, -1]", "[-1, -1, 1]"])
def test_a_recording_is_converted_for_a_model_for_another_format(dims: str) -> None:
    pipeline(data_plane(GivenLanes(), dims=dims))[0].validate()


@pytest.mark.parametrize("dims", ["[-1, -1, 2]"])
def test_a_live_camera_may_give_the_one_format_that_its_model_takes(dims: str) -> None:
    loop, _ = pipeline(data_plane(GivenLanes(), dims=dims))
    with pytest.raises(SettingsError, match="the camera gives bgr"):
        loop.validate()
    camera_of(loop).is_live = True
    loop.validate()


def test_a_frame_behind_somebody_s_slow_request_ends_at_its_deadline_and_the_loop_goes_on() -> None:
    class Slow(GivenLanes):
        """Waits, but only for the one who says so."""

        begun, let_go = threading.Event(), threading.Event()

        def run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
            self.begun.set()
            assert self.let_go.wait(60)
            return super().run(inputs, outputs)

    model = Slow()
    door = data_plane(model)
    request = InferRequest("lane_detection", {"image": Tensor(np.zeros((1, 9, 16, 3), np.uint8))})
    client = threading.Thread(target=door.infer, args=(request,))
    client.start()
    assert model.begun.wait(60)
    loop, delivered = pipeline(door, frame(0), frame(1), frame_deadline_s=0.05)
    loop.tick(0.0)
    assert (loop.failed_frames, delivered.pop().lanes) == (1, ())
    model.let_go.set()
    client.join(60)
    loop._frame_deadline_s = FRAME_DEADLINE_S
    loop.tick(0.0)
    assert [lane_frame.frame_id for lane_frame in delivered] == [1]


def test_to_wait_for_a_response_is_no_hang() -> None:
    class Patient(GivenLanes):
        """Looks at the loop's worker while the loop waits for it."""

        limits_s: list[float]

        def run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
            self.limits_s = [loop.worker.limit_s]
            return super().run(inputs, outputs)

    model = Patient()
    loop, _ = pipeline(model, frame(0))
    loop.tick(0.0)
    (limit_s,) = model.limits_s
    assert limit_s > FRAME_DEADLINE_S + MODEL_STUCK_S
    assert loop.worker.limit_s == loop.worker.deadline_s


def test_a_model_that_is_not_there_or_fails_may_be_there_at_the_next_start() -> None:
    model = GivenLanes()
    model.broken = True
    loop, _ = pipeline(model)
    with pytest.raises(
        Unavailable, match=r"cameras\.front\.model: 'lane_detection' gives no lanes"
    ):
        loop.validate()
    absent, _ = pipeline(DataPlane(ModelRegistry()))
    with pytest.raises(Unavailable, match="put it into a repository"):
        absent.validate()


def aged(number: int, age_ms: int) -> Frame:
    return replace(frame(number), capture_mono_ns=time.monotonic_ns() - age_ms * 1_000_000)


def test_a_frame_that_is_too_old_is_dropped_and_counted_and_not_inferred() -> None:
    loop, delivered = pipeline(GivenLanes(), aged(0, 100_000), frame(1), max_age_ms=50_000)
    loop.tick(0.0)
    assert (delivered, loop.too_old_frames, loop.failure) == ([], 1, "")
    loop.tick(0.0)
    assert [(each.frame_id, each.dropped, each.max_age_ms) for each in delivered] == [
        (1, 3 + 1, 50_000)
    ]
    assert loop.failed_frames == 0


def test_a_camera_whose_frames_are_all_too_old_says_so_every_second_until_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = [replace(frame(n), capture_mono_ns=0) for n in range(5)]
    loop, delivered = pipeline(GivenLanes(), *old, frame(5), max_age_ms=50_000)
    begun_ns = time.monotonic_ns()
    with monkeypatch.context() as later:
        for ahead_ns in (0, 900_000_000, 1_100_000_000, 1_900_000_000, 2_200_000_000):
            later.setattr(time, "monotonic_ns", lambda ahead=ahead_ns: begun_ns + ahead)
            loop.tick(0.0)
            assert bool(loop.failure) == (ahead_ns > 1_000_000_000)
    assert "max_age_ms is 50000" in loop.failure
    assert "cameras.front.max_age_ms" in loop.failure
    assert [(each.frame_id, each.failure_reason, each.lanes) for each in delivered] == [
        (2, "too_old", ()),
        (4, "too_old", ()),
    ]
    loop.tick(0.0)
    assert loop.failure == ""
    assert delivered[-1].lanes


def test_the_present_reason_for_no_lanes_replaces_another_one() -> None:
    model = GivenLanes()
    model.broken = True
    old = [replace(frame(n), capture_mono_ns=0) for n in range(1, 3)]
    loop, _ = pipeline(model, frame(0), *old, max_age_ms=50_000)
    loop.tick(0.0)
    assert loop.fault == ("model_failed", "broken")
    loop.tick(0.0)
    loop._reminder._due = 0.0
    loop.tick(0.0)
    reason, text = loop.fault
    assert reason == "too_old", "it does not blame the model"
    assert "max_age_ms" in text


@pytest.mark.parametrize(("age_ms", "reason"), [(900, ""), (1100, "too_old")])
def test_lanes_that_come_too_late_for_anybody_are_none_and_say_so(
    monkeypatch: pytest.MonkeyPatch, age_ms: int, reason: str
) -> None:
    class Slow(GivenLanes):
        def run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
            at_ns = captured.capture_mono_ns + age_ms * 1_000_000
            monkeypatch.setattr(time, "monotonic_ns", lambda: at_ns)
            return super().run(inputs, outputs)

    captured = frame(0)
    loop, delivered = pipeline(Slow(), captured, max_age_ms=1000)
    loop.tick(0.0)
    (lane_frame,) = delivered
    assert bool(lane_frame.lanes) == (not reason)
    assert (loop.failure_reason == "too_old") == bool(reason)
    assert ("take a faster model" in loop.failure) == bool(reason)
    assert lane_frame.failure == loop.failure


def test_lanes_that_are_older_than_the_camera_s_bound_are_stale() -> None:
    loop, delivered = pipeline(GivenLanes(), frame(0), max_age_ms=50)
    loop.tick(0.0)
    (lane_frame,) = delivered
    for age_ms, status in ((50, "FRAME_STATUS_OK"), (51, "FRAME_STATUS_STALE")):
        now_ns = lane_frame.capture_mono_ns + age_ms * 1_000_000
        message = json.loads(
            messages.frame_payload(lane_frame, Identity("d", "0", "b", "c"), 0, now_ns)
        )
        assert message["status"] == status


def test_the_newest_frame_is_taken_when_the_camera_s_turn_begins() -> None:
    shares = FairShares()
    other = shares.share(1)
    assert shares.take_turn(other, 0.0)
    loop, delivered = pipeline(GivenLanes(), frame(0), shares=shares)
    loop.tick(0.0)  # its turn does not come
    camera_of(loop)._frames[:] = [frame(7)]
    shares.end_turn(other)
    loop.tick(0.0)
    assert [each.frame_id for each in delivered] == [7]
    assert shares.take_turn(other, 0.0)  # and the turn is over


def test_a_loop_that_ends_takes_no_turn_along() -> None:
    shares = FairShares()
    other = shares.share(1)
    assert shares.take_turn(other, 0.0)
    loop, _ = pipeline(GivenLanes(), frame(0), shares=shares)
    loop.tick(0.0)
    loop.leave()
    shares.end_turn(other)
    assert shares.take_turn(other, 0.0)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (CameraState.FROZEN, "frozen"),
        (CameraState.DEGRADED, "covered"),
        (CameraState.DEGRADED, "black"),
        (CameraState.DEGRADED, "white_out"),
    ],
)
def test_a_frame_that_shows_no_road_does_not_reach_the_model(
    state: CameraState, reason: str
) -> None:
    loop, delivered = pipeline(GivenLanes(), frame(7))
    camera_of(loop).become(state, reason, "nothing to see")
    loop.tick(0.0)
    (lane_frame,) = delivered
    assert lane_frame.lanes == ()
    assert (lane_frame.frame_id, lane_frame.width) == (7, 16)
    assert (lane_frame.failure_reason, lane_frame.failure) == (reason, "nothing to see")
    assert (loop.unusable_frames, loop.failed_frames, loop.failure) == (1, 0, "")


def test_lanes_of_a_degraded_camera_say_so() -> None:
    loop, delivered = pipeline(GivenLanes(), frame(0))
    camera_of(loop).become(CameraState.DEGRADED, "blurred", "no sharp edges")
    loop.tick(0.0)
    assert delivered[0].lanes
    assert (delivered[0].failure, delivered[0].degraded) == ("", (("blurred", "no sharp edges"),))


def test_while_no_frames_come_the_reason_does_at_once_and_every_second() -> None:
    captured = frame(41)
    loop, delivered = pipeline(GivenLanes(), captured)
    loop.tick(0.0)
    assert delivered.pop().lanes
    camera_of(loop).become(CameraState.LOST, "lost", "cable out")
    at = []
    for now in range(25):
        loop.tick(now / 10)
        at += [now / 10 for _ in delivered]
        delivered.clear()
    assert at == pytest.approx([0.0, 1.0, 2.0])
    camera_of(loop).become(CameraState.LOST, "unauthorized", "wrong password")
    loop.tick(2.5)
    (lane_frame,) = delivered
    assert lane_frame.lanes == ()
    assert (lane_frame.failure_reason, lane_frame.failure) == ("unauthorized", "wrong password")
    # Its age is that of the last picture.
    assert (lane_frame.frame_id, lane_frame.capture_mono_ns) == (41, captured.capture_mono_ns)
    assert loop.failed_frames == 0


def test_a_camera_that_starts_gets_a_second_and_before_the_first_frame_there_is_no_image() -> None:
    loop, delivered = pipeline(GivenLanes())
    camera_of(loop).become(CameraState.STARTING, "starting", "no frame yet")
    loop.tick(0.0)
    loop.tick(0.9)
    assert not delivered
    loop.tick(1.0)
    (lane_frame,) = delivered
    assert (lane_frame.width, lane_frame.height) == (0, 0)
    assert (lane_frame.capture_mono_ns, lane_frame.capture_epoch_ns) == (5_000, 9_000)
    assert lane_frame.failure_reason == "starting"


def test_a_camera_that_is_stopped_is_no_empty_road() -> None:
    loop, delivered = pipeline(GivenLanes(), frame(0))
    loop.tick(0.0)
    camera_of(loop).become(CameraState.STOPPED)
    loop.tick(0.1)
    assert [each.frame_id for each in delivered] == [0]


class GivenRoad:
    """Notes which frames have lanes, and which have none."""

    calibration = Calibration("abc", None)

    def __init__(self) -> None:
        self.seen: list[str] = []

    def follow(self, lane_frame: LaneFrame, _image: Image) -> LaneFrame:
        self.seen.append(f"follow {lane_frame.frame_id}")
        return lane_frame

    def miss(self, lane_frame: LaneFrame) -> None:
        assert lane_frame.failure
        self.seen.append(f"miss {lane_frame.frame_id}")

    def end(self, lane_frame: LaneFrame) -> None:
        self.seen.append(f"end {lane_frame.frame_id}")


def test_who_follows_the_road_learns_where_it_is_not_seen_and_that_the_loop_ends() -> None:
    road = GivenRoad()  # as much of a RoadFollower as the loop uses
    old = replace(frame(2), capture_mono_ns=0)
    loop, _ = pipeline(GivenLanes(), frame(0), frame(1), old, road=road)
    loop.tick(0.0)
    camera_of(loop).become(CameraState.FROZEN, "frozen", "the picture stands")
    loop.tick(0.1)
    camera_of(loop).become(CameraState.LIVE)
    loop._reminder.is_due("too_old", 0.0, 0.0)
    loop.tick(0.2)
    camera_of(loop).become(CameraState.LOST, "lost", "cable out")
    loop.tick(0.3)
    loop._end()
    assert road.seen == ["follow 0", "miss 1", "miss 2", "miss 2", "end 2"]


def test_a_slow_camera_that_is_well_has_nothing_to_report() -> None:
    loop, delivered = pipeline(GivenLanes())
    camera_of(loop).become(CameraState.LIVE)
    for now in range(5):
        loop.tick(now)
    assert not delivered


def test_a_model_that_does_not_respond_is_reported_after_a_second_and_every_second() -> None:
    class Hanging(GivenLanes):
        def run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
            began.set()
            over.wait()
            return super().run(inputs, outputs)

    began, over = threading.Event(), threading.Event()
    loop, delivered = pipeline(Hanging(), frame(41))
    thread = threading.Thread(target=loop.tick, args=(0.0,))
    thread.start()
    began.wait()
    now = loop._owing_since
    assert now is not None
    loop.report_silence(now)
    assert delivered == []
    for seconds, count in ((1.1, 1), (1.2, 1), (2.2, 2), (3.3, 3)):
        loop.report_silence(now + seconds)
        assert len(delivered) == count
    assert delivered[-1].failure.startswith("model 'lane_detection' has not responded for 3.3 s")
    assert delivered[-1].failure_reason == "model_failed"
    assert delivered[-1].lanes == ()
    assert loop.failure
    over.set()
    thread.join()
    assert len(delivered) == 4
    loop.report_silence(now + 9.0)
    assert len(delivered) == 4


def test_a_camera_whose_model_is_busy_with_another_one_is_reported() -> None:
    shares = FairShares()
    other = shares.share(1)
    assert shares.take_turn(other, 0.0)
    loop, delivered = pipeline(GivenLanes(), frame(1), shares=shares)
    loop.tick(0.0)
    assert delivered == []
    loop.report_silence(time.monotonic() + 1.1)
    assert [each.failure_reason for each in delivered] == ["model_failed"]
    shares.end_turn(other)
    loop.tick(0.0)
    assert delivered[-1].failure == ""
    assert not loop.failure


def test_a_listener_that_hangs_does_not_hold_who_watches_over_the_cameras() -> None:
    loop, delivered = pipeline(GivenLanes(), frame(0))
    with loop._giving:  # as while a listener is called
        loop.report_silence(100.0)
    assert delivered == []
