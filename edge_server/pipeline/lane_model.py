"""LaneModel: the model that finds the lanes of one camera's frames, whatever its tensors are."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast
from weakref import ref

import numpy as np

from edge_server.errors import EdgeServerError, InternalError, ModelConfigError, NotFound
from edge_server.gpu.memory import UploadOnce
from edge_server.lanes.decode import ROW_COUNT
from edge_server.lanes.types import Lane, StageLatency, lanes_from_rows
from edge_server.pipeline.fair_shares import frames_at_once, frames_of
from edge_server.pixels import Image, PixelFormat
from edge_server.requests import InferRequest, StepTiming
from edge_server.tensors import DataType, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from edge_server.cameras.frame import Frame, UsefulSize
    from edge_server.inference.data_plane import DataPlane
    from edge_server.inference.registry import Snapshot
    from edge_server.model_config.config import ModelConfig
    from edge_server.pipeline.fair_shares import FairShares
    from edge_server.requests import Parameters, Trace
    from edge_server.tensors import TensorSpec

_FLOATS = (DataType.FP32, DataType.FP16)
# The image formats that a model takes, by the dims of its input; any format where all dims are -1.
_FORMATS = {3: PixelFormat.BGR, 2: PixelFormat.YUY2, 1: PixelFormat.GREY}


@dataclass(frozen=True)
class ImageInput:
    """Which tensor of a model is the image.

    Attributes:
        pixel_format: the only format that the model takes; None where it takes each of them.
        batched: tensors have a batch dimension.
        on_gpu: the step that takes the image has instances on a GPU.
    """

    image: str
    pixel_format: PixelFormat | None
    batched: bool
    on_gpu: bool = field(default=False, kw_only=True)

    @staticmethod
    def of(config: ModelConfig) -> ImageInput:
        """Find the one UINT8 input that every request needs.

        Raises:
            ModelConfigError: the model takes no image.
        """
        needed = [spec for spec in config.inputs if not spec.optional]
        images = _images(needed)
        if not len(images) == len(needed) == 1:
            raise ModelConfigError(
                f"model '{config.name}' takes no image: it has inputs {_names(config.inputs)}; a "
                "camera's model has one input, TYPE_UINT8 with dims [-1,-1,3] (BGR) or [-1,-1,-1] "
                "(any format)"
            )
        return ImageInput(images[0].name, _format_of(images[0].shape), config.max_batch_size > 0)

    def step_of(self, config: ModelConfig) -> str:
        """Return the name of the model that takes the image in an ensemble; "" without such a one,
        or with several."""
        takers = [step.model_name for step in config.steps if self.image in step.input_map.values()]
        return takers[0] if len(takers) == 1 else ""

    def input_of(self, image: Image) -> tuple[Tensor, Parameters]:
        """Return the input tensor of `image`, and the request parameters that describe its pixels:
        `pixel_format`, `color_matrix` and `color_range`.

        The pixels are copied only where their planes have gaps, or where the model takes another
        format alone.
        """
        if self.pixel_format is not None and self.pixel_format is not image.pixel_format:
            image = _converted(image, self.pixel_format)
        pixels = image.packed()
        if self.pixel_format is not None and self.pixel_format.is_subsampled:
            pixels = pixels[..., 0]
        parameters = {
            "pixel_format": image.pixel_format.value,
            "color_matrix": image.colour.matrix.value,
            "color_range": image.colour.range.value,
        }
        pixels = np.ascontiguousarray(pixels)
        return Tensor(pixels[np.newaxis] if self.batched else pixels), parameters


@dataclass(frozen=True)
class LaneTensors(ImageInput):
    """Which tensors of a model are the image, the lanes' points and their scores."""

    points: str
    scores: str

    @staticmethod
    def of(config: ModelConfig) -> LaneTensors:
        """Find the tensors: the one UINT8 input that every request needs, the one floating-point
        output with dims [-1, 72, 2], and the one with dims [-1].

        Raises:
            ModelConfigError: the model is no lane model; the text says what is missing.
        """
        needed = [spec for spec in config.inputs if not spec.optional]
        images = _images(needed)
        outputs = [spec for spec in config.outputs if spec.datatype in _FLOATS]
        points = [spec for spec in outputs if spec.shape[1:] == (ROW_COUNT, 2)]
        scores = [spec for spec in outputs if len(spec.shape) == 1]
        if not len(images) == len(needed) == len(points) == len(scores) == 1:
            raise ModelConfigError(
                f"model '{config.name}' is no lane model: it has inputs {_names(config.inputs)} "
                f"and outputs {_names(config.outputs)}; a lane model has one input, TYPE_UINT8 "
                f"with dims [-1,-1,3] (BGR) or [-1,-1,-1] (any format), one output with dims "
                f"[-1,{ROW_COUNT},2] (points) and one with dims [-1] (scores), both floating-point"
            )
        return LaneTensors(
            images[0].name,
            _format_of(images[0].shape),
            config.max_batch_size > 0,
            points[0].name,
            scores[0].name,
        )


