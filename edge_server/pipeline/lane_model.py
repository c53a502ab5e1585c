"""LaneModel: the model that finds the lanes of one camera's frames, whatever its tensors are."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edge_server.errors import InternalError
from edge_server.lanes.decode import ROW_COUNT
from edge_server.lanes.types import Lane, StageLatency, lanes_from_rows
from edge_server.pipeline.fair_shares import frames_at_once
from edge_server.pipeline.lane_tensors import ImageNeeds, LaneTensors
from edge_server.pixels import Image, PixelFormat
from edge_server.requests import InferRequest, StepTiming

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from edge_server.cameras.frame import Frame, UsefulSize
    from edge_server.inference.data_plane import DataPlane
    from edge_server.inference.registry import Snapshot
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import Trace

_STAGE_OF_BACKEND = {"image_preprocess": "preprocess", "lane_decode": "postprocess"}


class Detected(NamedTuple):
    """What the model found in one frame; see `LaneFrame`."""

    model_name: str
    model_version: str
    latency_us: StageLatency
    lanes: tuple[Lane, ...]


class NoLanes(InternalError):
    """The model's response has another shape than lanes."""


class LaneModel:
    """Finds the lanes of one camera's frames by requests like any client's; for one thread.

    Args:
        data_plane: runs the model.
        name: of the model.
        useful: is told the smallest size that the model has a use for.
        adapt: is told how many frames the model takes at once.
    """

    def __init__(
        self,
        data_plane: DataPlane,
        name: str,
        useful: UsefulSize,
        adapt: Callable[[float], object],
    ) -> None:
        self._data_plane = data_plane
        self._name = name
        self._useful = useful
        self._adapt = adapt
        self._found: _Found | None = None

    def detect(
        self, frame: Frame, deadline: float | None = None, trace: Trace | None = None
    ) -> Detected:
        """Return the lanes of `frame`, in px of the camera's picture.

        Args:
            frame: the image.
            deadline: `time.monotonic()` at which the request expires; None is never.
            trace: of the request; None where it is not traced.

        Raises:
            NoLanes: the model's response is something else.
            EdgeServerError: the model cannot respond; see `DataPlane.infer`.
        """
        queue_ns = time.monotonic_ns() - frame.capture_mono_ns
        with self._data_plane.lease() as snapshot:
            tensors = self._tensors_of(snapshot)
            image, parameters = tensors.input_of(frame.image)
            response = snapshot.infer(
                InferRequest(
                    self._name,
                    {tensors.image: image},
                    outputs=(tensors.points, tensors.scores),
                    deadline=deadline,
                    urgent=True,
                    parameters=parameters,
                    trace=trace,
                )
            )
            self._adapt(frames_at_once(response.timings, lambda name: snapshot.find(name).config))
        points = response.outputs[tensors.points].array
        scores = response.outputs[tensors.scores].array
        if not tensors.batched:
            points, scores = points[np.newaxis], scores[np.newaxis]
        if not _are_lanes(points, scores):
            raise NoLanes(
                f"model '{self._name}' returned '{tensors.points}' {points.shape} and "
                f"'{tensors.scores}' {scores.shape}; lanes are (1, K, {ROW_COUNT}, 2) and (1, K), "
                "of floating-point numbers"
            )
        return Detected(
            response.model_name,
            response.model_version,
            _stage_latency(queue_ns, response.timings),
            lanes_from_rows(_in_picture(points[0], frame), scores[0]),
        )

    def grey_image(self, *, live: bool) -> Image:
        """Return an image such as the camera may give: a recording's is BGR, a live camera's format
        is not known before it is there, so its image has the one that the model takes."""
        pixel_format = PixelFormat.BGR
        if live:
            with self._data_plane.lease() as snapshot:
                tensors = self._tensors_of(snapshot)
            pixel_format = tensors.pixel_format or pixel_format
        return Image.grey(pixel_format, 1280, 720)

    def _tensors_of(self, snapshot: Snapshot) -> LaneTensors:
        """Return the model's tensors, found once for each version that serves; the camera learns
        how small its images may be."""
        config = snapshot.find(self._name).config
        found = self._found
        if found is None or found.config is not config:
            tensors = LaneTensors.of(config)
            found = self._found = _Found(config, tensors, tensors.step_of(config))
        step = snapshot.find(found.step).config if found.step else config
        if found.step_config is not step:
            needs = ImageNeeds.of(step)
            tensors = found.tensors
            if tensors.pixel_format is not None and needs.pixel_format is not None:
                tensors = replace(tensors, pixel_format=needs.pixel_format)
            found = self._found = _Found(config, tensors, found.step, step, needs.size)
        # Each time: a reload may have tried another model with this camera, and not taken it.
        self._useful.size = found.size
        return found.tensors


def _are_lanes(points: NDArray[Any], scores: NDArray[Any]) -> bool:
    return (
        points.dtype.kind == scores.dtype.kind == "f"
        and len(points.shape) == 4
        and points.shape == (1, *scores.shape[1:], ROW_COUNT, 2)
        and points.shape[:2] == scores.shape
    )


def _in_picture(points: NDArray[Any], frame: Frame) -> NDArray[Any]:
    """Return points of the frame's image in px of the camera's picture, which may be larger."""
    if frame.picture_size is None:
        return points
    image = frame.image
    ratio = frame.picture_size[0] / image.width, frame.picture_size[1] / image.height
    scaled: NDArray[Any] = points * np.array(ratio, points.dtype)
    return scaled


class _Found(NamedTuple):
    """The tensors of one version of the model.

    Attributes:
        step: the model that takes the image; "" where that is the model itself.
        step_config: from which `tensors` and `size` come.
        size: of the images; see `ImageNeeds`.
    """

    config: ModelConfig
    tensors: LaneTensors
    step: str
    step_config: ModelConfig | None = None
    size: tuple[int, int] | None = None


def _stage_latency(queue_ns: int, timings: Sequence[StepTiming]) -> StageLatency:
    spent_ns = {"queue": queue_ns, "preprocess": 0, "infer": 0, "postprocess": 0}
    for timing in timings:
        spent_ns[_STAGE_OF_BACKEND.get(timing.backend, "infer")] += timing.duration_ns
    return StageLatency(**{stage: ns // 1000 for stage, ns in spent_ns.items()})
