"""How well the served ensemble sees lanes, by source: TuSimple's figures, and the own lane's lines.

    python training/evaluate_lane_model.py --labels labels.jsonl [--images DIR] [--frames 88-109]
    python training/evaluate_lane_model.py --data DIR --hard 500 --gallery worst.png

Each image goes through the same door as a camera frame or a client's request. A label line is
TuSimple's: `image` (or `raw_file`), `h_samples`, `lanes` (x per row, -2 where absent), for a
1280x720 image. Where it says `"complete": false`, only the lines of the own lane count, and nothing
counts as false. `--data` takes a folder that training takes, and measures what training never sees.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cv2
import numpy as np
from lane_training.evaluate import H_SAMPLES, Found, measured
from lane_training.evaluate import found as found_share
from lane_training.material import Material, MaterialError
from lane_training.overlays import tiled
from lane_training.roads import hard_roads, render_road
from lane_training.tusimple import (
    ImageScore,
    lanes_at,
    lines_hit,
    own_lines,
    score_image,
    summarise,
)

from edge_server.errors import EdgeServerError, ModelConfigError
from edge_server.gpu.device import Devices
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelRegistry
from edge_server.lifecycle.build import Build
from edge_server.lifecycle.lifecycle import ModelLifecycle
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.records import ModelTable
from edge_server.model_config.config import Completion
from edge_server.repository.scan import Repositories
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

SHIPPED_MODELS = Path(__file__).parent.parent / "models"
HARD_SEED = 910_001
GALLERY_ROW = 5
GREEN, RED = (60, 220, 60), (60, 60, 255)


class LabelError(Exception):
    """The label file cannot be used; the text names file and line."""


@dataclass(frozen=True, eq=False)
class Label:
    """One image's lanes: x in px, (lanes, rows), negative where absent, at the rows' y in px.

    Attributes:
        image: its name.
        folder: where the name begins; None for a picture that is no file.
        source: the camera that it is of.
        complete: every line is labelled.
        picture: (720, 1280, 3) uint8 BGR, where it is no file.
    """

    image: str
    rows: NDArray[np.float64]
    lanes: NDArray[np.float64]
    folder: Path | None = None
    source: str = ""
    complete: bool = True
    picture: NDArray[np.uint8] | None = None

    def bgr(self) -> NDArray[np.uint8]:
        """Raises: FileNotFoundError: it is no image."""
        if self.picture is not None:
            return self.picture
        path = (self.folder or Path()) / self.image
        image = cv2.imread(str(path))
        if image is None:
            raise FileNotFoundError(f"{path}: no image that OpenCV can read")
        return np.asarray(image, np.uint8)


class Result(NamedTuple):
    """What became of one image: lanes that were seen at the label's rows, and their score."""

    label: Label
    seen: NDArray[np.float64]
    score: ImageScore
    found: int
    lines: int


def main() -> int:
    arguments = parse_arguments()
    devices = Devices()
    try:
        labels = chosen_labels(arguments)
        data_plane = load_models(arguments.model_repository, devices)
        results = [examine(data_plane, arguments.model, label) for label in labels]
    except (EdgeServerError, LabelError, MaterialError, OSError) as error:
        print(f"evaluate_lane_model: {error}", file=sys.stderr)
        return 1
    finally:
        devices.close()
    report(results, as_json=arguments.json)
    if arguments.gallery:
        draw_worst(arguments.gallery, results)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--labels",
        type=Path,
        action="append",
        default=[],
        help="JSON lines, TuSimple's form; repeatable",
    )
    parser.add_argument("--images", type=Path, help="folder of the images; else the labels'")
    parser.add_argument(
        "--frames", type=line_range, metavar="FIRST-LAST", help="labels of each file, from 0"
    )
    parser.add_argument("--data", type=Path, help="what training on this folder never sees")
    parser.add_argument(
        "--hard",
        type=int,
        default=0,
        metavar="COUNT",
        help="so many rendered roads at night, in rain, in tight bends and at forks",
    )
    parser.add_argument("--model-repository", type=Path, default=SHIPPED_MODELS)
    parser.add_argument("--model", default="lane_detection")
    parser.add_argument("--json", action="store_true", help="one JSON object, images included")
    parser.add_argument(
        "--gallery", type=Path, metavar="PNG", help="the worst images of each source in one picture"
    )
    arguments = parser.parse_args()
    if not (arguments.labels or arguments.data or arguments.hard > 0):
        parser.error("give --labels, --data or --hard")
    return arguments


def chosen_labels(arguments: argparse.Namespace) -> list[Label]:
    """Raises: LabelError, MaterialError, OSError: labels that cannot be read."""
    labels = []
    for path in arguments.labels:
        labels += [
            replace(label, folder=arguments.images or path.parent)
            for label in read_labels(path, arguments.frames)
        ]
    if arguments.data:
        labels += held_out_labels(arguments.data)
    return [*labels, *hard_labels(arguments.hard)]


def held_out_labels(folder: Path) -> list[Label]:
    """Raises: MaterialError: the folder is not one that training takes."""
    material = Material(folder)
    material.require()
    labels = []
    for each in material.evaluation:
        lanes, rows = each.in_1280(each.bgr().shape)
        seen = lanes[(lanes >= 0).any(axis=1)]
        if len(seen):
            place = each.path.name, rows, seen, each.path.parent
            labels.append(Label(*place, each.source, each.complete))
    return labels


