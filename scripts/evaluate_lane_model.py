"""How well the served ensemble sees lanes: TuSimple accuracy, FP, FN and F1 on labelled images.

    python scripts/evaluate_lane_model.py --labels labels.jsonl --images DIR [--frames 88-109]

Each image goes through the same door as a camera frame or a client's request. A label line is
TuSimple's: `image` (or `raw_file`), `h_samples`, `lanes` (x per row, -2 where absent), for a
1280x720 image.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from edge_server.errors import EdgeServerError, ModelConfigError
from edge_server.lanes.tusimple import ImageScore, lanes_at, score_image, summarise
from edge_server.repository.loader import RepositoryLoader
from edge_server.serving.data_plane import DataPlane
from edge_server.serving.registry import ModelRegistry
from edge_server.serving.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

SHIPPED_MODELS = Path(__file__).parent.parent / "models"


def main() -> int:
    arguments = parse_arguments()
    try:
        data_plane = load_models(arguments.model_repository)
        labels = read_labels(arguments.labels, arguments.frames)
        scores = {
            name: score_image(
                see_lanes(data_plane, arguments.model, arguments.images / name, rows), lanes, rows
            )
            for name, rows, lanes in labels
        }
    except (EdgeServerError, OSError) as error:
        print(f"evaluate_lane_model: {error}", file=sys.stderr)
        return 1
    report(scores, as_json=arguments.json)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--labels", type=Path, required=True, help="JSON lines, TuSimple's form")
    parser.add_argument("--images", type=Path, required=True, help="folder of the images")
    parser.add_argument("--frames", metavar="FIRST-LAST", help="lines of the label file, from 0")
    parser.add_argument("--model-repository", type=Path, default=SHIPPED_MODELS)
    parser.add_argument("--model", default="lane_detection")
    parser.add_argument("--json", action="store_true", help="one JSON object, images included")
    return parser.parse_args()


def load_models(repository: Path) -> DataPlane:
    registry = ModelRegistry()
    failed = RepositoryLoader(registry, [repository]).load_all()
    if failed:
        raise ModelConfigError("; ".join(entry.reason for entry in failed))
    return DataPlane(registry)


def read_labels(
    path: Path, frames: str | None
) -> list[tuple[str, NDArray[np.float64], NDArray[np.float64]]]:
    """(image name, rows, lanes) of each label line; lanes without a single point are left out."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    if frames is not None:
        first, _, last = frames.partition("-")
        lines = lines[int(first) : int(last or first) + 1]
    return [_label(line) for line in lines]


def _label(line: dict[str, Any]) -> tuple[str, NDArray[np.float64], NDArray[np.float64]]:
    rows = np.array(line["h_samples"], np.float64)
    lanes = np.array(line["lanes"], np.float64).reshape(-1, len(rows))
    return line.get("image") or line["raw_file"], rows, lanes[(lanes >= 0).any(axis=1)]


def see_lanes(
    data_plane: DataPlane, model: str, path: Path, rows: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(lanes, rows) x in px of the 1280-wide image, as the served ensemble sees `path`."""
    image = cv2.imread(str(path))
    if image is None:
        raise FileNotFoundError(f"{path}: no image that OpenCV can read")
    response = data_plane.infer(InferRequest(model, {"image": Tensor.of(image[np.newaxis])}))
    x = response.outputs["lane_points"].array[0, :, :, 0]
    return lanes_at(np.where(x < 0, np.nan, x / image.shape[1]).astype(np.float32), rows)


def report(scores: dict[str, ImageScore], *, as_json: bool) -> None:
    total = summarise(list(scores.values()))
    names = ("accuracy", "fp", "fn", "f1")
    values = (total.accuracy, total.false_positive, total.false_negative, total.f1)
    if as_json:
        images = {
            name: {"accuracy": s.accuracy, "fp": s.false_positive, "fn": s.false_negative}
            for name, s in scores.items()
        }
        print(json.dumps({**dict(zip(names, values, strict=True)), "images": images}))
        return
    for name, value in zip(names, values, strict=True):
        print(f"{name:10} {value:.4f}")
    accuracies = sorted(s.accuracy for s in scores.values())
    quartiles = np.percentile(accuracies, (0, 25, 50, 75, 100))
    print(f"{'images':10} {len(scores)}")
    print(f"{'per image':10} accuracy " + " ".join(f"{q:.3f}" for q in quartiles) + " (quartiles)")


if __name__ == "__main__":
    sys.exit(main())
