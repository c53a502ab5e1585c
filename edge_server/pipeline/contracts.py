"""Contracts: what a camera's network promises to return, found in its configuration, and how the
tensors of a response become boxes, masks or classes in px of the whole picture.

A network's `config.pbtxt` may name its contract, and how its tensors are to be read, in
`parameters`; docs/networks.md lists them. What a response has beyond its contract is an error with
a name, and nothing of that response is published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from edge_server.errors import InternalError, ModelConfigError
from edge_server.lanes.types import Lane, LaneFrame, lanes_from_rows
from edge_server.pipeline.lane_model import ImageInput, LaneTensors, check_lane_replacement
from edge_server.tensors import DataType, shape_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.lanes.camera_model import CameraModel
    from edge_server.model_config.config import ModelConfig
    from edge_server.pixels import CropRegion
    from edge_server.tensors import TensorSpec

Task = Literal["lanes", "detection", "segmentation", "classification", "tensors"]

# A network that finds more is broken, or its threshold is: suppression takes the square of that.
_MOST_CANDIDATES = 10_000
_MOST_DETECTIONS = 1_000
_MOST_RUNS = 200_000
_MOST_POLYGONS = 200
_FLOATS = (DataType.FP32, DataType.FP16)


class BadOutput(InternalError):
    """A response that breaks the network's contract.

    Attributes:
        code: the fault in a word: `shape`, `not_finite`, `outside`, `class` or `too_many`.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class View(NamedTuple):
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


Arrays = Sequence["NDArray[Any]"]


@dataclass(frozen=True)
class Contract:
    """How the response of a network is read.

    Attributes:
        outputs: names of the tensors that `read` takes, in its order.
        read: returns what they mean.
    """

    task: Task
    outputs: tuple[str, ...]
    image: ImageInput
    read: Callable[[Arrays, View], Result]

    @staticmethod
    def of(config: ModelConfig) -> Contract:
        """Return the contract that the parameter `task` names, or else the first one that fits.

        Raises:
            ModelConfigError: the model takes no image, or does not fit; the text says which output
                has what, and what the contract wants.
        """
        task = config.parameters.get("task", "")
        if task and task not in _CONTRACTS:
            words = ", ".join(get_args(Task))
            raise ModelConfigError(f"{_task(config, task)} is not one of {words}")
        image = ImageInput.of(config)
        faults: list[str] = []
        for name, find in _CONTRACTS.items():
            if task in ("", name):
                try:
                    outputs, read = find(config)
                except ModelConfigError as error:
                    faults.append(str(error))
                else:
                    return Contract(name, outputs, image, read)
        raise ModelConfigError("; ".join(faults))

    def result(self, tensors: Mapping[str, NDArray[Any]], view: View) -> Result:
        """Return what a response means.

        Raises:
            BadOutput: the response breaks the contract.
        """
        arrays = [tensors[name] for name in self.outputs]
        if self.image.batched:
            for name, array in zip(self.outputs, arrays, strict=True):
                if not array.ndim or len(array) != 1:
                    raise BadOutput(
                        "shape", f"output '{name}' has {shape_text(array.shape)} for one frame"
                    )
            arrays = [array[0] for array in arrays]
        return self.read(arrays, view)


def check_replacement(old: ModelConfig, new: ModelConfig) -> None:
    """Check that `new` returns to cameras what `old` does, and takes their images.

    Raises:
        ModelConfigError: it does not; the text says why.
    """
    had = Contract.of(old).task
    if had == "lanes":
        check_lane_replacement(old, new)
    elif (has := Contract.of(new).task) != had:
        raise ModelConfigError(
            f"model '{new.name}' has the contract {has}, and its predecessor {had}; a camera's "
            "network keeps its contract: give the model another name"
        )


_Found = tuple[tuple[str, ...], Callable[[Arrays, View], Result]]


def _task(config: ModelConfig, task: str) -> str:
    return f"model '{config.name}': parameter 'task' is '{task}', which"


