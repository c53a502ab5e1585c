"""Contracts: what a camera's network promises to return, found in its configuration, and how the
tensors of a response become boxes, masks or classes in px of the whole picture.

A network's `config.pbtxt` may name its contract, and how its tensors are to be read, in
`parameters`; docs/networks.md lists them. What a response has beyond its contract is an error with
a name, and nothing of that response is published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from edge_server.errors import ModelConfigError
from edge_server.lanes.types import Lane, lanes_from_rows
from edge_server.pipeline.box_decoders import find_detection
from edge_server.pipeline.lane_model import ImageInput, LaneTensors, check_lane_replacement
from edge_server.pipeline.perception import (
    Arrays,
    BadOutput,
    Classification,
    Found,
    NetworkView,
    Polygon,
    Result,
    Segmentation,
    Task,
    TensorList,
    labels_of,
    number_of,
    unfit,
)
from edge_server.tensors import DataType, shape_fits, shape_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from edge_server.model_config.config import ModelConfig


_MOST_RUNS = 200_000
_MOST_POLYGONS = 200
_FLOATS = (DataType.FP32, DataType.FP16)


@dataclass(frozen=True)
class Contract:
    """How the response of a network is read.

    Attributes:
        outputs: names of the tensors that `read` takes, in its order, and their declared shapes.
        read: returns what they mean.
    """

    task: Task
    outputs: Mapping[str, tuple[int, ...]]
    image: ImageInput
    read: Callable[[Arrays, NetworkView], Result]

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
                    shapes = {each.name: each.shape for each in config.outputs}
                    return Contract(name, {each: shapes[each] for each in outputs}, image, read)
        raise ModelConfigError("; ".join(faults))

    def result(self, tensors: Mapping[str, NDArray[Any]], view: NetworkView) -> Result:
        """Return what a response means.

        Raises:
            BadOutput: the response breaks the contract.
        """
        rows = (1,) if self.image.batched else ()
        arrays = []
        for name, shape in self.outputs.items():
            array = tensors[name]
            if not shape_fits(array.shape, (*rows, *shape)):
                raise BadOutput(
                    "shape",
                    f"output '{name}' has {shape_text(array.shape)}, not "
                    f"{shape_text((*rows, *shape))}",
                )
            arrays.append(array[0] if rows else array)
        # What overflows is not finite, and has a name.
        with np.errstate(all="ignore"):
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


def _task(config: ModelConfig, task: str) -> str:
    return f"model '{config.name}': parameter 'task' is '{task}', which"


def _find_lanes(config: ModelConfig) -> Found:
    tensors = LaneTensors.of(config)

    def read(arrays: Arrays, view: NetworkView) -> tuple[Lane, ...]:
        points, scores = arrays
        if len(points) != len(scores):
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


def _find_segmentation(config: ModelConfig) -> Found:
    labels = labels_of(config)
    wants = (
        "one output [H,W] of classes, TYPE_INT32, INT64 or UINT8, or [classes,H,W] of scores, or "
        "[1,H,W] of probabilities, 0 to 1, of the second of two classes"
    )
    if len(config.outputs) != 1:
        raise unfit(config, "segmentation", f"it wants {wants}")
    spec = config.outputs[0]
    scores = spec.datatype in _FLOATS and len(spec.shape) == 3
    named = config.parameters.get("task") == "segmentation"
    # A map of one class alone says nothing.
    channels = {1: (), 2: (-1, 1, 2)}.get(len(labels), (-1, len(labels)))
    fits = scores and (spec.shape[0] in channels if labels else named)
    if not (fits or (spec.datatype.numpy.kind in "iu" and len(spec.shape) == 2)):
        raise unfit(config, "segmentation", f"with {len(labels)} labels it wants {wants}")
    least_score = number_of(config, "score_threshold", 0.5)

    def read(arrays: Arrays, view: NetworkView) -> Segmentation:
        (array,) = arrays
        if scores and not np.isfinite(array).all():
            raise BadOutput("not_finite", f"output '{spec.name}' has NaN or infinity")
        rows, columns = array.shape[-2:]
        width, height = view.network
        if not array.size or width % columns or height % rows:
            raise BadOutput(
                "shape",
                f"output '{spec.name}' is a mask of {columns} x {rows} cells; the network's input "
                f"of {width} x {height} px is no multiple of that",
            )
        cells = array
        if scores and len(array) > 1:
            cells = array.argmax(axis=0)
        elif scores:
            if not 0 <= np.min(array) <= np.max(array) <= 1:
                raise BadOutput(
                    "score",
                    f"probabilities are {np.min(array):g} to {np.max(array):g}, and can be 0 to 1: "
                    "end the network with a sigmoid",
                )
            cells = (array[0] >= least_score).astype(np.int64)
        least, most = int(np.min(cells)), int(np.max(cells))
        if least < 0 or (labels and most >= len(labels)):
            raise BadOutput("class", f"classes are {least} to {most} of {len(labels)} labels")
        return _segmentation(cells, labels, view)

    return (spec.name,), read


def _segmentation(cells: NDArray[Any], labels: Sequence[str], view: NetworkView) -> Segmentation:
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


def _find_classification(config: ModelConfig) -> Found:
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
        raise unfit(config, "classification", f"with {len(labels)} labels it wants {wants}")
    best = int(number_of(config, "top_k", 5.0, 100.0))
    kind = config.parameters.get("scores", "logits")
    if kind not in ("logits", "prob"):
        raise ModelConfigError(
            f"model '{config.name}': parameter 'scores' is '{kind}'; it is logits or prob"
        )

    def read(arrays: Arrays, _view: NetworkView) -> Classification:
        shares = arrays[0].astype(np.float64)
        if labels and len(shares) != len(labels):
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


def _find_tensors(config: ModelConfig) -> Found:
    names = tuple(each.name for each in config.outputs)

    def read(arrays: Arrays, _view: NetworkView) -> TensorList:
        return TensorList(
            [
                (spec.name, spec.datatype.name, array.shape)
                for spec, array in zip(config.outputs, arrays, strict=True)
            ]
        )

    return names, read


# In this order the first one that fits is taken; anything is a list of tensors.
_CONTRACTS: Mapping[Task, Callable[[ModelConfig], Found]] = {
    "lanes": _find_lanes,
    "detection": find_detection,
    "segmentation": _find_segmentation,
    "classification": _find_classification,
    "tensors": _find_tensors,
}
