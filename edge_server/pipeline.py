"""LanePipeline: the camera loop, where cameras and lanes meet the data plane."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy as np

from edge_server.appliance.worker import Worker
from edge_server.cameras.frame import Frame
from edge_server.errors import EdgeServerError, InternalError, NotFound, SettingsError
from edge_server.lanes.anchors import ROW_COUNT
from edge_server.lanes.rows import lanes_from_rows
from edge_server.lanes.types import LaneFrame, StageLatency
from edge_server.requests import InferRequest, StepTiming
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_server.cameras.camera import Camera
    from edge_server.serving.data_plane import DataPlane

    Listener = Callable[[LaneFrame, Frame], None]

log = logging.getLogger(__name__)

# What a lane model is called by and answers with: the tensors of the shipped `lane_detection`.
IMAGE = "image"
LANE_POINTS = "lane_points"
LANE_SCORES = "lane_scores"
LANE_TENSORS = frozenset({IMAGE, LANE_POINTS, LANE_SCORES})

_FRAME_WAIT_S = 0.2
_STAGE_OF_BACKEND = {"image_preprocess": "preprocess", "lane_decode": "postprocess"}


class LanePipeline:
    """Takes the newest frame of one camera, asks the model for its lanes, tells the listeners.

    It asks through the same door as every client. A model that fails costs that frame.
    Listeners are called on this loop's thread and must return at once.
    """

    def __init__(
        self, camera: Camera, data_plane: DataPlane, model: str, listeners: Sequence[Listener]
    ) -> None:
        self.camera = camera
        self.failed_frames = 0
        self.worker = Worker(f"lanes-{camera.name}", self.tick)
        self._data_plane = data_plane
        self._model = model
        self._listeners = tuple(listeners)
        self._failing = False

    def tick(self, now: float) -> bool:
        """One frame, or a short wait for it; False when the camera has come to its end."""
        del now
        frame = self.camera.next_frame(_FRAME_WAIT_S)
        if frame is None:
            return not self.camera.ended
        try:
            lane_frame = self.detect(frame)
        except EdgeServerError as error:
            self._note_failure(error)
            return True
        self._note_success()
        for listener in self._listeners:
            listener(lane_frame, frame)
        return True

    def detect(self, frame: Frame) -> LaneFrame:
        """The lanes of `frame`.

        Raises:
            EdgeServerError: the model cannot answer; see `DataPlane.infer`.
        """
        taken_ns = time.monotonic_ns()
        image = Tensor.of(frame.image[np.newaxis])
        response = self._data_plane.infer(
            InferRequest(
                self._model, {IMAGE: image}, outputs=(LANE_POINTS, LANE_SCORES), urgent=True
            )
        )
        points = response.outputs[LANE_POINTS].array
        scores = response.outputs[LANE_SCORES].array
        if points.shape[:2] != scores.shape[:2] or points.shape[2:] != (ROW_COUNT, 2):
            raise InternalError(
                f"model '{self._model}' answered '{LANE_POINTS}' {points.shape} and "
                f"'{LANE_SCORES}' {scores.shape}; lanes are (1, K, {ROW_COUNT}, 2) and (1, K)"
            )
        height, width = frame.image.shape[:2]
        return LaneFrame(
            camera=self.camera.name,
            frame_id=frame.id,
            dropped=self.camera.dropped,
            capture_mono_ns=frame.capture_mono_ns,
            capture_epoch_ns=frame.capture_epoch_ns,
            width=width,
            height=height,
            model_name=response.model_name,
            model_version=response.model_version,
            latency_us=_stage_latency(taken_ns - frame.capture_mono_ns, response.timings),
            lanes=lanes_from_rows(points[0], scores[0]),
        )

    def prove(self) -> None:
        """Run one grey frame through the model, so that the first real one finds it warm.

        Raises:
            SettingsError: the camera's model is no lane model, or cannot answer.
        """
        now_ns = time.monotonic_ns()
        grey = Frame(0, np.full((720, 1280, 3), 127, np.uint8), now_ns, time.time_ns())
        try:
            self.detect(grey)
        except EdgeServerError as error:
            remedy = ""
            if isinstance(error, NotFound):
                remedy = (
                    "; put it into a repository, and in mode explicit into repository.load "
                    "(--load-model)"
                )
            raise SettingsError(
                f"cameras.{self.camera.name}.model: '{self._model}' gives no lanes: {error}{remedy}"
            ) from error

    def _note_failure(self, error: EdgeServerError) -> None:
        self.failed_frames += 1
        if not self._failing:
            log.error("camera %s: no lanes from now on: %s", self.camera.name, error)
        self._failing = True

    def _note_success(self) -> None:
        if self._failing:
            log.info(
                "camera %s: lanes again, %d frames failed", self.camera.name, self.failed_frames
            )
        self._failing = False


def _stage_latency(queue_ns: int, timings: Sequence[StepTiming]) -> StageLatency:
    spent_ns = {"preprocess": 0, "infer": 0, "postprocess": 0}
    for timing in timings:
        spent_ns[_STAGE_OF_BACKEND.get(timing.backend, "infer")] += timing.duration_ns
    return StageLatency(
        queue=queue_ns // 1000,
        preprocess=spent_ns["preprocess"] // 1000,
        infer=spent_ns["infer"] // 1000,
        postprocess=spent_ns["postprocess"] // 1000,
    )
