"""LanePipeline: the camera loop, where cameras and lanes meet the data plane."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from edge_server.board.watch import DeviceReport
from edge_server.cameras.frame import Frame
from edge_server.cameras.status import UNUSABLE, CameraState
from edge_server.errors import (
    EdgeServerError,
    Reason,
    SettingsError,
    Unavailable,
    forget_frames,
    may_pass,
)
from edge_server.inference.data_plane import MODEL_STUCK_S
from edge_server.lanes.types import LONGEST_AGE_S, LaneFrame, StageLatency
from edge_server.pipeline.fair_shares import FairShares
from edge_server.pipeline.lane_model import (
    Detected,
    FrameInputs,
    LaneModel,
    NoLanes,
    with_remedy,
)
from edge_server.process.threads import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_server.board.watch import BoardWatch
    from edge_server.cameras.calibration import Calibration
    from edge_server.cameras.camera import Camera
    from edge_server.cameras.status import CameraStatus
    from edge_server.inference.data_plane import DataPlane
    from edge_server.inference.otlp import FrameTrace
    from edge_server.inference.tracing import Tracer
    from edge_server.pipeline.networks import NetworkPipeline
    from edge_server.pipeline.road_follower import RoadFollower

    # The frame is None where the camera gives none, and the LaneFrame says why.
    Listener = Callable[[LaneFrame, Frame | None], None]

log = logging.getLogger(__name__)

_FRAME_WAIT_S = 0.2
_MODEL_WAIT_S = 0.25
_HELD_WAIT_S = 0.002
# While there are no lanes for a reason that lasts, the listeners learn so this often.
_REMINDER_PERIOD_S = 1.0
# Older lanes are useless for driving. This deadline is no limit on a model's execution time: it
# frees the camera from the queue behind another client's slow request, and lets the daemon kill
# a Python model that hangs; see `execution_timeout_s`.
FRAME_DEADLINE_S = 10.0
# At 130 km/h the vehicle has gone 7 m.
MAX_AGE_MS = 200


class _Reminder:
    """Says when the listeners get a reason why there are no lanes: while it lasts, every second."""

    def __init__(self) -> None:
        self.reason: object = None  # set to None where it is over: the next one is new
        self._due = 0.0

    def is_due(self, reason: object, first: float, now: float) -> bool:
        """Return whether it is time to give the reason; that of a new one is `first`."""
        if reason != self.reason:
            self.reason, self._due = reason, first
        if now < self._due:
            return False
        self._due = now + _REMINDER_PERIOD_S
        return True


class LanePipeline:
    """Sends the newest frame of one camera to the model and passes its lanes to the listeners.

    A failed request costs one frame, which reaches the listeners without lanes and with the reason.
    A frame of a camera that shows no road does not reach the model, and the listeners get the
    camera's reason, once a second where no frames arrive. Listeners are called one at a time, and
    must return at once. A frame is taken when it is this camera's turn at the model, see
    `FairShares`; a frame that is too old by then is dropped.

    The loop cannot hang while a response is outstanding: a queued request ends at its deadline, the
    daemon kills a model's process at its limit, and a model that hangs in this process is found
    through `DataPlane.oldest_run`.

    Args:
        holds: each returns whether what a listener got of the camera still waits, so that the next
            frame would replace it. A recording in lock-step goes on once none does.
        shares: those of the cameras with the same model; None where there is no other camera.
        priority: of the camera in `shares`.
        max_age_ms: frames that are older are not inferred, lanes that are older are stale.
        frame_deadline_s: how long a frame waits for its lanes, in seconds.
        board: what is wrong with the device itself; None is nothing.
        road: follows the road with the camera's calibration; None where it has none.
        model: empty for a camera without lanes, whose listeners get frames that have none.
        networks: see the same frames, after the lanes of each were given; a recording in lock-step
            waits for them.

    Attributes:
        failure: why frames have no lanes now; empty while they have.
        failure_reason: the same in a word: `model_failed` or `too_old`.
        awaits_model: set before the start: the camera starts once its model serves, and until then
            the listeners get the reason.
    """

    def __init__(
        self,
        camera: Camera,
        data_plane: DataPlane,
        model: str,
        listeners: Sequence[Listener],
        *,
        holds: Sequence[Callable[[str], bool]] = (),
        shares: FairShares | None = None,
        priority: int = 1,
        max_age_ms: int = MAX_AGE_MS,
        frame_deadline_s: float = FRAME_DEADLINE_S,
        board: BoardWatch | None = None,
        road: RoadFollower | None = None,
        tracer: Tracer | None = None,
        networks: Sequence[NetworkPipeline] = (),
    ) -> None:
        self.camera = camera
        self.networks = tuple(networks)
        self.model = model
        self.failed_frames = 0
        self.too_old_frames = 0
        self.unusable_frames = 0
        self.failure = ""
        self.failure_reason = "model_failed"
        self.worker = Worker(f"lanes-{camera.name}", self.tick, on_end=self._end)
        self._shares = FairShares() if shares is None else shares
        self.lane_model = LaneModel(data_plane, model, camera.useful, self._shares)
        self._share = self._shares.share(priority)
        self._max_age_ms = max_age_ms
        self._listeners: tuple[Listener, ...] = (*listeners, *networks)
        self._holds = (*holds, *(network.holds for network in networks))
        self._frame_deadline_s = frame_deadline_s
        self._board = board
        self._road = road
        self._tracer = tracer
        self._last: LaneFrame | None = None
        self._giving = threading.RLock()  # held while the listeners are called
        self._muted = False
        # Since when a frame has waited for lanes, `time.monotonic()`; None while none does.
        self._owing_since: float | None = None
        self._silence = _Reminder()
        self._reminder = _Reminder()  # of what the loop finds
        self.awaits_model = False

    @property
    def fault(self) -> tuple[str, str]:
        """Why there are no usable lanes, in a word and for people: the camera's fault, or that of
        the loop; empty where there is none."""
        status = self.camera.status
        if self.failure and not status.reason:
            return self.failure_reason, self.failure
        return status.reason, status.text

    def tick(self, now: float) -> None:
        """Process one frame, or wait briefly for one."""
        if self.awaits_model:
            self._try_model(now)
            return
        if self.camera.lockstep and any(holds(self.camera.name) for holds in self._holds):
            self.worker.wait(_HELD_WAIT_S)
            return
        if not self.camera.wait_for_frame(_FRAME_WAIT_S):
            self._report_no_frames(now)
            if self.camera.ended:  # it waits for no frame any more
                self.worker.wait(_FRAME_WAIT_S)
            return
        if self._owing_since is None:
            self._owing_since = time.monotonic()
        status = self.camera.status
        if status.reason in UNUSABLE:
            self._give_no_road(status)
        elif self._shares.take_turn(self._share, _FRAME_WAIT_S):
            try:
                made = self._use_turn()
            finally:
                self._owing_since = None
                self._shares.end_turn(self._share, again=self.camera.newest is not None)
            if made is not None:
                self._finish(*made)

    def _try_model(self, now: float) -> None:
        """Start the camera if its model serves now; otherwise wait briefly."""
        try:
            with self.worker.allowing(self._frame_deadline_s + 2 * MODEL_STUCK_S):
                self.validate(time.monotonic() + self._frame_deadline_s)
        except EdgeServerError as error:
            forget_frames(error)
            self._fail(str(error), "model_failed")
            if self._reminder.is_due("model", now, now):
                self._give(self._without_lanes(str(error), "model_failed"), None)
            self.worker.wait(_MODEL_WAIT_S)
            return
        self.awaits_model = False
        self.camera.start()

    def _give_no_road(self, status: CameraStatus) -> None:
        """Give the frame of a camera that shows no road, without lanes; it needs no turn."""
        self.leave()
        self._owing_since = self._reminder.reason = None
        frame = self.camera.next_frame(0.0)
        if frame is None:
            return
        self.unusable_frames += 1
        self._give_missed(self._lane_frame(frame, None, status.text, status.reason), frame)

    def _use_turn(self) -> tuple[LaneFrame, Frame] | None:
        """Return the newest frame and its lanes, or the reason why there are none; None where it is
        too old for lanes."""
        frame = self.camera.next_frame(0.0)
        if frame is None:
            return None
        now_ns = time.monotonic_ns()
        if self.model and frame.age_ns(now_ns) > self._max_age_ms * 1e6:
            self._drop_too_old(frame, now_ns)
            return None
        if self.networks:
            frame = replace(frame, inputs=FrameInputs())
        status = self.camera.status
        is_degraded = status.state is CameraState.DEGRADED
        degraded = (Reason(status.reason, status.text),) if is_degraded else ()
        if not self.model:
            return self._lane_frame(frame, None, degraded=degraded), frame
        self._reminder.reason = request = trace = detected = None
        capture_ns, tracer = frame.capture_mono_ns, self._tracer
        if frame.clock == "recording":
            capture_ns = frame.arrived_mono_ns
        if tracer and (trace := tracer.frame(self.camera.name, frame.id, capture_ns)):
            trace.begin("capture", capture_ns)
            trace.begin("wait", frame.arrived_mono_ns or capture_ns)
            request = tracer.of_frame(self.model, trace.begin("infer"))
        failure = ""
        deadline = time.monotonic() + self._frame_deadline_s
        # An execution that begins just before the deadline is watched for as long as any other.
        self.worker.beat(self._frame_deadline_s + 2 * MODEL_STUCK_S)
        try:
            detected = self.lane_model.detect(frame, deadline, request)
        except EdgeServerError as error:
            failure = str(error) or type(error).__name__
            forget_frames(error)
        self.worker.beat()
        lane_frame = self._lane_frame(frame, detected, failure, degraded=degraded, trace=trace)
        age_s = frame.age_ns(time.monotonic_ns()) / 1e9
        if not failure and age_s > LONGEST_AGE_S:
            failure = (
                f"its lanes are {age_s:.1f} s old when the model has found them, and lanes are of "
                f"no use after {LONGEST_AGE_S} s; take a faster model, or fewer cameras for it"
            )
            lane_frame = replace(lane_frame, lanes=(), failure=failure, failure_reason="too_old")
        return lane_frame, frame

    def _finish(self, lane_frame: LaneFrame, frame: Frame) -> None:
        if lane_frame.failure:
            self.failed_frames += 1
            self._fail(lane_frame.failure, lane_frame.failure_reason)
        elif self.failure:
            # Without a number: where every other frame fails, the lines fold.
            log.info("camera %s: lanes again", self.camera.name)
            self.failure = ""
        if self._road is not None and self.model:
            lane_frame = self._road.follow(lane_frame, frame.image)
        if lane_frame.trace is not None:
            lane_frame.trace.end(lane_frame.failure, **{"edge.lanes": len(lane_frame.lanes)})
        self._give(lane_frame, frame)

    def _drop_too_old(self, frame: Frame, now_ns: int) -> None:
        """Count a frame that is too old for lanes. While all are, the listeners get one of them
        every second, with the reason."""
        self.too_old_frames += 1
        now, age_ms = now_ns / 1e9, frame.age_ns(now_ns) / 1e6
        if self._reminder.is_due("too_old", now + _REMINDER_PERIOD_S, now):
            failure = (
                f"its frames are {age_ms:.0f} ms old before the model sees them, max_age_ms is "
                f"{self._max_age_ms}; lower the latency of the camera, or raise "
                f"cameras.{self.camera.name}.max_age_ms"
            )
            self._fail(failure, "too_old")
            self._give_missed(self._lane_frame(frame, None, failure, "too_old"), frame)

    @property
    def calibration(self) -> Calibration | None:
        """Of the camera; None where it has none."""
        return None if self._road is None else self._road.calibration

    def mute(self) -> None:
        """Give the listeners nothing more, whatever the models still return."""
        self._muted = True
        for network in self.networks:
            network.mute()

    def go_on_from(self, other: LanePipeline) -> None:
        """Go on with the numbers of `other`, which had the same camera; called before the start."""
        self.failed_frames += other.failed_frames
        self.too_old_frames += other.too_old_frames
        self.unusable_frames += other.unusable_frames
        self._last = other._last
        self.awaits_model = other.awaits_model

    def leave(self) -> None:
        """Give up this camera's turn and its place in the order."""
        self._shares.end_turn(self._share)

    def _end(self) -> None:
        """Leave, and end the events of the road: at the end of a recording, and of the thread."""
        self.leave()
        if self._road is not None and self._last is not None:
            self._road.end(_at_present(self._last))

    def validate(self, deadline: float | None = None) -> None:
        """Run one grey frame through the model, so that the first real frame finds a warm model.

        Args:
            deadline: `time.monotonic()` at which the request expires; None is never.

        Raises:
            SettingsError: the camera's model is no lane model.
            Unavailable: the model is not loaded, or cannot respond now.
        """
        if not self.model:
            return
        try:
            image = self.lane_model.grey_image(live=self.camera.is_live)
            self.lane_model.detect(Frame.arrived(0, image), deadline)
        except EdgeServerError as error:
            is_lane_model = may_pass(error) and not isinstance(error, NoLanes)
            raise (Unavailable if is_lane_model else SettingsError)(
                f"cameras.{self.camera.name}.model: '{self.model}' gives no lanes: "
                f"{with_remedy(error)}"
            ) from error

    def _lane_frame(
        self,
        frame: Frame,
        detected: Detected | None,
        failure: str = "",
        failure_reason: str = "model_failed",
        *,
        degraded: tuple[Reason, ...] = (),
        trace: FrameTrace | None = None,
    ) -> LaneFrame:
        """Return what is known of `frame`, with what the model has found in it."""
        board = DeviceReport() if self._board is None else self._board.latest
        if detected is None:
            detected = Detected(self.model, "", StageLatency(), ())
        width, height = frame.size
        return LaneFrame(
            camera=self.camera.name,
            frame_id=frame.id,
            dropped=self.camera.dropped + self.too_old_frames,
            capture_mono_ns=frame.capture_mono_ns,
            capture_epoch_ns=frame.capture_epoch_ns,
            width=width,
            height=height,
            model_name=detected.model_name,
            model_version=detected.model_version,
            latency_us=detected.latency_us,
            lanes=detected.lanes,
            failure=failure,
            failure_reason=failure_reason,
            max_age_ms=self._max_age_ms,
            degraded=(*board.reasons, *degraded),
            wall_clock=board.clock.value,
            clock=frame.clock,
            uncertainty_ns=frame.uncertainty_ns,
            calibration_id="" if self._road is None else self._road.calibration.id,
            trace=trace,
        )

    def _give(self, lane_frame: LaneFrame, frame: Frame | None) -> None:
        with self._giving:
            if self._muted:
                return
            self._last = lane_frame
            for listener in self._listeners:
                listener(lane_frame, frame)

    def _give_missed(self, lane_frame: LaneFrame, frame: Frame | None) -> None:
        """Give a frame without lanes, which the road is not followed through."""
        if self._road is not None:
            self._road.miss(lane_frame if frame is not None else _at_present(lane_frame))
        self._give(lane_frame, frame)

    def report_silence(self, now: float) -> None:
        """Give the listeners the reason why a frame has no lanes yet: after a second, then every
        second. Another thread than the loop's calls it, which waits for the model meanwhile.

        While the loop calls the listeners there is no silence, and a listener that hangs must not
        hold the thread that watches over every camera.
        """
        since = self._owing_since
        if since is None:
            self._silence.reason = None
        elif self._giving.acquire(blocking=False):
            try:
                is_owing = since == self._owing_since  # not given in the meantime
                if is_owing and self._silence.is_due(since, since + LONGEST_AGE_S, now):
                    failure = f"model '{self.model}' has not responded for {now - since:.1f} s"
                    self._fail(f"model '{self.model}' does not respond", "model_failed")
                    self._give(self._without_lanes(failure, "model_failed"), None)
            finally:
                self._giving.release()

    def _report_no_frames(self, now: float) -> None:
        """Give the listeners the reason why there are no frames: at once, then every second.

        The message has the number and the time of the last frame, so that its age counts from
        there; before the first frame, the time since which there has been none. The events of the
        road end with a recording.
        """
        status = self.camera.status
        if status.usable or status.state is CameraState.STOPPED:
            return
        starts = status.state is CameraState.STARTING
        first = now + _REMINDER_PERIOD_S if starts else now
        if not self._reminder.is_due(status, first, now):
            return
        lane_frame = self._without_lanes(status.text, status.reason)
        if self.camera.ended:
            self._end()
            self._give(lane_frame, None)
        else:
            self._give_missed(lane_frame, None)

    def _without_lanes(self, failure: str, reason: str) -> LaneFrame:
        """Return what is known of the last frame that the listeners got, and why there is none."""
        last = self._last
        if last is None:
            status = self.camera.status
            since = status.since_mono_ns, status.since_epoch_ns
            last = LaneFrame(self.camera.name, 0, 0, *since, 0, 0, self.model)
        return replace(
            last,
            dropped=self.camera.dropped + self.too_old_frames,
            lanes=(),
            latency_us=StageLatency(),
            failure=failure,
            failure_reason=reason,
            degraded=() if self._board is None else self._board.latest.reasons,
            ego=None,
            vehicle=None,
            trace=None,
        )

    def _fail(self, failure: str, reason: str) -> None:
        if not self.failure or reason != self.failure_reason:
            log.error("camera %s: no lanes from now on: %s", self.camera.name, failure)
            self.failure, self.failure_reason = failure, reason


def _at_present(lane_frame: LaneFrame) -> LaneFrame:
    return replace(lane_frame, capture_mono_ns=time.monotonic_ns(), capture_epoch_ns=time.time_ns())
