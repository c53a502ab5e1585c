"""Pictures of what the model sees, for people: figures do not show a line on the verge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge_server.cameras.synthetic.road_renderer import render
from edge_server.cameras.synthetic.road_scene import RoadScene
from edge_server.lanes.decode import ROW_COUNT
from lane_training.evaluate import Infer, decode, network_view
from lane_training.frames import (
    CLIP_TRAINING_SHARE,
    PEEK_FRAMES,
    TRAINING_STILLS,
    clip_frames,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.lanes.decode import DecodedLanes
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


def write_overlays(folder: Path, material: Material | None, infer: Infer, threshold: float) -> int:
    """One PNG for every held-out image; returns their number."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for name, bgr in held_out(material):
        lanes = decode(infer(network_view(bgr)), threshold)
        cv2.imwrite(str(folder / f"{name}.png"), draw(bgr, lanes))
        count += 1
    return count