def _unfit(config: ModelConfig, task: Task, wants: str) -> ModelConfigError:
    has = ", ".join(f"'{each.name}' {_spec(each)}" for each in config.outputs) or "none"
    return ModelConfigError(
        f"model '{config.name}' has no outputs of the contract {task}: it has {has}; {wants}"
    )


def _spec(spec: TensorSpec) -> str:
    return f"{spec.datatype.name} {shape_text(spec.shape)}"


def labels_of(config: ModelConfig) -> Sequence[str]:
    """Return the names of the classes, of the first output that has some; empty without."""
    return next((config.labels[o.name] for o in config.outputs if o.name in config.labels), ())


def _number(config: ModelConfig, name: str, default: float, most: float = 1.0) -> float:
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


def _find_lanes(config: ModelConfig) -> _Found:
    tensors = LaneTensors.of(config)

    def read(arrays: Arrays, view: View) -> tuple[Lane, ...]:
        points, scores = arrays
        if points.ndim != 3 or points.shape != (len(scores), *points.shape[1:2], 2):
            raise BadOutput(
                "shape",
                f"output '{tensors.points}' has {shape_text(points.shape)} for "
                f"{len(scores)} scores; lanes are [K,72,2]",
            )
        if not (np.isfinite(points).all() and np.isfinite(scores).all()):
            raise BadOutput("not_finite", f"output '{tensors.points}' has NaN or infinity")
        moved = points + np.array((view.region.x, view.region.y), points.dtype)
        moved[points[..., 0] < 0] = -2.0
        return lanes_from_rows(moved, scores)

    return (tensors.points, tensors.scores), read


class _Boxes(NamedTuple):
    """Candidates: boxes (N, 4) as the decoder says, scores (N,) and classes (N,)."""

    boxes: NDArray[Any]
    scores: NDArray[Any]
    classes: NDArray[Any]


class _Decoder(NamedTuple):
    """One way in which networks return boxes.

    Attributes:
        outputs: returns the outputs in the order of `read`; None where the model has others.
        coordinates: of a box; `unit` ones are shares of the network's input, others its px.
        overlaps: boxes of one object are still to be suppressed.
    """

    outputs: Callable[[ModelConfig, int], tuple[TensorSpec, ...] | None]
    read: Callable[[Arrays, int], _Boxes]
    coordinates: Literal["xyxy", "yxyx", "cxcywh"]
    unit: bool
    overlaps: bool
    wants: str


def _single(config: ModelConfig) -> tuple[int, int] | None:
    """The dims of the only output, two of them."""
    if len(config.outputs) != 1 or config.outputs[0].datatype not in _FLOATS:
        return None
    shape = config.outputs[0].shape
    return (shape[0], shape[1]) if len(shape) == 2 else None


def _yolo(config: ModelConfig, labels: int) -> tuple[TensorSpec, ...] | None:
    dims = _single(config)
    rows = 4 + labels
    if dims is None or not (dims[0] == rows if labels else 5 <= dims[0] < dims[1]):
        return None
    return config.outputs


def _yolo_objectness(config: ModelConfig, labels: int) -> tuple[TensorSpec, ...] | None:
    dims = _single(config)
    columns = 5 + labels
    if dims is None or not (dims[1] == columns if labels else 6 < dims[1] < dims[0]):
        return None
    return config.outputs


def _rows(config: ModelConfig, _labels: int) -> tuple[TensorSpec, ...] | None:
    dims = _single(config)
    return config.outputs if dims is not None and dims[1] == 6 != dims[0] else None


def _boxes_and(
    config: ModelConfig, words: Sequence[Sequence[str]], dims: int
) -> tuple[TensorSpec, ...] | None:
    """Return the output with dims [N,4], and for each of `words` the one of so many dims that has
    one of these in its name."""
    boxes = [each for each in config.outputs if len(each.shape) == 2 and each.shape[1] == 4]
    rest = [each for each in config.outputs if len(each.shape) == dims and each not in boxes[:1]]
    found = [
        [each for each in rest if any(word in each.name.lower() for word in group)]
        for group in words
    ]
    if not boxes or any(len(each) != 1 for each in found):
        return None
    return (boxes[0], *(each[0] for each in found))


