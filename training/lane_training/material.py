"""What a run learns from and is measured on, beside rendered roads: labelled images of people's.

PyTorch is not needed to read it, nor to find out that something is missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cv2
import numpy as np

from lane_training import frames
from lane_training.frames import RoadFrame, frame_from_polylines, on_paint, polyline
from lane_training.labels import NEAR_FRAMES, Labelled, MaterialError, read_labels, split

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "Labelled",
    "Material",
    "MaterialError",
    "OwnLabels",
    "TrainingImages",
    "read_labels",
    "split",
]

# Of the folder that the shipped network was trained on; `--data` names another of that layout.
FOLDER_LABELS = Path("labelled", "labels.jsonl")
FOLDER_FILES = (
    FOLDER_LABELS,
    Path("tusimple_geometry.jsonl.gz"),
    Path("clips", "teacher_labels.jsonl"),
    Path("stills", "teacher_labels.jsonl"),
)
OTHER_TRAINING = Path("other_cameras", "train", "labels.jsonl")
OTHER_EVALUATION = Path("other_cameras", "val", "labels.jsonl")
# Of each camera in the folder: kept for measuring.
OTHER_HELD_OUT = 0.15
# The one source whose lines are all labelled counts more than its number of images.
FOLDER_WEIGHT = 6.0
# A network's labels.
MACHINE_WEIGHT = 0.5


class TrainingImages(Sequence[RoadFrame]):
    """The labelled images as training takes them, each read when it is its turn; their lines are
    moved onto their paint."""

    def __init__(self, labelled: Iterable[Labelled]) -> None:
        self._labelled = [each for each in labelled if each.has_lane]
        # Finding the paint takes longer than reading the image.
        self._on_paint: dict[int, RoadFrame] = {}

    def __len__(self) -> int:
        return len(self._labelled)

    @property
    def complete(self) -> bool:
        """Every image's label has every line."""
        return all(each.complete for each in self._labelled)

    def __getitem__(self, index: Any) -> Any:
        each = self._labelled[index]
        bgr = each.bgr()
        lanes, rows = each.in_1280(bgr.shape)
        uncertain, _ = each.in_1280(bgr.shape, each.uncertain)
        size = (frames.FRAME_WIDTH_PX, frames.FRAME_HEIGHT_PX)
        resized = np.asarray(cv2.resize(bgr, size, interpolation=cv2.INTER_AREA), np.uint8)
        if index in self._on_paint:
            return replace(self._on_paint[index], bgr=resized)
        frame = frame_from_polylines(
            resized,
            [polyline(list(lane), list(rows)) for lane in lanes],
            [polyline(list(lane), list(rows)) for lane in uncertain],
            weight=1.0 if each.human else MACHINE_WEIGHT,
            complete=each.complete,
            own_lane=each.own_lane,
        )
        frame = on_paint(frame)
        self._on_paint[index] = replace(frame, bgr=None)
        return frame


class Group(NamedTuple):
    """Training images of one source, and the share of the draws that it gets."""

    source: str
    share: float
    images: TrainingImages


