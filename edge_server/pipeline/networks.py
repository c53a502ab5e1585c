"""NetworkPipeline: a network beside the lanes of a camera, with a contract for what it returns."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

import numpy as np

from edge_server.cameras.frame import LARGEST_PX, Frame
from edge_server.cameras.status import UNUSABLE
from edge_server.errors import (
    EdgeServerError,
    ModelConfigError,
    SettingsError,
    Unavailable,
    forget_frames,
    may_pass,
)
from edge_server.inference.data_plane import MODEL_STUCK_S
from edge_server.inference.mirror import REST_OF_SAMPLES
from edge_server.lanes.agreement import LaneAgreement
from edge_server.lanes.box_tracking import BoxTracker
from edge_server.lanes.road_geometry import PitchFilter
from edge_server.pipeline.contracts import Contract
from edge_server.pipeline.lane_model import (
    ImageInput,
    ImageNeeds,
    stage_latency,
    with_needs,
    with_remedy,
)
from edge_server.pipeline.perception import BadOutput, Detections, NetworkFrame, NetworkView
from edge_server.pixels import CropRegion, Image, PixelFormat
from edge_server.process.threads import Worker
from edge_server.requests import InferRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_server.cameras.calibration import Calibration
    from edge_server.inference.data_plane import DataPlane
    from edge_server.inference.registry import Snapshot
    from edge_server.inference.statistics import ModelStatistics
    from edge_server.lanes.agreement import Disagreement, LaneVerdict
    from edge_server.lanes.camera_model import CameraModel
    from edge_server.lanes.types import LaneFrame
    from edge_server.pipeline.fair_shares import FairShares
    from edge_server.pipeline.perception import Result, Task
    from edge_server.requests import InferResponse
    from edge_server.settings import NetworkSection

    NetworkListener = Callable[[NetworkFrame], None]

log = logging.getLogger(__name__)

_FRAME_WAIT_S = 0.2
# Of a road: less of the picture shows none.
_LEAST_ROWS = 32
# A verdict is given anew after so many frames.
_VERDICT_FRAMES = 25
# So far away the road is on the horizon, whichever way it goes.
_HORIZON_M = 1e5
_AZIMUTHS_RAD = np.radians(np.linspace(-40.0, 40.0, 81))


class _Served(NamedTuple):
    """A network as the present models make it."""

    contract: Contract
    taker: ImageInput
    needs: ImageNeeds


class NetworkAnswer(NamedTuple):
    """What a network found in one frame."""

    response: InferResponse
    task: Task
    result: Result
    view: NetworkView


class NetworkModel:
    """Runs one network on the frames of one camera, by requests like any client's; for one thread.

    Args:
        region: as the settings have it: empty, `road`, or x, y, width and height in px.
    """

    def __init__(
        self, data_plane: DataPlane, name: str, region: str, calibration: Calibration | None
    ) -> None:
        self.name = name
        self.task: Task | None = None
        self._data_plane = data_plane
        self._region = region
        self._calibration = calibration
        self._seen: Callable[[], Snapshot | None] = lambda: None
        self._served: _Served | None = None
        self._view_of = lru_cache(4)(self._view)

    def run(
        self, frame: Frame, deadline: float | None = None, *, replayed: bool = False
    ) -> NetworkAnswer:
        """Return what the network finds in `frame`.

        Args:
            deadline: `time.monotonic()` at which the request expires; None is never.
            replayed: it is only compared with another, and no statistics count it.

        Raises:
            BadOutput: the response breaks the contract.
            ModelConfigError: the model has no such contract, or cannot see the region alone.
            EdgeServerError: the model cannot respond; see `DataPlane.infer`.
        """
        with self._data_plane.lease() as snapshot:
            served = self._served
            if served is None or self._seen() is not snapshot:
                served = self._find(snapshot)
            contract, taker = served.contract, served.taker
            if frame.inputs is None:
                image, parameters = taker.input_of(frame.image)
            else:
                image, parameters = frame.inputs.of(taker, frame.image)
            view = self._view_of(frame.size, served.needs.size)
            if self._region:
                crop = _scaled(view.region, frame)
                parameters = {**parameters, "crop": ",".join(map(str, crop))}
            request = InferRequest(
                self.name,
                {taker.image: image},
                outputs=tuple(contract.outputs),
                deadline=deadline,
                parameters=parameters,
                replayed=replayed,
            )
            response = snapshot.infer(request)
        tensors = {name: tensor.array for name, tensor in response.outputs.items()}
        return NetworkAnswer(response, contract.task, contract.result(tensors, view), view)

    def grey_image(self, *, live: bool) -> Image:
        """Return an image such as the camera may give; see `LaneModel.grey_image`."""
        with self._data_plane.lease() as snapshot:
            only = self._find(snapshot).taker.pixel_format
        width, height = 1280, 720
        if self._calibration is not None:
            width, height = self._calibration.model.lens.width, self._calibration.model.lens.height
        elif self._region not in ("", "road"):  # of a picture whose size is not known yet
            x, y, across, down = map(int, self._region.split(","))
            # Subsampled formats have even sides.
            width, height = max(width, x + across + 1 & ~1), max(height, y + down + 1 & ~1)
            if width * height > LARGEST_PX:
                raise ModelConfigError(f'region = "{self._region}" is in no picture of a camera')
        return Image.grey((live and only) or PixelFormat.BGR, width, height)

    def _find(self, snapshot: Snapshot) -> _Served:
        config = snapshot.find(self.name).config
        contract = Contract.of(config)
        taker, needs = with_needs(contract.image, config, snapshot)
        step = taker.step_of(config)
        preprocesses = step and snapshot.find(step).config.backend == "image_preprocess"
        located = contract.task in ("detection", "segmentation") or self._region
        if preprocesses and needs.size is None and located:
            raise ModelConfigError(
                f"model '{step}' has a crop or a lens of its own, and where its pixels are in the "
                "picture is not known; take the crop out, and set the network's region"
            )
        if self._region and not preprocesses:
            raise ModelConfigError(
                f"model '{self.name}' cannot be shown a region: it needs image_preprocess as its "
                "first step"
            )
        self._seen, self.task = ref(snapshot), contract.task
        self._served = _Served(contract, taker, needs)
        return self._served

    def _view(self, size: tuple[int, int], network: tuple[int, int] | None) -> NetworkView:
        """Return what the network sees of a picture of that size.

        Raises:
            ModelConfigError: the region is not in the picture, or there is no calibration for it.
        """
        camera, std_rad = None, 0.0
        if self._calibration is not None and self._calibration.model.lens.fits(*size):
            camera = self._calibration.model.scaled_to(*size)
            std_rad = PitchFilter(camera.mounting.pitch_std_rad).std_rad
        whole = CropRegion(0, 0, *size)
        region = whole
        if self._region == "road":
            if camera is None:
                raise ModelConfigError(
                    'region = "road" needs a calibration of the camera, for pictures of '
                    f"{size[0]} x {size[1]} px"
                )
            region = _below_horizon(camera, size)
        elif self._region:
            region = CropRegion(*map(int, self._region.split(",")))
        if not region.is_within(*size):
            raise ModelConfigError(
                f'region = "{self._region}" is not in the picture of {size[0]} x {size[1]} px'
            )
        return NetworkView(size, region, network or (region.width, region.height), camera, std_rad)


def _below_horizon(camera: CameraModel, size: tuple[int, int]) -> CropRegion:
    width, height = size
    far = _HORIZON_M * np.stack([np.cos(_AZIMUTHS_RAD), np.sin(_AZIMUTHS_RAD)], axis=1)
    points = camera.image_of(far)
    rows = points[(points[:, 0] >= 0) & (points[:, 0] < width), 1]
    top = int(np.clip(np.floor(rows.min()) if len(rows) else 0, 0, height - _LEAST_ROWS))
    return CropRegion(0, top, width, height - top)


def _scaled(region: CropRegion, frame: Frame) -> tuple[int, int, int, int]:
    """Return the region in px of the frame's image, which may be smaller than the picture."""
    (width, height), image = frame.size, frame.image
    x, y = region.x * image.width // width, region.y * image.height // height
    right = (region.x + region.width) * image.width // width
    bottom = (region.y + region.height) * image.height // height
    return x, y, max(1, right - x), max(1, bottom - y)