def _read_yolo(arrays: Arrays, _labels: int) -> _Boxes:
    by_box = arrays[0].T
    classes = by_box[:, 4:].argmax(axis=1)
    return _Boxes(by_box[:, :4], by_box[np.arange(len(by_box)), 4 + classes], classes)


def _read_yolo_objectness(arrays: Arrays, _labels: int) -> _Boxes:
    by_box = arrays[0]
    classes = by_box[:, 5:].argmax(axis=1)
    scores = by_box[:, 4] * by_box[np.arange(len(by_box)), 5 + classes]
    return _Boxes(by_box[:, :4], scores, classes)


def _read_rows(arrays: Arrays, _labels: int) -> _Boxes:
    return _Boxes(arrays[0][:, :4], arrays[0][:, 4], arrays[0][:, 5])


def _read_detr(arrays: Arrays, labels: int) -> _Boxes:
    boxes, logits = arrays[0], arrays[1].astype(np.float64)
    if labels and logits.shape[1] == labels:  # each class by itself, as of RT-DETR
        shares = 1 / (1 + np.exp(-logits))
    else:  # the last class is "nothing"
        shares = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        shares = (shares / shares.sum(axis=1, keepdims=True))[:, :-1]
    classes = shares.argmax(axis=1)
    return _Boxes(boxes, shares[np.arange(len(shares)), classes], classes)


def _read_ssd_scores(arrays: Arrays, _labels: int) -> _Boxes:
    boxes, shares = arrays[0], arrays[1][:, 1:]  # the first class is the background
    classes = shares.argmax(axis=1)
    return _Boxes(boxes, shares[np.arange(len(shares)), classes], classes)


_SCORES, _CLASSES = ("score", "conf", "prob"), ("class", "label")
# By the parameter `decoder`.
_DECODERS: Mapping[str, _Decoder] = {
    "yolo": _Decoder(
        _yolo, _read_yolo, "cxcywh", False, True, "one output [4+classes,N], as of YOLOv8 and 11"
    ),
    "yolo_objectness": _Decoder(
        _yolo_objectness,
        _read_yolo_objectness,
        "cxcywh",
        False,
        True,
        "one output [N,5+classes], as of YOLOv5 and v7",
    ),
    "rows": _Decoder(
        _rows,
        _read_rows,
        "xyxy",
        False,
        False,
        "one output [N,6] of x_min, y_min, x_max, y_max, score, class, as of YOLOv10",
    ),
    "ssd": _Decoder(
        lambda config, _: _boxes_and(config, (_SCORES, _CLASSES), 1),
        lambda arrays, _: _Boxes(arrays[0], arrays[1], arrays[2]),
        "yxyx",
        True,
        False,
        "outputs boxes [N,4], scores [N] and classes [N], as of TensorFlow's SSD",
    ),
    "ssd_scores": _Decoder(
        lambda config, _: _boxes_and(config, (_SCORES,), 2),
        _read_ssd_scores,
        "xyxy",
        True,
        True,
        "outputs boxes [N,4] and scores [N,1+classes]",
    ),
    "detr": _Decoder(
        lambda config, _: _boxes_and(config, (("logit",),), 2),
        _read_detr,
        "cxcywh",
        True,
        False,
        "outputs boxes [N,4] and logits [N,classes] or [N,classes+1]",
    ),
}


