"""The contract `detection`: how tensors of detectors become boxes in px of the whole picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from edge_server.errors import ModelConfigError
from edge_server.pipeline.perception import (
    Arrays,
    BadOutput,
    Detections,
    Found,
    NetworkView,
    labels_of,
    number_of,
    unfit,
)
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from edge_server.lanes.camera_model import CameraModel
    from edge_server.model_config.config import ModelConfig
    from edge_server.tensors import TensorSpec

# A network that finds more is broken, or its threshold is: suppression takes the square of that.
_MOST_CANDIDATES = 10_000
_MOST_DETECTIONS = 1_000
_FLOATS = (DataType.FP32, DataType.FP16)


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
    _check_classes(logits, 1 if labels == 1 else 2)
    if labels and logits.shape[1] == labels:  # each class by itself, as of RT-DETR
        shares = 1 / (1 + np.exp(-logits))
    else:  # the last class is "nothing"
        shares = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        shares = (shares / shares.sum(axis=1, keepdims=True))[:, :-1]
    classes = shares.argmax(axis=1)
    return _Boxes(boxes, shares[np.arange(len(shares)), classes], classes)


def _check_classes(scores: NDArray[Any], fewest: int) -> None:
    if scores.shape[1] < fewest:
        raise BadOutput("shape", f"there are {scores.shape[1]} scores for each box, not {fewest}")


def _read_ssd_scores(arrays: Arrays, _labels: int) -> _Boxes:
    _check_classes(arrays[1], 2)
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


def find_detection(config: ModelConfig) -> Found:
    """Return the outputs of a detector, and what reads them.

    Raises:
        ModelConfigError: none, or several, of the decoders fit; the text says what they want.
    """
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
        raise unfit(
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
    least_score = number_of(config, "score_threshold", 0.25)
    overlap = number_of(config, "nms_threshold", 0.45 if decoder.overlaps else 0.0)

    def read(arrays: Arrays, view: NetworkView) -> Detections:
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
    boxes: NDArray[np.float64], order: Sequence[int], view: NetworkView, *, unit: bool
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


def _detections(
    found: _Boxes, overlap: float, labels: Sequence[str], view: NetworkView
) -> Detections:
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
    boxes: NDArray[np.float64], camera: CameraModel, view: NetworkView
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