class NetworkPipeline:
    """Runs one network on the newest frames of a camera, each after its lanes were given, and
    passes its results to the listeners; a Listener of the camera's `LanePipeline`.

    The networks of all cameras take turns, one at a time: the one is next that has had the least
    time, divided by its priority; see `FairShares`. Lanes wait for none of them.

    A shadow of the lanes publishes nothing, and no statistics count its requests; the recorder gets
    what it finds. Its lanes are compared with those served: as in the canary's `Mirror`, in a tenth
    of one thread's time, and in every frame of a recording in lock-step. The comparison begins anew
    where either model has changed.

    Args:
        shares: of all networks.
        served: the camera's own model.
        recorder: gets what is not published too.

    Attributes:
        verdict: of a shadow, renewed after some frames; None before, and of other networks.
        failure: why frames have no results now; empty while they have.
        frames: number of frames with a result.
        missed: why other frames have none: `dropped` for a newer one, `late` (older than the
            deadline before its turn), `failed`, or the fault of a response, as in `BadOutput`.
        age_ms: of the newest result.
    """

    def __init__(
        self,
        camera: str,
        name: str,
        section: NetworkSection,
        data_plane: DataPlane,
        listeners: Sequence[NetworkListener],
        *,
        shares: FairShares,
        served: str = "",
        calibration: Calibration | None = None,
        recorder: NetworkListener | None = None,
    ) -> None:
        self.camera, self.name, self.section = camera, name, section
        self.served = served
        self.verdict: LaneVerdict | None = None
        self._data_plane = data_plane
        self._tracker = BoxTracker() if section.track else None
        self._agreement = LaneAgreement()
        self._compared: list[ModelStatistics] = []
        self.model = NetworkModel(data_plane, section.model, section.region, calibration)
        self.worker = Worker(f"network-{camera}-{name}", self.tick, on_end=self._leave)
        self.failure = ""
        self.frames = 0
        self.missed: Counter[str] = Counter()
        self.age_ms = 0.0
        publishes = section.publish and section.shadow_of is None
        recorders = () if recorder is None else (recorder,)
        self._listeners = (*(listeners if publishes else ()), *recorders)
        self._shares = shares
        self._share = shares.share(section.priority)
        self._share.cost = 0.0
        self._changed = threading.Condition()
        self._waiting: tuple[LaneFrame, Frame | None] | None = None
        self._due_s = 0.0

    @property
    def disagreement(self) -> Disagreement | None:
        """Of a shadow: the last one that is worth a look; None before."""
        return self._agreement.disagreement

    @property
    def source(self) -> str:
        """CAMERA/NETWORK, as streams and metrics name it."""
        return f"{self.camera}/{self.name}"

    def __call__(self, lane_frame: LaneFrame, frame: Frame | None) -> None:
        """Take a frame; the newest one wins. A reason why there are no lanes is one of the network
        only where the camera has it."""
        if frame is None and lane_frame.failure_reason in ("model_failed", "too_old"):
            return
        now_s = time.monotonic()
        # A recording in lock-step waits, so a shadow of its lanes sees every frame.
        rests = now_s < self._due_s and not (frame is not None and frame.clock == "recording")
        if self.section.shadow_of is not None and (lane_frame.failure or rests):
            return
        if frame is not None and self.section.max_hz:
            # Frames come with jitter; so early is in time.
            period_s = 1 / self.section.max_hz
            if now_s < self._due_s - period_s / 4:
                return
            self._due_s = period_s + max(self._due_s, now_s - period_s / 4)
        with self._changed:
            self.missed["dropped"] += self._waiting is not None
            self._waiting = lane_frame, frame
            self._changed.notify()

    def holds(self, _: str) -> bool:
        """Whether it has not finished with the newest frame that it took."""
        return self._waiting is not None or self._share.has_turn

    def tick(self, now: float) -> None:
        """Run the network on one frame, or wait briefly for one."""
        del now
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, _FRAME_WAIT_S):
                return
        if not self._shares.take_turn(self._share, _FRAME_WAIT_S):
            return
        began_s = time.monotonic()
        try:
            with self._changed:
                waiting, self._waiting = self._waiting, None
            if waiting is not None:
                self._use(*waiting)
        finally:
            ended_s = time.monotonic()
            self._share.cost = (ended_s - began_s) / self.section.priority
            if self.section.shadow_of is not None:
                self._due_s = ended_s + REST_OF_SAMPLES * (ended_s - began_s)
            self._shares.end_turn(self._share, again=self._waiting is not None)

    def _use(self, lane_frame: LaneFrame, frame: Frame | None) -> None:
        deadline_ms = self.section.deadline_ms
        if frame is None or (lane_frame.failure_reason in UNUSABLE and lane_frame.failure):
            self._give(lane_frame, None, lane_frame.failure, lane_frame.failure_reason)
            return
        age_ms = frame.age_ns(time.monotonic_ns()) / 1e6
        if age_ms > deadline_ms:
            self.missed["late"] += 1
            self._fail(f"its frames are {age_ms:.0f} ms old before its turn", "late")
            return
        deadline = time.monotonic() + (deadline_ms - age_ms) / 1e3
        self.worker.beat(deadline_ms / 1e3 + 2 * MODEL_STUCK_S)
        try:
            shadow = self.section.shadow_of is not None
            if shadow:
                self._begin_anew_where_changed()
            answer = self.model.run(frame, deadline, replayed=shadow)
        except EdgeServerError as error:
            forget_frames(error)
            word = error.code if isinstance(error, BadOutput) else "failed"
            self.missed[word] += 1
            text = str(error) or type(error).__name__
            self._fail(text, word)
            self._agreement.fail()
            self._give(lane_frame, None, text, "model_failed")
        else:
            self.frames += 1
            self.age_ms = frame.age_ns(time.monotonic_ns()) / 1e6
            if self.failure:
                log.info("camera %s: network %s: results again", self.camera, self.name)
                self.failure = ""
            if shadow:
                self._compare(lane_frame, answer)
            if self._tracker is not None and isinstance(found := answer.result, Detections):
                mono_ns = lane_frame.capture_mono_ns
                ids = self._tracker.update(found.boxes, found.classes, mono_ns)
                answer = answer._replace(result=replace(found, ids=ids))
            self._give(lane_frame, answer, "", "model_failed")
        self.worker.beat()

    def _begin_anew_where_changed(self) -> None:
        with self._data_plane.lease() as snapshot:
            found = [snapshot.find(name) for name in (self.served, self.section.model)]
            steps = [snapshot.find(s.model_name) for each in found for s in each.config.steps]
            compared = [each.statistics for each in (*found, *steps)]
        if compared != self._compared:
            self._compared, self._agreement, self.verdict = compared, LaneAgreement(), None

    def _compare(self, lane_frame: LaneFrame, answer: NetworkAnswer) -> None:
        latency = lane_frame.latency_us
        if not isinstance(answer.result, tuple):  # no lanes any more
            self._agreement.fail()
            return
        self._agreement.add(
            lane_frame.lanes,
            answer.result,
            lane_frame.capture_mono_ns,
            size=(lane_frame.width, lane_frame.height),
            candidate_us=sum(each.duration_ns for each in answer.response.timings) // 1000,
            served_us=latency.preprocess + latency.infer + latency.postprocess,
            camera=answer.view.camera,
        )
        if self.frames % _VERDICT_FRAMES == 0:
            self.verdict = self._agreement.verdict()

    def _give(
        self, lane_frame: LaneFrame, answer: NetworkAnswer | None, failure: str, reason: str
    ) -> None:
        if not self._listeners:
            return
        response = None if answer is None else answer.response
        timings = () if response is None else response.timings
        # How long the frame has waited: its lanes were before it.
        queue_ns = lane_frame.age_ns(time.monotonic_ns())
        queue_ns -= sum(each.duration_ns for each in timings)
        of_frame = replace(
            lane_frame,
            dropped=self.missed["dropped"] + self.missed["late"],
            model_name=self.section.model if response is None else response.model_name,
            model_version="" if response is None else response.model_version,
            latency_us=stage_latency(max(0, queue_ns), timings),
            lanes=(),
            failure=failure,
            failure_reason=reason,
            degraded=tuple(
                each for each in lane_frame.degraded if not each.code.startswith("calibration_")
            ),
            ego=None,
            vehicle=None,
            max_age_ms=self.section.deadline_ms,
            trace=None,
        )
        made = NetworkFrame(
            **vars(of_frame),
            network=self.name,
            task=self.model.task or "tensors",
            result=None if answer is None else answer.result,
        )
        for listener in self._listeners:
            listener(made)

    def _fail(self, failure: str, word: str) -> None:
        # Once for each fault: its numbers change with every frame.
        if word != self.failure.partition(":")[0]:
            log.error("camera %s: network %s: no results: %s", self.camera, self.name, failure)
        self.failure = failure if failure.startswith(f"{word}:") else f"{word}: {failure}"

    def mute(self) -> None:
        """Give the listeners nothing more, whatever the model still returns."""
        self._listeners = ()

    def _leave(self) -> None:
        self._shares.end_turn(self._share)

    def validate(self, *, live: bool) -> None:
        """Run one grey frame through the network, of the calibration's size.

        Raises:
            SettingsError: the model has no such contract, or cannot see the region.
            Unavailable: the model is not loaded, or cannot respond now.
        """
        try:
            self.model.run(Frame.arrived(0, self.model.grey_image(live=live)))
        except BadOutput as error:
            # A grey picture is none of those that it was trained for.
            log.warning("camera %s: network %s: a grey picture: %s", self.camera, self.name, error)
        except EdgeServerError as error:
            raise (Unavailable if may_pass(error) else SettingsError)(
                f"cameras.{self.camera}.networks.{self.name}: {with_remedy(error)}"
            ) from error
        if self.section.shadow_of is not None and self.model.task != "lanes":
            raise SettingsError(
                f"cameras.{self.camera}.networks.{self.name}.shadow_of: model "
                f"'{self.section.model}' gives {self.model.task}, and is no shadow of lanes"
            )