def _find_detection(config: ModelConfig) -> _Found:
    labels = labels_of(config)
    named = config.parameters.get("decoder", "")
    if named and named not in _DECODERS:
        raise ModelConfigError(
            f"model '{config.name}': parameter 'decoder' is '{named}'; it is one of "
            f"{', '.join(_DECODERS)}"
        )
    fitting = {
        name: outputs
        for name, each in _DECODERS.items()
        if named in ("", name) and (outputs := each.outputs(config, len(labels)))
    }
    if not fitting:
        wanted = [each.wants for name, each in _DECODERS.items() if named in ("", name)]
        raise _unfit(
            config, "detection", f"with {len(labels)} labels it wants {', or '.join(wanted)}"
        )
    if len(fitting) > 1:
        raise ModelConfigError(
            f"model '{config.name}': several decoders fit its outputs, {', '.join(fitting)}; "
            "choose one with the parameter 'decoder'"
        )
    ((name, outputs),) = fitting.items()
    decoder = _DECODERS[name]
    coordinates = config.parameters.get("boxes", decoder.coordinates)
    if coordinates not in _ORDERS:
        raise ModelConfigError(
            f"model '{config.name}': parameter 'boxes' is '{coordinates}'; it is one of "
            f"{', '.join(_ORDERS)}"
        )
    least_score = _number(config, "score_threshold", 0.25)
    overlap = _number(config, "nms_threshold", 0.45 if decoder.overlaps else 0.0)

    def read(arrays: Arrays, view: View) -> Detections:
        for spec, array in zip(outputs, arrays, strict=True):
            if array.ndim != len(spec.shape):
                raise BadOutput(
                    "shape",
                    f"output '{spec.name}' has {shape_text(array.shape)}, not {_spec(spec)}",
                )
        counts = {array.shape[0] for array in arrays} if len(arrays) > 1 else {0}
        if len(counts) > 1:
            sizes = ", ".join(f"'{s.name}' {len(a)}" for s, a in zip(outputs, arrays, strict=True))
            raise BadOutput("shape", f"as many boxes as scores were wanted, and there are {sizes}")
        found = decoder.read(arrays, len(labels))
        picked = _candidates(found, least_score, len(labels))
        boxes = _in_picture(picked.boxes, _ORDERS[coordinates], view, unit=decoder.unit)
        return _detections(picked._replace(boxes=boxes), overlap, labels, view)

    return tuple(each.name for each in outputs), read


_ORDERS = {"xyxy": (0, 1, 2, 3), "yxyx": (1, 0, 3, 2), "cxcywh": ()}


def _candidates(found: _Boxes, least_score: float, labels: int) -> _Boxes:
    """Return the candidates with enough score, once they are sound."""
    if not np.isfinite(found.scores).all():
        raise BadOutput("not_finite", "a score is NaN or infinite")
    rows = np.flatnonzero(found.scores >= least_score)
    if len(rows) > _MOST_CANDIDATES:
        raise BadOutput(
            "too_many",
            f"{len(rows)} boxes have a score of {least_score:g} or more, and {_MOST_CANDIDATES} "
            "can be; raise score_threshold",
        )
    boxes, scores = found.boxes[rows].astype(np.float64), found.scores[rows].astype(np.float64)
    classes = found.classes[rows].astype(np.float64)
    if not (np.isfinite(boxes).all() and np.isfinite(classes).all()):
        raise BadOutput("not_finite", "a box or a class is NaN or infinite")
    if len(rows) and (np.min(classes) < 0 or (labels and np.max(classes) >= labels)):
        raise BadOutput(
            "class",
            f"classes are {np.min(classes):g} to {np.max(classes):g}, and {labels} have labels",
        )
    if len(rows) and np.max(scores) > 1:
        raise BadOutput("score", f"a score is {np.max(scores):g}, and scores are 0 to 1")
    return _Boxes(boxes, scores, classes.astype(np.int64))


