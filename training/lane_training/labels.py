"""Labels of road images as people write them: TuSimple's JSON lines, CULane's folders."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from lane_training.frames import read_jsonl

if TYPE_CHECKING:
    from numpy.typing import NDArray

WIDTH_PX, HEIGHT_PX = 1280, 720
CULANE_LINES = ".lines.txt"
CULANE_ROWS_PX = [float(y) for y in range(10, 600, 10)]
# Two seconds of TuSimple's 20 frames a second: nearer frames look alike.
NEAR_FRAMES = 40
_TUSIMPLE_PATH = re.compile(r"/(\d+)/\d+\.\w+$")


class MaterialError(Exception):
    """The material cannot be used; the text names the file and the remedy."""


@dataclass(frozen=True)
class Labelled:
    """One labelled image, in its own pixels.

    Attributes:
        lanes: x of each lane at the rows `h_samples`, negative where it is absent.
        source: the camera or drive that it is of.
        complete: every line that can be seen is labelled, up to its end.
        human: people labelled it.
        own_lane: `lanes` are both lines of the vehicle's own lane, and there is none between.
        uncertain: further lines that networks found: neither lanes nor background.
        order: numbers in the image's name; images of one drive are in this order.
        frame: number in its drive, of a TuSimple path `clips/DRIVE/NUMBER/20.jpg`; else None.
    """

    path: Path
    lanes: list[list[float]]
    h_samples: list[float]
    source: str = ""
    complete: bool = True
    human: bool = True
    own_lane: bool = False
    uncertain: tuple[list[float], ...] = ()
    order: tuple[int, ...] = ()
    frame: int | None = None

    @property
    def has_lane(self) -> bool:
        return any(sum(x >= 0 for x in lane) > 1 for lane in self.lanes)

    def bgr(self) -> NDArray[np.uint8]:
        image = cv2.imread(str(self.path))
        if image is None:
            raise MaterialError(f"{self.path}: is no image that OpenCV can read")
        return np.asarray(image, np.uint8)

    def in_1280(
        self, shape: tuple[int, ...], lanes: Any = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Lanes and rows in a 1280x720 image, of one of that `shape`; absent stays negative."""
        x = np.array(self.lanes if lanes is None else lanes, np.float64)
        x = x.reshape(-1, len(self.h_samples))
        scaled = np.where(x >= 0, x * WIDTH_PX / shape[1], x)
        return scaled, np.array(self.h_samples, np.float64) * HEIGHT_PX / shape[0]


def read_labels(path: Path, images: Path | None = None, source: str = "") -> list[Labelled]:
    """The labels of a file of JSON lines, or of a folder of CULane's; see docs/training.md.

    Args:
        images: the folder that the paths in a file begin in; the file's own if None.
        source: of images whose label does not name one; the file's name and drive if empty.

    Raises:
        MaterialError: it cannot be read, or a line of it is no label.
    """
    return _culane(path, source) if path.is_dir() else _json_lines(path, images, source)


def split(labelled: list[Labelled], held_out: float) -> tuple[list[Labelled], list[Labelled]]:
    """Training and evaluation images: of each source the end of its drive is held out.

    A random choice would measure what was learnt, as neighbours of a drive look alike; for the
    same reason images of a TuSimple drive within two seconds of a held-out one are in neither.
    Networks' labels are never measured on.
    """
    drives: dict[str, list[Labelled]] = defaultdict(list)
    training: list[Labelled] = []
    evaluation: list[Labelled] = []
    for each in labelled:
        if each.human:
            drives[each.source].append(each)
        else:
            training.append(each)
    for drive in drives.values():
        drive.sort(key=lambda each: (each.order, str(each.path)))
        first = round(len(drive) * (1.0 - held_out))
        kept, measured = drive[:first], drive[first:]
        if measured and measured[0].frame is not None:
            begin = measured[0].frame - NEAR_FRAMES
            kept = [each for each in kept if each.frame is None or each.frame < begin]
        training += kept
        evaluation += measured
    return training, evaluation


def _json_lines(path: Path, images: Path | None, source: str) -> list[Labelled]:
    try:
        records = read_jsonl(path)
    except (OSError, ValueError) as error:
        raise MaterialError(f"{path}: no labels can be read from it: {error}") from error
    labelled = []
    for number, record in enumerate(records, 1):
        try:
            drive = record.get("raw_file") or record["image"]
            name = record.get("image") or record["raw_file"]
            lanes = [[float(x) for x in lane] for lane in record["lanes"]]
            more = [[float(x) for x in lane] for lane in record.get("teacher_lanes", ())]
            rows = [float(y) for y in record["h_samples"]]
            fits = all(len(lane) == len(rows) for lane in (*lanes, *more)) and rows == sorted(rows)
            fits &= isinstance(name, str) and isinstance(drive, str)
        except (AttributeError, KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            raise MaterialError(
                f"{path}:{number}: is no label; give "
                '{"raw_file": PATH, "h_samples": [y, ...], "lanes": [[x, ...], ...]}, rows '
                "downwards and an x for each, -2 where there is no lane"
            )
        labelled.append(
            Labelled(
                path=(path.parent if images is None else images) / name,
                lanes=lanes,
                h_samples=rows,
                source=str(record.get("source") or source or _drive_of(path, drive)),
                complete=bool(record.get("complete", True)),
                human=record.get("kind", "human") == "human",
                own_lane=record.get("complete") is False and record.get("sides") == ["L", "R"],
                uncertain=tuple(more),
                order=tuple(int(digits) for digits in re.findall(r"\d+", drive)),
                frame=int(found[1]) if (found := _TUSIMPLE_PATH.search(drive)) else None,
            )
        )
    return labelled


def _drive_of(path: Path, raw_file: str) -> str:
    """Of TuSimple's `clips/DRIVE/NUMBER/20.jpg` the drive; else the label file is one."""
    parts = Path(raw_file).parts
    return f"{path.name}:{'/'.join(parts[:-2])}" if len(parts) > 2 else path.name


def _culane(folder: Path, source: str) -> list[Labelled]:
    """CULane's form: beside each image a text with one lane a line, `x y x y ...` upwards."""
    labelled = []
    for text in sorted(folder.rglob(f"*{CULANE_LINES}")):
        image = text.with_name(text.name.removesuffix(CULANE_LINES) + ".jpg")
        lanes = []
        for line in text.read_text(encoding="utf-8").splitlines():
            try:
                points = np.array(line.split(), np.float64).reshape(-1, 2)
            except ValueError as error:
                raise MaterialError(f"{text}: a line is not 'x y x y ...': {error}") from error
            if len(points) > 1:
                x, y = points[np.argsort(points[:, 1])].T
                lanes.append(np.interp(CULANE_ROWS_PX, y, x, -2.0, -2.0).tolist())
        order = tuple(int(digits) for digits in re.findall(r"\d+", image.stem))
        drive = source or str(image.parent.relative_to(folder.parent))
        labelled.append(Labelled(image, lanes, CULANE_ROWS_PX, drive, order=order))
    if not labelled:
        raise MaterialError(f"{folder}: no image's {CULANE_LINES} in it, as CULane has them")
    return labelled
