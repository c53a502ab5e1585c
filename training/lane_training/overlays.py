"""Pictures of what the model sees, for people: figures do not show a line on the verge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge_server.lanes.decode import ROW_COUNT
from edge_server.tools.road.renderer import render
from edge_server.tools.road.scene import RoadScene
from lane_training.anchors import INPUT_HEIGHT_PX
from lane_training.evaluate import Infer, decode, network_view
from lane_training.frames import (
    CLIP_TRAINING_SHARE,
    PEEK_FRAMES,
    TRAINING_STILLS,
    clip_frames,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.lanes.decode import DecodedLanes
    from lane_training.augment import Sample
    from lane_training.material import Material

COLOURS = ((60, 60, 255), (60, 220, 60), (255, 120, 40), (40, 220, 255), (255, 60, 220))
CLIP_STEP = 8
RENDERED_SEEDS = range(1000, 1008)


def held_out(material: Material | None) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Names and images that training never saw."""
    for seed in RENDERED_SEEDS:
        yield f"rendered_{seed}", render(RoadScene.for_camera(seed), 200.0)[0]
    if material is None:
        return
    for each in material.evaluation:
        yield each.path.stem, each.bgr()
    if (data := material.folder) is None:
        return
    for path in sorted((data / "stills").glob("*.jpg")):
        if not path.name.startswith(TRAINING_STILLS):
            yield path.stem, np.asarray(cv2.imread(str(path)), np.uint8)
    for path in sorted((data / "clips").glob("*.mp4")):
        images = clip_frames(path)
        first = int(np.ceil(CLIP_TRAINING_SHARE * len(images)))
        for number in range(first, len(images), CLIP_STEP):
            yield f"{path.stem}_{number:03d}", images[number]
    for number in PEEK_FRAMES:
        path = data / "labelled" / f"frame_{number:03d}.jpg"
        yield path.stem, np.asarray(cv2.imread(str(path)), np.uint8)


def draw(bgr: NDArray[np.uint8], lanes: DecodedLanes) -> NDArray[np.uint8]:
    """The image at 1280x720 with lanes and their scores."""
    width, height = 1280, 720
    picture = cv2.resize(bgr, (width, height))
    y = (1.0 - np.arange(ROW_COUNT) / (ROW_COUNT - 1)) * (height - 1)
    for x, score, colour in zip(lanes.x, lanes.scores, COLOURS, strict=False):
        present = ~np.isnan(x)
        points = np.stack((x[present] * width, y[present]), 1).round().astype(np.int32)
        cv2.polylines(picture, [points], False, colour, 2, cv2.LINE_AA)
        middle = points[len(points) // 2]
        place = (int(middle[0]), int(middle[1]))
        cv2.putText(picture, f"{score:.2f}", place, cv2.FONT_HERSHEY_SIMPLEX, 0.7, colour, 2)
    return np.asarray(picture, np.uint8)


def show_samples(path: Path, samples: Iterator[Sample], count: int = 24) -> None:
    """One picture of images as they are trained on: labelled lanes thick, uncertain ones thin."""
    tiles = []
    y = (INPUT_HEIGHT_PX * np.linspace(1.0, 0.0, ROW_COUNT)).astype(np.float64)
    for _, sample in zip(range(count), samples, strict=False):
        tile = sample.bgr.copy()
        for x, weight, colour in zip(sample.x_px, sample.lane_weight, COLOURS, strict=True):
            present = ~np.isnan(x)
            points = np.stack((x[present], y[present]), 1).round().astype(np.int32)
            cv2.polylines(tile, [points], False, colour, 2 if weight else 1, cv2.LINE_AA)
        kind = "all lines" if sample.complete else "own lane" if sample.own_lane else "some lines"
        cv2.putText(tile, kind, (8, 20), cv2.FONT_HERSHEY_SIMPLEX, 0.6, (255, 255, 255), 2)
        tiles.append(tile)
    cv2.imwrite(str(path), tiled(tiles, 4))


def tiled(pictures: list[NDArray[np.uint8]], columns: int) -> NDArray[np.uint8]:
    """Pictures of one size as one picture."""
    blank = np.zeros_like(pictures[0])
    padded = [*pictures, *[blank] * (-len(pictures) % columns)]
    rows = [cv2.hconcat(padded[i : i + columns]) for i in range(0, len(padded), columns)]
    return np.asarray(cv2.vconcat(rows), np.uint8)


def draw_curves(path: Path, curve: list[tuple[float, ...]], names: Sequence[str]) -> None:
    """The losses of a run over its steps, each by its own largest value; nothing of a short run."""
    if len(curve) < 2:
        return
    width, height, edge = 1000, 500, 40
    picture = np.full((height, width, 3), 255, np.uint8)
    points = np.array(curve, np.float64)
    steps = points[:, 0]
    x = edge + (width - 2 * edge) * (steps - steps[0]) / max(np.ptp(steps), 1.0)
    for place, (name, colour) in enumerate(zip(names, COLOURS, strict=False), 1):
        # The first steps would flatten the rest.
        most = np.percentile(points[:, place], 98) or 1.0
        y = height - edge - (height - 2 * edge) * np.clip(points[:, place] / most, 0, 1)
        outline = np.stack((x, y), 1).round().astype(np.int32)
        cv2.polylines(picture, [outline], False, colour, 2, cv2.LINE_AA)
        text = f"{name}: {points[-1, place]:.3f} at last, {most:.3f} at the top"
        cv2.putText(picture, text, (420, 30 + 25 * place), cv2.FONT_HERSHEY_SIMPLEX, 0.6, colour, 2)
    axis = f"step {steps[0]:g} to {steps[-1]:g}"
    cv2.putText(picture, axis, (edge, height - 12), cv2.FONT_HERSHEY_SIMPLEX, 0.6, (0, 0, 0), 1)
    cv2.imwrite(str(path), picture)


def write_overlays(folder: Path, material: Material | None, infer: Infer, threshold: float) -> int:
    """One PNG for every held-out image; returns their number."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for name, bgr in held_out(material):
        lanes = decode(infer(network_view(bgr)), threshold)
        cv2.imwrite(str(folder / f"{name}.png"), draw(bgr, lanes))
        count += 1
    return count