def hard_labels(count: int, seed: int = HARD_SEED) -> list[Label]:
    """Rendered roads of seeds that training does not draw."""
    labels = []
    for number, (condition, scene, distance_m) in enumerate(hard_roads(count, seed)):
        picture, lines = render_road(scene, distance_m, 1280, 720)
        lanes = [np.interp(H_SAMPLES, line[::-1, 1], line[::-1, 0], -2.0, -2.0) for line in lines]
        x = np.where((np.array(lanes) < 1280) & (np.array(lanes) >= 0), lanes, -2.0)
        x = x.reshape(-1, len(H_SAMPLES))
        x = x[(x >= 0).sum(axis=1) > 1]
        if len(x):
            source = f"rendered {condition}"
            name = f"{condition} {number}"
            labels.append(Label(name, H_SAMPLES, x, source=source, picture=picture))
    return labels


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
        ModelLifecycle(ModelTable(registry), Build(devices=devices)),
        Repositories([repository]),
        completion=Completion(gpus=devices.count, no_gpu=devices.reason),
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
    return Label(
        image,
        rows,
        lanes[(lanes >= 0).any(axis=1)],
        source=str(line.get("source", "")),
        complete=bool(line.get("complete", True)),
    )


def examine(data_plane: DataPlane, model: str, label: Label) -> Result:
    """Score one image as the served ensemble sees it."""
    image = label.bgr()
    request = InferRequest(model, {"image": Tensor.of(image[np.newaxis])}, outputs=("lane_points",))
    response = data_plane.infer(request)
    x = response.outputs["lane_points"].array[0, :, :, 0]
    share = np.where(x < 0, np.nan, x / image.shape[1]).astype(np.float32)
    seen = lanes_at(share, label.rows)
    # People who label only the own lane's lines say so, and have chosen them.
    lines = own_lines(label.lanes, label.rows) if label.complete else label.lanes
    found = int(lines_hit(seen, lines, label.rows).sum())
    return Result(label, seen, score_image(seen, label.lanes, label.rows), found, len(lines))


def by_source(results: list[Result]) -> dict[str, list[Result]]:
    sources: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.label.source):
        sources.setdefault(result.label.source, []).append(result)
    return sources


def own_lane(results: list[Result]) -> Found | None:
    pairs = [(result.found, result.lines) for result in results if result.lines]
    return found_share(pairs) if pairs else None


def report(results: list[Result], *, as_json: bool) -> None:
    complete = [result for result in results if result.label.complete]
    names = ("accuracy", "fp", "fn", "f1")
    values: tuple[float, ...] = ()
    if complete:
        total = summarise([result.score for result in complete])
        values = (total.accuracy, total.false_positive, total.false_negative, total.f1)
    if as_json:
        images = [
            {
                "image": result.label.image,
                "source": result.label.source,
                "own_lines": result.lines,
                "own_lines_found": result.found,
                **(
                    {
                        "accuracy": result.score.accuracy,
                        "fp": result.score.false_positive,
                        "fn": result.score.false_negative,
                    }
                    if result.label.complete
                    else {}
                ),
            }
            for result in results
        ]
        print(json.dumps({**dict(zip(names, values, strict=False)), "images": images}))
        return
    for name, value in zip(names, values, strict=False):
        print(f"{name:10} {value:.4f}")
    print(f"{'images':10} {len(results)}")
    print("\n95 % intervals by drawing images anew; own lane: share of its labelled lines found")
    print(f"{'source':20} images  own lane               accuracy               F1")
    for source, members in by_source(results).items():
        known = own_lane(members)
        row = [f"{source or '-':20} {len(members):6d}  "]
        row.append(with_interval(known.share, known.interval) if known else f"{'-':23}")
        scores = [member.score for member in members if member.label.complete]
        if scores:
            whole = measured(scores)
            row.append(with_interval(whole.score.accuracy, whole.accuracy_interval))
            row.append(with_interval(whole.score.f1, whole.f1_interval))
        print("".join(row).rstrip())


def with_interval(value: float, interval: tuple[float, float]) -> str:
    return f"{value:.3f} ({interval[0]:.3f}-{interval[1]:.3f})  "


def draw_worst(path: Path, results: list[Result]) -> None:
    """Draw the worst images of each source: labels green, what was seen red."""
    tiles = []
    for source, members in by_source(results).items():
        ranked = sorted(members, key=lambda m: (m.found / max(m.lines, 1), m.score.accuracy))
        tiles += [draw(source, result) for result in ranked[:GALLERY_ROW]]
        tiles += [np.zeros_like(tiles[0])] * (-len(tiles) % GALLERY_ROW)
    # OpenCV says nothing where it cannot write.
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), tiled(tiles, GALLERY_ROW))


def draw(source: str, result: Result) -> NDArray[np.uint8]:
    tile = cv2.resize(result.label.bgr(), (1280, 720))
    for lanes, colour, width in ((result.label.lanes, GREEN, 7), (result.seen, RED, 3)):
        for lane in lanes:
            points = np.stack((lane, result.label.rows), axis=1)[lane >= 0].round()
            cv2.polylines(tile, [points.astype(np.int32)], False, colour, width, cv2.LINE_AA)
    text = f"{source} {result.label.image}: {result.found} of {result.lines}"
    cv2.putText(tile, text, (12, 36), cv2.FONT_HERSHEY_SIMPLEX, 1.1, (255, 255, 255), 3)
    return np.asarray(cv2.resize(tile, (426, 240), interpolation=cv2.INTER_AREA), np.uint8)


if __name__ == "__main__":
    sys.exit(main())
