"""The pictures that cameras show: short clips of a rendered road, raw or as JPEGs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cv2

from edge_server.tools.road.renderer import render
from edge_server.tools.road.scene import RoadScene

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Clip:
    """I420 pictures one after the other in a file."""

    path: Path
    width: int
    height: int


def road(
    width: int, height: int, *, pictures: int = 20, seed: int = 7, step_m: float = 1.5
) -> Iterator[NDArray[np.uint8]]:
    """Drive along a rendered road: (height, width, 3) uint8 BGR."""
    scene = RoadScene.for_camera(seed)
    for number in range(pictures):
        yield render(scene, number * step_m, width, height)[0]


def write_road(
    folder: Path, width: int = 640, height: int = 360, *, pictures: int = 30, seed: int = 7
) -> Clip:
    """Write a clip of a rendered road; BT.601, limited range."""
    path = folder / f"road-{seed}-{pictures}-{width}x{height}.i420"
    if not path.exists():
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            for image in road(width, height, pictures=pictures, seed=seed):
                file.write(cv2.cvtColor(image, cv2.COLOR_BGR2YUV_I420).tobytes())
        partial.rename(path)
    return Clip(path, width, height)


def jpegs(width: int = 640, height: int = 360, *, pictures: int = 20, seed: int = 7) -> list[bytes]:
    """Return a rendered road as JPEGs."""
    return [
        cv2.imencode(".jpg", image)[1].tobytes()
        for image in road(width, height, pictures=pictures, seed=seed)
    ]
