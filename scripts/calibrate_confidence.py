"""How true the lanes' confidence is, and the two parameters of lane_decode that make it truer.

    python scripts/calibrate_confidence.py \
        --labels LABELLED/labels.jsonl@88-109 --labels VAL/labels.jsonl [--write]

Confidence 0.9 shall mean that nine of ten such lanes are right: within TuSimple's threshold of a
labelled line on 85 % of its rows. Labels are frames that training never saw, `FILE` or
`FILE@FIRST-LAST` (lines from 0) with the images beside it. Of a drive (`raw_file` with a number),
frames within two seconds of one that is left out are left out, too: they look alike. Labels of
`kind` other than human do not count. Where a frame
is not `complete`, only the ego lane's lines count, on the sides that are labelled.

Prints the expected calibration error (ECE) as it is, and as it would be: fitted on one half of each
file and measured on the other, both ways. `--write` puts the parameters, fitted on all, into
lane_decode/config.pbtxt. Run it again for each network.

    python scripts/calibrate_confidence.py --data DIR [--rendered 160] [--write]

takes what training on this folder leaves out: it fits on held-out frames of the sources trained on,
and measures on the sources of which training sees nothing, too. `--rendered` fits on that many
rendered roads as well, of seeds that neither training nor evaluation draws: held-out frames are of
roads that training knows, where scores are higher than on others.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from evaluate_lane_model import (
    SHIPPED_MODELS,
    LabelError,
    hard_labels,
    held_out_labels,
    line_range,
    load_models,
    read_labels,
)
from lane_training.material import Material, MaterialError
from lane_training.tusimple import MATCH_ACCURACY, line_threshold_px

from edge_server.errors import EdgeServerError
from edge_server.gpu.device import Devices
from edge_server.lanes.decode import calibrated_confidence
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from evaluate_lane_model import Label
    from numpy.typing import NDArray

    from edge_server.inference.data_plane import DataPlane

_BINS = 15
_FEWEST_PER_BIN = 30
_DRAWS = 200
# Two seconds at 20 frames a second.
_NEAR_FRAMES = 40
RENDERED_SEED = 777_001
_KEYS = ("confidence_temperature", "confidence_bias")


@dataclass(frozen=True, eq=False)
class Lanes:
    """The detected lanes of one file of labels.

    Attributes:
        scores: (N,) the network's own.
        right: (N,) bool.
        half: (N,) 0 or 1: the first or second half of the file, so that neighbours stay together.
    """

    scores: NDArray[np.float64]
    right: NDArray[np.bool_]
    half: NDArray[np.int64]


def main() -> int:
    arguments = parse_arguments()
    config = arguments.model_repository / "lane_decode" / "config.pbtxt"
    devices = Devices()
    try:
        old = read_parameters(config.read_text())
        data_plane = load_models(arguments.model_repository, devices)
        parts = [
            detected(data_plane, arguments.model, *labels_of(path, chosen), old)
            for path, chosen in arguments.labels
        ]
        others = None
        if arguments.data:
            left_out = held_out_labels(arguments.data)
            unseen = {each.source for each in left_out} - sources_trained_on(arguments.data)
            known = [label for label in left_out if label.source not in unseen]
            parts.append(detected(data_plane, arguments.model, "held out", known, old))
            other = [label for label in left_out if label.source in unseen]
            name = ", ".join(sorted(unseen)) or "no other source"
            others = detected(data_plane, arguments.model, name, other, old)
        if arguments.rendered:
            roads = hard_labels(arguments.rendered, RENDERED_SEED)
            parts.append(detected(data_plane, arguments.model, "rendered roads", roads, old))
    except (EdgeServerError, LabelError, MaterialError, OSError) as error:
        print(f"calibrate_confidence: {error}", file=sys.stderr)
        return 1
    finally:
        devices.close()
    scores, right, half = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("scores", "right", "half")
    )
    if len(scores) < 2 * _FEWEST_PER_BIN or right.all() or not right.any():
        print("calibrate_confidence: too few lanes, or none is wrong", file=sys.stderr)
        return 1
    for name, parameters in (("network", (1.0, 0.0)), ("config", old)):
        print_row(name, calibrated_confidence(scores, *parameters), right)
    crossed = np.empty(len(scores))
    for fold in (0, 1):
        fitted = fit(scores[half != fold], right[half != fold])
        crossed[half == fold] = calibrated_confidence(scores[half == fold], *fitted)
    print_row("fitted, other half", crossed, right)
    new = fit(scores, right)
    print_row("fitted, all", calibrated_confidence(scores, *new), right)
    if others is not None and len(others.scores):
        for name, parameters in (("config", old), ("fitted", new)):
            confidence = calibrated_confidence(others.scores, *parameters)
            print_row(f"{name}, other cameras", confidence, others.right)
    print(f"confidence_temperature {new[0]:.3f}, confidence_bias {new[1]:.3f}")
    print_table(scores, calibrated_confidence(scores, *new), right)
    if arguments.write:
        config.write_text(with_parameters(config.read_text(), new))
        print(f"written to {config}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--labels",
        type=label_file,
        action="append",
        default=[],
        metavar="FILE[@FIRST-LAST]",
        help="JSON lines, images beside it; repeatable",
    )
    parser.add_argument("--data", type=Path, help="what training on this folder leaves out")
    parser.add_argument(
        "--rendered", type=int, default=0, metavar="COUNT", help="rendered roads to fit on, too"
    )
    parser.add_argument("--model-repository", type=Path, default=SHIPPED_MODELS)
    parser.add_argument("--model", default="lane_detection")
    parser.add_argument("--write", action="store_true", help="into lane_decode/config.pbtxt")
    arguments = parser.parse_args()
    if not (arguments.labels or arguments.data):
        parser.error("give --labels or --data")
    if arguments.rendered < 0:
        parser.error(f"--rendered {arguments.rendered}: give a number of roads")
    return arguments


def label_file(text: str) -> tuple[Path, range | None]:
    path, at, lines = text.partition("@")
    return Path(path), line_range(lines) if at else None


def sources_trained_on(folder: Path) -> set[str]:
    return {each.source for each in Material(folder).training}


def labels_of(path: Path, chosen: range | None) -> tuple[str, list[Label]]:
    """Return the name of a file, and the labels in it that count.

    Raises:
        LabelError, OSError: see `read_labels`; also for lines that are not chosen.
    """
    read_labels(path, None)
    every = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    lines = {line.get("image") or line["raw_file"]: line for line in map(json.loads, every)}
    # A network's labels prove nothing of a network.
    labels = [
        replace(label, folder=path.parent)
        for label in read_labels(path, chosen)
        if lines[label.image].get("kind", "human") == "human"
    ]
    return str(path), labels if chosen is None else far_from_left_out(labels, every)


def detected(
    data_plane: DataPlane, model: str, name: str, labels: list[Label], old: tuple[float, float]
) -> Lanes:
    """Return the lanes that the served ensemble finds in labelled frames."""
    rows: list[tuple[float, bool, int]] = []
    for place, label in enumerate(labels):
        half = int(2 * place >= len(labels))
        rows += [(score, right, half) for score, right in judged(data_plane, model, label)]
    published = np.array([row[0] for row in rows])
    # The served confidence, back to the network's own score.
    temperature, bias = old
    scores = calibrated_confidence(published, 1.0 / temperature, -bias * temperature)
    right, halves = ([row[index] for row in rows] for index in (1, 2))
    print(f"{name}: {len(labels)} frames, {len(rows)} lanes, {sum(right)} right")
    return Lanes(scores.astype(np.float64), np.array(right, bool), np.array(halves))


def far_from_left_out(labels: list[Label], every: list[str]) -> list[Label]:
    """Return the labels that are not within two seconds of a frame of the file left out."""
    numbers = {}
    for text in every:
        line = json.loads(text)
        found = re.findall(r"\d+", str(line.get("raw_file", "")).rpartition("/")[0])
        if found:
            numbers[line.get("image") or line["raw_file"]] = int(found[-1])
    kept = {label.image for label in labels}
    left_out = [number for image, number in numbers.items() if image not in kept]
    return [
        label
        for label in labels
        if all(abs(numbers.get(label.image, -(10**9)) - n) > _NEAR_FRAMES for n in left_out)
    ]


def judged(data_plane: DataPlane, model: str, label: Label) -> Iterator[tuple[float, bool]]:
    """Yield the confidence of each lane that can be judged, and whether it is right."""
    image = label.bgr()
    response = data_plane.infer(
        InferRequest(
            model,
            {"image": Tensor.of(image[np.newaxis])},
            outputs=("lane_points", "lane_scores"),
        )
    )
    points = response.outputs["lane_points"].array[0]
    scores = response.outputs["lane_scores"].array[0]
    x, y = (
        points[..., 0] / image.shape[1] * 1280,
        points[0, :, 1] / image.shape[0] * 720 if len(points) else np.empty(0),
    )
    lanes = [np.interp(-label.rows, -y[r >= 0], r[r >= 0], np.nan, np.nan) for r in x]
    feet = [foot_px(label.rows, lane) for lane in label.lanes]
    own = {-1: [f for f in feet if f <= 640], 1: [f for f in feet if f > 640]}
    found = [foot_px(label.rows, np.nan_to_num(lane, nan=-2.0)) for lane in lanes]
    for score, lane, foot in zip(scores, lanes, found, strict=True):
        side = -1 if foot <= 640 else 1
        if not label.complete:
            beside = [other for other in found if (other <= 640) == (side < 0)]
            nearest = min(beside, key=lambda other: abs(other - 640), default=foot)
            if not own[side] or foot != nearest:
                continue
        yield float(score), any(is_same(label.rows, lane, line) for line in label.lanes)


def foot_px(rows: NDArray[np.float64], lane: NDArray[np.float64]) -> float:
    """Return x where the lane's lower part leads to the bottom of the picture."""
    at = lane >= 0
    if at.sum() < 2:
        return -1e6
    lower = np.flatnonzero(at)[-max(2, int(at.sum()) // 2) :]
    slope, start = np.polyfit(rows[lower], lane[lower], 1)
    return float(slope * 720 + start)


def is_same(
    rows: NDArray[np.float64], lane: NDArray[np.float64], line: NDArray[np.float64]
) -> bool:
    """Return whether the lane is within TuSimple's threshold on 85 % of the line's rows."""
    labelled = line >= 0
    near = np.abs(lane - line)[labelled] < line_threshold_px(line, rows)
    return bool(near.mean() >= MATCH_ACCURACY)


def fit(scores: NDArray[np.float64], right: NDArray[np.bool_]) -> tuple[float, float]:
    """Return temperature and bias of the greatest likelihood, by Newton's method.

    A weak prior (slope 1 +- 1, bias 0 +- 3) keeps a few lanes from deciding.
    """
    sure = np.clip(scores, 1e-9, 1 - 1e-9)
    design = np.stack([np.log(sure / (1 - sure)), np.ones(len(scores))], axis=1)
    prior, centre = np.diag([1.0, 1 / 9]), np.array([1.0, 0.0])
    weights = centre.copy()
    for _ in range(200):
        chance = 1 / (1 + np.exp(-(design @ weights)))
        gradient = design.T @ (right - chance) - prior @ (weights - centre)
        hessian = (design * (chance * (1 - chance))[:, None]).T @ design + prior
        step = np.linalg.solve(hessian, gradient)
        # Far from the optimum a whole step would lead beyond it.
        weights += step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() < 1e-9:
            break
    # A confidence that falls with the score would turn the order round.
    slope = max(float(weights[0]), 1e-3)
    return 1.0 / slope, float(weights[1])


def bins_of(confidence: NDArray[np.float64]) -> list[NDArray[np.intp]]:
    """Return the indices of 15 bins of equal mass; of fewer bins where they would be small."""
    count = max(1, min(_BINS, len(confidence) // _FEWEST_PER_BIN))
    return [part for part in np.array_split(np.argsort(confidence), count) if len(part)]


def expected_calibration_error(confidence: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """Return the mean difference of confidence and share of right lanes, over equal masses."""
    gaps = [
        abs(confidence[part].mean() - right[part].mean()) * len(part)
        for part in bins_of(confidence)
    ]
    return float(sum(gaps) / len(confidence))


def print_row(name: str, confidence: NDArray[np.float64], right: NDArray[np.bool_]) -> None:
    sure = np.clip(confidence, 1e-9, 1 - 1e-9)
    nll = -np.mean(np.where(right, np.log(sure), np.log(1 - sure)))
    error = expected_calibration_error(confidence, right)
    # Few lanes differ from their probability by chance alone.
    rng = np.random.default_rng(0)
    draws = [
        expected_calibration_error(confidence, rng.random(len(right)) < confidence)
        for _ in range(_DRAWS)
    ]
    print(
        f"{name:20} ECE {error:.3f} (by chance alone {np.mean(draws):.3f})  "
        f"negative log likelihood {nll:.3f}"
    )


def print_table(
    scores: NDArray[np.float64], confidence: NDArray[np.float64], right: NDArray[np.bool_]
) -> None:
    print("   score  confidence  right  lanes")
    for part in bins_of(scores):
        print(
            f"{scores[part].mean():8.3f} {confidence[part].mean():11.3f} {right[part].mean():6.3f} "
            f"{len(part):6d}"
        )


def read_parameters(text: str) -> tuple[float, float]:
    """Return temperature and bias of a config.pbtxt; 1 and 0 where it has none."""
    values = []
    for key, default in zip(_KEYS, (1.0, 0.0), strict=True):
        found = re.search(rf'key: "{key}" value {{ string_value: "([^"]*)" }}', text)
        values.append(default if found is None else float(found[1]))
    return values[0], values[1]


def with_parameters(text: str, new: tuple[float, float]) -> str:
    """Return a config.pbtxt with these parameters, in place of those that it has."""
    kept = [line for line in text.splitlines() if not any(f'"{key}"' in line for key in _KEYS)]
    added = [
        f'parameters {{ key: "{key}" value {{ string_value: "{value:.3f}" }} }}'
        for key, value in zip(_KEYS, new, strict=True)
    ]
    return "\n".join([*kept, *added]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