@dataclass(frozen=True)
class OwnLabels:
    """One `--labels`: a file of JSON lines in TuSimple's form, or a folder of CULane's.

    Attributes:
        images: the folder that the paths in it begin in; where it lies if None.
        weight: how often its images are drawn, beside the root of their number.
    """

    labels: Path
    images: Path | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Material:
    """Labelled images, and what goes with them.

    Attributes:
        folder: of the layout that the shipped network was trained on; None where `own` are.
        own: labels of one's own.
        held_out: the share of each of their drives, its end, that is measured on and never trained
            on.
        left_out: sources that are measured on alone.
    """

    folder: Path | None = None
    own: tuple[OwnLabels, ...] = ()
    held_out: float = 0.2
    left_out: frozenset[str] = frozenset()

    def require(self) -> None:
        """Raises: MaterialError: something is not there, or of another form."""
        if self.folder is not None:
            for file in FOLDER_FILES:
                if not (self.folder / file).is_file():
                    raise MaterialError(
                        f"{self.folder / file}: is missing; give a folder of the layout in "
                        "docs/training.md, or your own labels with --labels and --images"
                    )
        sources = {each.source for each in (*self.training, *self.evaluation)}
        for name in self.left_out - sources:
            raise MaterialError(f"--leave-out {name}: no such source; there are {sorted(sources)}")
        for each in (*self.training, *self.evaluation):
            if not each.path.is_file():
                raise MaterialError(
                    f"{each.path}: is missing; --images is the folder that the labels' paths "
                    "begin in"
                )
        if not TrainingImages(self.training) or not self.evaluation:
            raise MaterialError("too few labels: some to train on and some to measure on")

    @property
    def training(self) -> list[Labelled]:
        return [each for each, _ in self._split[0]]

    @property
    def evaluation(self) -> list[Labelled]:
        return self._split[1]

    def groups(self) -> list[Group]:
        """The training images by source; shares come to 1."""
        found = []
        ordered = sorted(self._split[0], key=lambda pair: pair[0].source)
        for source, pairs in groupby(ordered, key=lambda pair: pair[0].source):
            members = list(pairs)
            images = TrainingImages(each for each, _ in members)
            if images:
                found.append((source, members[0][1] * len(images) ** 0.5, images))
        total = sum(weight for _, weight, _ in found)
        return [Group(source, weight / total, images) for source, weight, images in found]

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
            if len(road.x_px) >= 3 and each.complete:
                roads.append(road)
        return roads

    def identity(self) -> str:
        """The same for the same labels, wherever they lie, and the same use of them."""
        digest = hashlib.sha256(f"{self.held_out if self.own else ''}".encode())
        for each in self.own:
            digest.update(f"{each.weight} {len(read_labels(each.labels, each.images))}".encode())
            files = [each.labels] if each.labels.is_file() else sorted(each.labels.rglob("*.txt"))
            for file in files:
                digest.update(hashlib.sha256(file.read_bytes()).digest())
        if self.folder is not None:
            for name in (*FOLDER_FILES, OTHER_TRAINING):
                if (self.folder / name).is_file():
                    digest.update(hashlib.sha256((self.folder / name).read_bytes()).digest())
        digest.update(" ".join(sorted(self.left_out)).encode())
        return digest.hexdigest()

    def names(self) -> tuple[str, str]:
        """What is trained on and what is measured on, for a model card."""
        if self.folder is not None:
            others = [each for each in self.training if each.source != FOLDER_LABELS.parent.name]
            cameras = len({each.source for each in others})
            more = f", and {len(others)} frames of {cameras} other cameras" if others else ""
            without = f", without {', '.join(sorted(self.left_out))}" if self.left_out else ""
            measured = "human labels of every line, of frames 88-109 and held-out ones"
            return f"human labels, frames 0-83{more}{without}", measured
        files = ", ".join(each.labels.name for each in self.own)
        shown = f"{100 * self.held_out:g} %"
        return (
            f"{len(self.training)} labelled images of {files}",
            f"{len(self.evaluation)} labelled images of {files}, the last {shown} of each drive",
        )

    @cached_property
    def _split(self) -> tuple[list[tuple[Labelled, float]], list[Labelled]]:
        """Images to train on with their sources' weights, and images to measure on."""
        training: list[tuple[Labelled, float]] = []
        evaluation: list[Labelled] = []
        if self.folder is not None:
            read = read_labels(self.folder / FOLDER_LABELS, source=FOLDER_LABELS.parent.name)
            learnt = [read[number] for number in frames.TRAINING_FRAMES]
            training += [(each, FOLDER_WEIGHT) for each in learnt]
            # The file is not in the drive's order.
            times = np.array([each.frame for each in learnt], np.float64)
            later = [read[number] for number in frames.EVALUATION_FRAMES]
            gaps = [np.abs(times - np.float64(each.frame)).min() for each in later]
            evaluation += [e for e, gap in zip(later, gaps, strict=True) if not gap <= NEAR_FRAMES]
            if (self.folder / OTHER_TRAINING).is_file():
                kept, measured = split(read_labels(self.folder / OTHER_TRAINING), OTHER_HELD_OUT)
                training += [(each, 1.0) for each in kept]
                evaluation += measured
            if (self.folder / OTHER_EVALUATION).is_file():
                evaluation += read_labels(self.folder / OTHER_EVALUATION)
        for own in self.own:
            kept, measured = split(read_labels(own.labels, own.images), self.held_out)
            training += [(each, own.weight) for each in kept]
            evaluation += measured
        out = [each for each, _ in training if each.source in self.left_out]
        return (
            [pair for pair in training if pair[0].source not in self.left_out],
            [*evaluation, *(each for each in out if each.human)],
        )


def identity_of(material: Material | None) -> str:
    """What a checkpoint remembers; rendered roads alone have a name of their own."""
    return "rendered roads" if material is None else material.identity()


def name_of(material: Material | None) -> str:
    """For a person, what a run learns from beside rendered roads."""
    return "rendered roads alone" if material is None else material.names()[0]