def _converted(image: Image, pixel_format: PixelFormat) -> Image:
    # OpenCV is not needed by a daemon without cameras.
    from edge_server.cameras.colour import converted  # noqa: PLC0415

    made = converted(image, pixel_format)
    if made is None:
        raise ModelConfigError(
            f"the model takes {pixel_format.value} images, the camera gives "
            f"{image.pixel_format.value}; give the model's input dims [-1,-1,-1] and its "
            'image_preprocess the parameter pixel_format "any"'
        )
    return made


class FrameInputs:
    """What several models take of one frame: converted once for each pixel format, and copied to a
    GPU once, by the model that reads it there first. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[PixelFormat, tuple[UploadOnce, Parameters]] = {}

    def of(self, taker: ImageInput, image: Image) -> tuple[Tensor, Parameters]:
        """Return the input of one of the models, as `ImageInput.input_of`."""
        key = taker.pixel_format or image.pixel_format
        with self._lock:
            if key not in self._made:
                tensor, parameters = taker.input_of(image)
                pixels = tensor.array[0] if taker.batched else tensor.array
                packed = pixels[..., np.newaxis] if pixels.ndim == 2 else pixels
                self._made[key] = UploadOnce(packed), parameters
            upload, parameters = self._made[key]
        shape = upload.shape
        if taker.pixel_format is not None and taker.pixel_format.is_subsampled:
            shape = shape[:2]
        upload = upload.reshape((1, *shape) if taker.batched else shape)
        if taker.on_gpu:
            # The struct's type is numpy's, for those that take no arrays on a device.
            return Tensor(cast("NDArray[np.uint8]", upload)), parameters
        return Tensor(upload.on_host()), parameters


class ImageNeeds(NamedTuple):
    """What a model needs of its images.

    Attributes:
        pixel_format: where dims do not tell it: NV12 and I420 have the same.
        size: width and height in px of what the model makes of them; None where it cannot be
            known, or where regions or the lens are given in px of whole images.
    """

    pixel_format: PixelFormat | None = None
    size: tuple[int, int] | None = None

    @staticmethod
    def of(config: ModelConfig) -> ImageNeeds:
        """Return the needs of the step that takes the image."""
        if config.backend != "image_preprocess":
            return ImageNeeds()
        # It needs OpenCV, and so does the model.
        from edge_server.backends.vision.image_preprocess_config import (  # noqa: PLC0415
            FrameParameters,
        )

        frame = FrameParameters.of(config)
        planes = [spec.shape for spec in config.outputs if len(spec.shape) == 3]
        if frame.crop is not None or frame.lens is not None or not planes:
            return ImageNeeds(frame.pixel_format)
        return ImageNeeds(frame.pixel_format, (planes[0][2], planes[0][1]))


_Taker = TypeVar("_Taker", bound=ImageInput)


def with_needs(taker: _Taker, config: ModelConfig, snapshot: Snapshot) -> tuple[_Taker, ImageNeeds]:
    """Return how the model takes its image, and what it needs of it, as the step says that takes
    the image."""
    step = taker.step_of(config)
    if step:
        config = snapshot.find(step).config
    needs = ImageNeeds.of(config)
    if taker.pixel_format is not None and needs.pixel_format is not None:
        taker = replace(taker, pixel_format=needs.pixel_format)
    on_gpu = any(group.kind == "GPU" for group in config.instance_groups)
    return replace(taker, on_gpu=on_gpu), needs


def check_lane_replacement(old: ModelConfig, new: ModelConfig) -> None:
    """Check that `new` is a lane model that takes the images of the cameras that use `old`.

    A model that takes any format, or BGR, takes those of each camera.

    Raises:
        ModelConfigError: it is not; the text says why.
    """
    pixel_format = LaneTensors.of(new).pixel_format
    if pixel_format in (None, PixelFormat.BGR) or pixel_format is LaneTensors.of(old).pixel_format:
        return
    raise ModelConfigError(
        f"model '{new.name}' takes {pixel_format.value} images alone, its predecessor took others; "
        "give its input dims [-1,-1,-1], and its image_preprocess the parameter pixel_format "
        '"any"'
    )


def _images(needed: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [
        spec for spec in needed if spec.datatype is DataType.UINT8 and len(spec.shape) in (2, 3)
    ]


def _format_of(dims: tuple[int, ...]) -> PixelFormat | None:
    if len(dims) == 2:
        return PixelFormat.NV12
    return _FORMATS.get(dims[2])


def _names(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"'{spec.name}'" for spec in specs) or "none"


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
        useful: is told the smallest size that the model has a use for.
        shares: learn how many frames the model takes at once, where several cameras have it.
    """

    def __init__(
        self,
        data_plane: DataPlane,
        name: str,
        useful: UsefulSize,
        shares: FairShares,
    ) -> None:
        self._data_plane = data_plane
        self._name = name
        self._useful = useful
        self._shares = shares
        self._seen: Callable[[], Snapshot | None] = lambda: None
        self._tensors: LaneTensors | None = None
        self._size: tuple[int, int] | None = None
        self._frames_of: dict[str, int] = {}

    def detect(
        self, frame: Frame, deadline: float | None = None, trace: Trace | None = None
    ) -> Detected:
        """Return the lanes of `frame`, in px of the camera's picture, which gives them an index.

        Args:
            deadline: `time.monotonic()` at which the request expires; None is never.

        Raises:
            NoLanes: the model's response is something else.
            EdgeServerError: the model cannot respond; see `DataPlane.infer`.
        """
        queue_ns = frame.age_ns(time.monotonic_ns())
        with self._data_plane.lease() as snapshot:
            tensors = self._tensors
            if tensors is None or self._seen() is not snapshot:
                tensors = self._find_tensors(snapshot)
            # Each time: a reload may have tried another model with this camera, and not taken it.
            if (inputs := frame.inputs) is None:
                self._useful.size = self._size
                image, parameters = tensors.input_of(frame.image)
            else:  # other networks need whole pictures
                self._useful.size = None
                image, parameters = inputs.of(tensors, frame.image)
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
            if self._shares.cameras > 1:
                for timing in response.timings:
                    if (name := timing.model_name) not in self._frames_of:
                        self._frames_of[name] = frames_of(snapshot.find(name).config)
                self._shares.adapt(frames_at_once(response.timings, self._frames_of))
        points = response.outputs[tensors.points].array
        scores = response.outputs[tensors.scores].array
        if not tensors.batched:
            points, scores = points[np.newaxis], scores[np.newaxis]
        if not (
            points.dtype.kind == scores.dtype.kind == "f"
            and points.ndim == 4
            and points.shape == (1, *scores.shape[1:], ROW_COUNT, 2)
            and points.shape[:2] == scores.shape
        ):
            raise NoLanes(
                f"model '{self._name}' returned '{tensors.points}' {points.shape} and "
                f"'{tensors.scores}' {scores.shape}; lanes are (1, K, {ROW_COUNT}, 2) and (1, K), "
                "of floating-point numbers"
            )
        points = points[0]
        if frame.picture_size is not None:  # the image is smaller than the camera's picture
            (width, height), image_size = frame.picture_size, frame.image
            ratio = width / image_size.width, height / image_size.height
            points = points * np.array(ratio, points.dtype)
        return Detected(
            response.model_name,
            response.model_version,
            stage_latency(queue_ns, response.timings),
            lanes_from_rows(points, scores[0], frame.size),
        )

    def grey_image(self, *, live: bool) -> Image:
        """Return an image such as the camera may give: a recording's is BGR, a live camera's format
        is not known before it is there, so its image has the one that the model takes."""
        pixel_format = PixelFormat.BGR
        if live:
            with self._data_plane.lease() as snapshot:
                tensors = self._find_tensors(snapshot)
            pixel_format = tensors.pixel_format or pixel_format
        return Image.grey(pixel_format, 1280, 720)

    def _find_tensors(self, snapshot: Snapshot) -> LaneTensors:
        """Return the model's tensors, found once for each set of models that serves, and keep how
        small the camera's images may be."""
        config = snapshot.find(self._name).config
        tensors, needs = with_needs(LaneTensors.of(config), config, snapshot)
        self._seen, self._tensors, self._size = ref(snapshot), tensors, needs.size
        self._frames_of.clear()
        return tensors


def with_remedy(error: EdgeServerError) -> str:
    """Return why a camera's model does not respond, and where a missing one comes from."""
    if not isinstance(error, NotFound):
        return str(error)
    return (
        f"{error}; put it into a repository, and in mode explicit into repository.load "
        "(--load-model)"
    )


def stage_latency(queue_ns: int, timings: Sequence[StepTiming]) -> StageLatency:
    """Return where a frame's time went: its wait, and the steps of its model."""
    spent_ns = {"queue": queue_ns, "preprocess": 0, "infer": 0, "postprocess": 0}
    for timing in timings:
        spent_ns[_STAGE_OF_BACKEND.get(timing.backend, "infer")] += timing.duration_ns
    return StageLatency(**{stage: ns // 1000 for stage, ns in spent_ns.items()})
