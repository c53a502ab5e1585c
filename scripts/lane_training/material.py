"""What a run learns from and is measured on, beside rendered roads: labelled images of people's.

PyTorch is not needed to read it, nor to find out that something is missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from lane_training import frames
from lane_training.frames import RoadFrame, frame_from_polylines, polyline, read_jsonl

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Of the folder that the shipped network was trained on; `--data` names another of that layout.
FOLDER_LABELS = Path("labelled", "labels.jsonl")
FOLDER_FILES = (
    FOLDER_LABELS,
    Path("tusimple_geometry.jsonl.gz"),
    Path("clips", "teacher_labels.jsonl"),
    Path("stills", "teacher_labels.jsonl"),
)
WIDTH_PX, HEIGHT_PX = 1280, 720


class MaterialError(Exception):
    """The material cannot be used; the text names the file and the remedy."""


@dataclass(frozen=True)
class Labelled:
    """One labelled image, in its own pixels.

    Attributes:
        lanes: x of each lane at the rows `h_samples`, negative where it is absent.
    """

    path: Path
    lanes: list[list[float]]
    h_samples: list[float]

    def bgr(self) -> NDArray[np.uint8]:
        image = cv2.imread(str(self.path))
        if image is None:
            raise MaterialError(f"{self.path}: is no image that OpenCV can read")
        return np.asarray(image, np.uint8)

    def in_1280(self, shape: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Lanes and rows in a 1280x720 image, of one of that `shape`; absent stays negative."""
        lanes = np.array(self.lanes, np.float64).reshape(-1, len(self.h_samples))
        scaled = np.where(lanes >= 0, lanes * WIDTH_PX / shape[1], lanes)
        return scaled, np.array(self.h_samples, np.float64) * HEIGHT_PX / shape[0]


class TrainingImages(Sequence[RoadFrame]):
    """The labelled images as training takes them, each read when it is its turn."""

    def __init__(self, labelled: list[Labelled]) -> None:
        self._labelled = [each for each in labelled if _has_lane(each)]

    def __len__(self) -> int:
        return len(self._labelled)

    def __getitem__(self, index: Any) -> Any:
        each = self._labelled[index]
        bgr = each.bgr()
        lanes, rows = each.in_1280(bgr.shape)
        lines = [polyline(list(lane), list(rows)) for lane in lanes]
        size = (frames.FRAME_WIDTH_PX, frames.FRAME_HEIGHT_PX)
        small = cv2.resize(bgr, size, interpolation=cv2.INTER_AREA)
        return frame_from_polylines(np.asarray(small, np.uint8), lines)


@dataclass(frozen=True)
class Material:
    """Labelled images, and what goes with them.

    Attributes:
        folder: of the layout that the shipped network was trained on; None where `labels` are.
        labels: files of JSON lines in TuSimple's form.
        images: the folder that the paths in them begin in.
        held_out: the share of each label file, its last lines, that is measured on and never
            trained on.
    """

    folder: Path | None = None
    labels: tuple[Path, ...] = ()
    images: Path | None = None
    held_out: float = 0.2

    def require(self) -> None:
        """Raises: MaterialError: something is not there, or of another form."""
        if self.folder is not None:
            for file in FOLDER_FILES:
                if not (self.folder / file).is_file():
                    raise MaterialError(
                        f"{self.folder / file}: is missing; give a folder of the layout in "
                        "docs/training.md, or your own labels with --labels and --images"
                    )
        for each in (*self.training, *self.evaluation):
            if not each.path.is_file():
                raise MaterialError(
                    f"{each.path}: is missing; --images is the folder that the labels' paths "
                    "begin in"
                )
        if not TrainingImages(self.training) or not self.evaluation:
            raise MaterialError("too few labels: some to train on and some to measure on")

    @cached_property
    def training(self) -> list[Labelled]:
        return self._split[0]

    @cached_property
    def evaluation(self) -> list[Labelled]:
        return self._split[1]

    def geometries(self) -> list[RoadFrame]:
        """Roads that people labelled, without their images."""
        if self.folder is not None:
            return frames.geometries(self.folder)
        # Of the first image's size, as those of one camera are: reading all would take minutes.
        shape = self.training[0].bgr().shape
        roads = []
        for each in self.training:
            lanes, rows = each.in_1280(shape)
            road = frame_from_polylines(None, [polyline(list(x), list(rows)) for x in lanes])
            if len(road.x_px) >= 3:
                roads.append(road)
        return roads

    def identity(self) -> str:
        """The same for the same labels, wherever they lie."""
        digest = hashlib.sha256(f"{self.held_out if self.labels else ''}".encode())
        files = self.labels or tuple(self.folder / each for each in FOLDER_FILES if self.folder)
        for file in files:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()

    def names(self) -> tuple[str, str]:
        """What is trained on and what is measured on, for a model card."""
        if self.folder is not None:
            return "human labels, frames 0-83", "human labels, frames 88-109"
        files = ", ".join(path.name for path in self.labels)
        shown = f"{100 * self.held_out:g} %"
        return (
            f"{len(self.training)} labelled images of {files}",
            f"{len(self.evaluation)} labelled images of {files}, the last {shown} of each",
        )

    @cached_property
    def _split(self) -> tuple[list[Labelled], list[Labelled]]:
        if self.folder is not None:
            read = _read_labels(self.folder / FOLDER_LABELS, self.folder / "labelled")
            return (
                [read[number] for number in frames.TRAINING_FRAMES],
                [read[number] for number in frames.EVALUATION_FRAMES],
            )
        training, evaluation = [], []
        for path in self.labels:
            read = _read_labels(path, self.images or path.parent)
            # Neighbours of a drive look alike: a random choice would measure what was learnt.
            first = round(len(read) * (1.0 - self.held_out))
            training += read[:first]
            evaluation += read[first:]
        return training, evaluation


def identity_of(material: Material | None) -> str:
    """What a checkpoint remembers; rendered roads alone have a name of their own."""
    return "rendered roads" if material is None else material.identity()


def _read_labels(path: Path, images: Path) -> list[Labelled]:
    """Raises: MaterialError: it cannot be read, or a line of it is no label."""
    try:
        records = read_jsonl(path)
    except (OSError, ValueError) as error:
        raise MaterialError(f"{path}: no labels can be read from it: {error}") from error
    labelled = []
    for number, record in enumerate(records, 1):
        try:
            name = record.get("raw_file") if record.get("image") is None else record["image"]
            lanes = [[float(x) for x in lane] for lane in record["lanes"]]
            rows = [float(y) for y in record["h_samples"]]
            fits = all(len(lane) == len(rows) for lane in lanes) and rows == sorted(rows)
        except (AttributeError, KeyError, TypeError, ValueError):
            name, fits = None, False
        if not isinstance(name, str) or not fits:
            raise MaterialError(
                f"{path}:{number}: is no label; give "
                '{"raw_file": PATH, "h_samples": [y, ...], "lanes": [[x, ...], ...]}, rows '
                "downwards and an x for each, -2 where there is no lane"
            )
        labelled.append(Labelled(images / name, lanes, rows))
    return labelled


def _has_lane(each: Labelled) -> bool:
    return any(sum(x >= 0 for x in lane) > 1 for lane in each.lanes)


def name_of(material: Material | None) -> str:
    """For a person, what a run learns from beside rendered roads."""
    return "rendered roads alone" if material is None else material.names()[0]