def _in_picture(
    boxes: NDArray[np.float64], order: Sequence[int], view: View, *, unit: bool
) -> NDArray[np.float64]:
    """Return x_min, y_min, x_max, y_max in px of the picture, cut at its edges."""
    if order:
        corners = boxes[:, list(order)]
    else:
        half = boxes[:, 2:] / 2
        corners = np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)
    scale = (view.region.width, view.region.height) if unit else view.step_px
    corners = corners * (scale * 2) + ((view.region.x, view.region.y) * 2)
    cut = np.clip(corners, 0.0, view.size * 2)
    if len(cut) and not ((cut[:, 2:] - cut[:, :2]) > 0).all():
        worst = corners[int(np.argmin((cut[:, 2:] - cut[:, :2]).min(axis=1)))]
        raise BadOutput(
            "outside",
            f"a box is {', '.join(f'{each:.0f}' for each in worst)} px in a picture of "
            f"{view.size[0]} x {view.size[1]} px: it is empty, or outside",
        )
    return cut


def _detections(found: _Boxes, overlap: float, labels: Sequence[str], view: View) -> Detections:
    order = np.argsort(-found.scores, kind="stable")
    if overlap and len(order):
        # OpenCV is not needed by a daemon without cameras.
        from edge_server.backends.vision.outlines import suppressed  # noqa: PLC0415

        order = suppressed(found.boxes, found.scores, found.classes, overlap)
    if len(order) > _MOST_DETECTIONS:
        raise BadOutput(
            "too_many", f"{len(order)} objects are found, and {_MOST_DETECTIONS} can be"
        )
    boxes = found.boxes[order]
    ground = covariance = None
    if view.camera is not None:
        ground, covariance = _feet(boxes, view.camera, view)
    return Detections(
        boxes,
        found.classes[order],
        found.scores[order],
        labels,
        ground=ground,
        covariance=covariance,
    )


