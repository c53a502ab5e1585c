"""What networks find in a frame, whatever their tensors are, and how a contract is broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from edge_server.errors import InternalError, ModelConfigError
from edge_server.lanes.types import Lane, LaneFrame, PictureMark
from edge_server.process.text import as_utf8
from edge_server.tensors import shape_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.lanes.camera_model import CameraModel
    from edge_server.model_config.config import ModelConfig
    from edge_server.pixels import CropRegion
    from edge_server.tensors import TensorSpec

Task = Literal["lanes", "detection", "segmentation", "classification", "tensors"]


class BadOutput(InternalError):
    """A response that breaks the network's contract.

    Attributes:
        code: the fault in a word: `shape`, `not_finite`, `outside`, `class` or `too_many`.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class NetworkView(NamedTuple):
    """What a network has seen of a picture.

    Attributes:
        size: width and height of the picture, px.
        region: the part that the network saw, px of the picture.
        network: width and height of the network's input, px.
        camera: of a calibrated camera, for pictures of that size; else None.
        pitch_std_rad: of the camera, the vehicle's movement on its springs included.
    """

    size: tuple[int, int]
    region: CropRegion
    network: tuple[int, int]
    camera: CameraModel | None = None
    pitch_std_rad: float = 0.0

    @property
    def step_px(self) -> tuple[float, float]:
        """Columns and rows of the picture for a pixel of the network's input."""
        return self.region.width / self.network[0], self.region.height / self.network[1]


@dataclass(frozen=True, eq=False)
class Detections:
    """Boxes of N objects, the highest score first.

    Attributes:
        boxes: (N, 4) float64, x_min, y_min, x_max, y_max in px of the picture.
        classes: (N,) int64.
        scores: (N,) float64, 0..1.
        labels: names of the classes; empty where they have none.
        ids: (N,) of tracks; None where objects are not tracked.
        ground: (N, 2) float64, m, where the middle of a box's lower edge is on the road, as
            `GroundLane`; NaN where that is not known. None without a calibration.
        covariance: (N, 2, 2) float64, m2, of `ground`.
    """

    boxes: NDArray[np.float64]
    classes: NDArray[np.int64]
    scores: NDArray[np.float64]
    labels: Sequence[str] = ()
    ids: NDArray[np.int64] | None = None
    ground: NDArray[np.float64] | None = None
    covariance: NDArray[np.float64] | None = None


class Polygon(NamedTuple):
    """The outline of one connected area; `points` are (N, 2) px of the picture."""

    class_id: int
    points: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Segmentation:
    """A class for each cell of a map, row by row, as runs of one class.

    Attributes:
        region: the part of the picture that the map covers, px.
        size: columns and rows of the map.
        run_classes, run_lengths: the runs in order; the lengths add up to the map's cells.
        polygons: outlines of all classes but the background, the largest first.
    """

    region: CropRegion
    size: tuple[int, int]
    run_classes: NDArray[np.int64]
    run_lengths: NDArray[np.int64]
    polygons: Sequence[Polygon]
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Classification:
    """The best classes, (class, score) with the highest score first."""

    classes: Sequence[tuple[int, float]]
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class TensorList:
    """Names, datatypes and shapes of the tensors that came, whatever they mean."""

    tensors: Sequence[tuple[str, str, tuple[int, ...]]]


Result = Detections | Segmentation | Classification | TensorList | tuple[Lane, ...]


@dataclass(frozen=True, eq=False)
class NetworkFrame(LaneFrame):
    """What a camera's network has found in one frame; `lanes` are those of a lane network.

    Attributes:
        network: its name in the settings.
        result: None where there is a `failure`.
    """

    network: str = ""
    task: Task = "tensors"
    result: Result | None = None


# Of classes, in their order; far apart for those who see no red or no green (Okabe and Ito).
_CLASS_RGB = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
)


def marks_of(frame: NetworkFrame) -> list[PictureMark]:
    """Return what a picture of the frame shows of its result: boxes, outlines of masks, lines of
    lanes, and the best classes as a text in the lower left corner."""
    match frame.result:
        case Detections() as found:
            ids = [0] * len(found.boxes) if found.ids is None else found.ids.tolist()
            rows = zip(
                found.boxes[:, [[0, 1], [2, 1], [2, 3], [0, 3], [0, 1]]],
                found.classes.tolist(),
                found.scores.tolist(),
                ids,
                strict=True,
            )
            return [
                _mark(box, each, found.labels, f" {score:.2f}" + (f" #{number}" if number else ""))
                for box, each, score, number in rows
            ]
        case Segmentation() as mask:
            return [
                _mark(np.concatenate([points, points[:1]]), each, mask.labels, filled=True)
                for each, points in mask.polygons
            ]
        case Classification(classes, labels):
            best = ", ".join(f"{_label(each, labels)} {score:.2f}" for each, score in classes)
            return [PictureMark(np.array([[0, frame.height]]), best, _CLASS_RGB[0])]
        case tuple() as lanes:
            finite = [lane for lane in lanes if np.isfinite(lane.points).all()]
            return [PictureMark(lane.points, "", _CLASS_RGB[0]) for lane in finite]
    return []


def _mark(
    points: NDArray[Any], class_id: int, labels: Sequence[str], text: str = "", **how: bool
) -> PictureMark:
    rgb = _CLASS_RGB[class_id % len(_CLASS_RGB)]
    return PictureMark(points, _label(class_id, labels) + text, rgb, **how)


def _label(class_id: int, labels: Sequence[str]) -> str:
    return as_utf8(labels[class_id]) if class_id < len(labels) else f"class {class_id}"


Arrays = Sequence["NDArray[Any]"]


# The outputs that a contract reads, and what reads them.
Found = tuple[tuple[str, ...], Callable[[Arrays, NetworkView], Result]]


def unfit(config: ModelConfig, task: Task, wants: str) -> ModelConfigError:
    """Return the error of a model that has no outputs of a contract."""
    has = ", ".join(f"'{each.name}' {spec_text(each)}" for each in config.outputs) or "none"
    return ModelConfigError(
        f"model '{config.name}' has no outputs of the contract {task}: it has {has}; {wants}"
    )


def spec_text(spec: TensorSpec) -> str:
    """Return a tensor's declaration, as in `FP32 [-1,4]`."""
    return f"{spec.datatype.name} {shape_text(spec.shape)}"


def labels_of(config: ModelConfig) -> Sequence[str]:
    """Return the names of the classes, of the first output that has some; empty without."""
    return next((config.labels[o.name] for o in config.outputs if o.name in config.labels), ())


def number_of(config: ModelConfig, name: str, default: float, most: float = 1.0) -> float:
    """Return a parameter of the model, 0 to `most`."""
    text = config.parameters.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= most:
        raise ModelConfigError(
            f"model '{config.name}': parameter '{name}' is '{text}'; it is 0 to {most:g}"
        )
    return value
