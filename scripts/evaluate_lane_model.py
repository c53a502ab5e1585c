"""How well the served ensemble sees lanes: TuSimple accuracy, FP, FN and F1 on labelled images.

    python scripts/evaluate_lane_model.py --labels labels.jsonl --images DIR [--frames 88-109]

Each image goes through the same door as a camera frame or a client's request. A label line is
TuSimple's: `image` (or `raw_file`), `h_samples`, `lanes` (x per row, -2 where absent), for a
1280x720 image.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from lane_training.tusimple import ImageScore, lanes_at, score_image, summarise

from edge_server.errors import EdgeServerError, ModelConfigError
from edge_server.gpu.devices import Devices
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelRegistry
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.model_table import ModelTable
from edge_server.model_config.config import Completion
from edge_server.repository.scan import Repositories
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

SHIPPED_MODELS = Path(__file__).parent.parent / "models"


class LabelError(Exception):
    """The label file cannot be used; the text names file and line."""


@dataclass(frozen=True, eq=False)
class Label:
    """One image's lanes: x in px, (lanes, rows), negative where absent, at the rows' y in px."""

    image: str
    rows: NDArray[np.float64]
    lanes: NDArray[np.float64]


def main() -> int:
    arguments = parse_arguments()
    devices = Devices()
    try:
        labels = read_labels(arguments.labels, arguments.frames)
        data_plane = load_models(arguments.model_repository, devices)
        scores = []
        for label in labels:
            path = arguments.images / label.image
            seen = see_lanes(data_plane, arguments.model, path, label.rows)
            scores.append((label.image, score_image(seen, label.lanes, label.rows)))
    except (EdgeServerError, LabelError, OSError) as error:
        print(f"evaluate_lane_model: {error}", file=sys.stderr)
        return 1
    finally:
        devices.close()
    report(scores, as_json=arguments.json)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--labels", type=Path, required=True, help="JSON lines, TuSimple's form")
    parser.add_argument("--images", type=Path, required=True, help="folder of the images")
    parser.add_argument(
        "--frames", type=line_range, metavar="FIRST-LAST", help="labels of the file, from 0"
    )
    parser.add_argument("--model-repository", type=Path, default=SHIPPED_MODELS)
    parser.add_argument("--model", default="lane_detection")
    parser.add_argument("--json", action="store_true", help="one JSON object, images included")
    return parser.parse_args()


def line_range(text: str) -> range:
    """`88-109`, both included, or `88`."""
    numbers = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    if numbers is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST-LAST, like 88-109")
    first, last = numbers.groups()
    return range(int(first), int(last or first) + 1)


def load_models(repository: Path, devices: Devices) -> DataPlane:
    registry = ModelRegistry()
    loader = RepositoryLoader(
        ModelTable(registry),
        Repositories([repository]),
        completion=Completion(gpus=devices.count, no_gpu=devices.reason),
        devices=devices,
    )
    failed = loader.load_all()
    if failed:
        raise ModelConfigError("; ".join(entry.reason for entry in failed))
    return DataPlane(registry)


def read_labels(path: Path, chosen: range | None) -> list[Label]:
    """The labels of `path`, or those of them whose place, from 0, is in `chosen`.

    Raises:
        LabelError: the file or a line of it is no label, or none is chosen.
        OSError: the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise LabelError(f"{path}: not UTF-8 text at byte {error.start}") from error
    places = [number for number, line in enumerate(lines) if line.strip()]
    if chosen is not None:
        places, all_places = places[chosen.start : chosen.stop], places
        if not places:
            raise LabelError(f"{path}: --frames chooses none of its {len(all_places)} labels")
    if not places:
        raise LabelError(f"{path}: no label in it")
    labels = []
    for place in places:
        try:
            labels.append(read_label(json.loads(lines[place])))
        except json.JSONDecodeError as error:
            raise LabelError(f"{path}:{place + 1}: not JSON: {error}") from error
        except LabelError as error:
            raise LabelError(f"{path}:{place + 1}: {error}") from error
    return labels


def read_label(line: Any) -> Label:
    """A label line's content; lanes without a single point are left out.

    Raises:
        LabelError: a key is missing, or its value is not what it should be.
    """
    if not isinstance(line, dict):
        raise LabelError("a label is a JSON object")
    image = line.get("image") or line.get("raw_file")
    if not isinstance(image, str):
        raise LabelError("'image' (or 'raw_file') is missing, or no name")
    for key in ("h_samples", "lanes"):
        if key not in line:
            raise LabelError(f"'{key}' is missing")
    try:
        rows = np.array(line["h_samples"], np.float64)
        lanes = np.array(line["lanes"] or np.empty((0, rows.size)), np.float64)
    except (TypeError, ValueError) as error:
        raise LabelError(f"'h_samples' and 'lanes' are lists of numbers: {error}") from error
    if rows.ndim != 1 or not rows.size or lanes.ndim != 2 or lanes.shape[1] != rows.size:
        raise LabelError("'lanes' has one x for each of 'h_samples', in every lane")
    return Label(image, rows, lanes[(lanes >= 0).any(axis=1)])


def see_lanes(
    data_plane: DataPlane, model: str, path: Path, rows: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(lanes, rows) x in px of the 1280-wide image, as the served ensemble sees `path`."""
    image = cv2.imread(str(path))
    if image is None:
        raise FileNotFoundError(f"{path}: no image that OpenCV can read")
    request = InferRequest(model, {"image": Tensor.of(image[np.newaxis])}, outputs=("lane_points",))
    response = data_plane.infer(request)
    x = response.outputs["lane_points"].array[0, :, :, 0]
    return lanes_at(np.where(x < 0, np.nan, x / image.shape[1]).astype(np.float32), rows)


def report(scores: list[tuple[str, ImageScore]], *, as_json: bool) -> None:
    total = summarise([score for _, score in scores])
    names = ("accuracy", "fp", "fn", "f1")
    values = (total.accuracy, total.false_positive, total.false_negative, total.f1)
    if as_json:
        images = [
            {"image": i, "accuracy": s.accuracy, "fp": s.false_positive, "fn": s.false_negative}
            for i, s in scores
        ]
        print(json.dumps({**dict(zip(names, values, strict=True)), "images": images}))
        return
    for name, value in zip(names, values, strict=True):
        print(f"{name:10} {value:.4f}")
    accuracies = sorted(score.accuracy for _, score in scores)
    quartiles = np.percentile(accuracies, (0, 25, 50, 75, 100))
    print(f"{'images':10} {len(scores)}")
    print(f"{'per image':10} accuracy " + " ".join(f"{q:.3f}" for q in quartiles) + " (quartiles)")


if __name__ == "__main__":
    sys.exit(main())