def _feet(
    boxes: NDArray[np.float64], camera: CameraModel, view: View
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return where boxes stand on the road, (N, 2) m, and the covariance (N, 2, 2).

    An edge is known to a pixel of the network's input, or of the picture where that is larger. A
    box that reaches the lower edge of what the network saw has no foot there.
    """
    feet = np.stack([boxes[:, [0, 2]].mean(axis=1), boxes[:, 3]], axis=1)
    ground = camera.ground_of_rays(camera.lens.rays_of(feet))
    std_px = np.maximum(view.step_px, 1.0)
    scaled = ground.by_pixel * std_px
    covariance = scaled @ scaled.transpose(0, 2, 1)
    for by, std_rad in (
        (ground.by_pitch, view.pitch_std_rad),
        (ground.by_yaw, camera.mounting.yaw_std_rad),
    ):
        covariance += std_rad**2 * by[:, :, None] * by[:, None, :]
    cut = feet[:, 1] >= view.region.y + view.region.height - std_px[1]
    points = ground.points.copy()
    points[cut] = np.nan
    return points, covariance


def _find_segmentation(config: ModelConfig) -> _Found:
    labels = labels_of(config)
    wants = "one output [H,W] of classes, TYPE_INT32, INT64 or UINT8, or [classes,H,W] of scores"
    if len(config.outputs) != 1:
        raise _unfit(config, "segmentation", f"it wants {wants}")
    spec = config.outputs[0]
    scores = spec.datatype in _FLOATS and len(spec.shape) == 3
    named = config.parameters.get("task") == "segmentation"
    fits = scores and (spec.shape[0] in (-1, len(labels)) if labels else named)
    if not (fits or (spec.datatype.numpy.kind in "iu" and len(spec.shape) == 2)):
        raise _unfit(config, "segmentation", f"with {len(labels)} labels it wants {wants}")

    def read(arrays: Arrays, view: View) -> Segmentation:
        (array,) = arrays
        if array.ndim != len(spec.shape):
            raise BadOutput("shape", f"output '{spec.name}' has {shape_text(array.shape)}")
        if scores and not np.isfinite(array).all():
            raise BadOutput("not_finite", f"output '{spec.name}' has NaN or infinity")
        cells = array.argmax(axis=0) if scores else array
        rows, columns = cells.shape
        width, height = view.network
        if not rows or not columns or width % columns or height % rows:
            raise BadOutput(
                "shape",
                f"output '{spec.name}' is a mask of {columns} x {rows} cells; the network's input "
                f"of {width} x {height} px is no multiple of that",
            )
        least, most = int(np.min(cells)), int(np.max(cells))
        if least < 0 or (labels and most >= len(labels)):
            raise BadOutput("class", f"classes are {least} to {most} of {len(labels)} labels")
        return _segmentation(cells, labels, view)

    return (spec.name,), read


def _segmentation(cells: NDArray[Any], labels: Sequence[str], view: View) -> Segmentation:
    # OpenCV is not needed by a daemon without cameras.
    from edge_server.backends.vision.outlines import outlines  # noqa: PLC0415

    rows, columns = cells.shape
    flat = cells.reshape(-1).astype(np.int64)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(flat)) + 1])
    if len(starts) > _MOST_RUNS:
        raise BadOutput("too_many", f"the mask has {len(starts)} runs, and {_MOST_RUNS} can be")
    region = view.region
    step = np.array((region.width / columns, region.height / rows))
    # The middle of the first cell is half a cell from the edge.
    background = 0 if not labels or labels[0].lower() == "background" else -1
    found = [
        Polygon(int(value), (points + 0.5) * step + (region.x, region.y))
        for value in np.unique(flat[starts])
        if value != background
        for points in outlines(cells == value)
    ]
    found.sort(key=lambda each: -np.ptp(each.points, axis=0).prod())
    return Segmentation(
        region,
        (columns, rows),
        flat[starts],
        np.diff(np.append(starts, flat.size)),
        found[:_MOST_POLYGONS],
        labels,
    )


def _find_classification(config: ModelConfig) -> _Found:
    labels = labels_of(config)
    wants = "one output [classes] of scores, with as many labels"
    spec = config.outputs[0] if len(config.outputs) == 1 else None
    named = config.parameters.get("task") == "classification"
    if (
        spec is None
        or spec.datatype not in _FLOATS
        or len(spec.shape) != 1
        or not (spec.shape[0] in (-1, len(labels)) if labels else named)
    ):
        raise _unfit(config, "classification", f"with {len(labels)} labels it wants {wants}")
    best = int(_number(config, "top_k", 5.0, 100.0))
    kind = config.parameters.get("scores", "logits")
    if kind not in ("logits", "prob"):
        raise ModelConfigError(
            f"model '{config.name}': parameter 'scores' is '{kind}'; it is logits or prob"
        )

    def read(arrays: Arrays, _view: View) -> Classification:
        shares = arrays[0].astype(np.float64)
        if shares.ndim != 1 or (labels and len(shares) != len(labels)):
            raise BadOutput(
                "class",
                f"output '{spec.name}' has {shape_text(shares.shape)}, and there are "
                f"{len(labels)} labels",
            )
        if not np.isfinite(shares).all():
            raise BadOutput("not_finite", f"output '{spec.name}' has NaN or infinity")
        if kind == "logits" and len(shares):
            shares = np.exp(shares - np.max(shares))
            shares /= shares.sum()
        order = np.argsort(-shares, kind="stable")[:best]
        return Classification([(int(each), float(shares[each])) for each in order], labels)

    return (spec.name,), read


def _find_tensors(config: ModelConfig) -> _Found:
    names = tuple(each.name for each in config.outputs)

    def read(arrays: Arrays, _view: View) -> TensorList:
        return TensorList(
            [
                (spec.name, spec.datatype.name, array.shape)
                for spec, array in zip(config.outputs, arrays, strict=True)
            ]
        )

    return names, read


# In this order the first one that fits is taken; anything is a list of tensors.
_CONTRACTS: Mapping[Task, Callable[[ModelConfig], _Found]] = {
    "lanes": _find_lanes,
    "detection": _find_detection,
    "segmentation": _find_segmentation,
    "classification": _find_classification,
    "tensors": _find_tensors,
}
