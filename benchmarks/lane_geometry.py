"""What a calibration costs per frame: lanes on the road, and the paint along them.

    python benchmarks/lane_geometry.py [--repeats N]

Columns: the CPU time of one frame, the median of the repeats, which other programs on the machine
hardly change. `road` puts five lanes of 72 rows on the road, `paint` finds their paint, its
type and colour, `locate` is all that the camera's loop does with a frame of a calibrated camera.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from edge_server.cameras.calibration import Calibration
from edge_server.lanes.camera_model import CameraModel, Lens, Mounting
from edge_server.lanes.paint import on_paint
from edge_server.lanes.road_geometry import road_of
from edge_server.lanes.types import Lane, LaneFrame
from edge_server.pipeline.road_follower import LaneLocator
from edge_server.pixels import Image
from edge_server.tools.road.renderer import render
from edge_server.tools.road.scene import RoadScene

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, HEIGHT = 1280, 720
LENSES = {
    "pinhole": ("pinhole", (-0.24, -0.05, -0.001, 0.0001, 0.02)),
    "no distortion": ("pinhole", (0.0,) * 5),
    "fisheye": ("fisheye", (0.05, -0.01, 0.002, 0.0)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=300)
    repeats = parser.parse_args().repeats
    scene = RoadScene.for_camera(7)
    picture = Image.of_bgr(render(scene, 0.0)[0])
    focal = scene.camera.focal * WIDTH
    print(
        f"{'lens':14} {'lanes':>5} {'points':>6} {'road ms':>8} {'paint ms':>9} {'locate ms':>10}"
    )
    for name, (kind, distortion) in LENSES.items():
        lens = Lens(
            kind, WIDTH, HEIGHT, focal, focal, WIDTH / 2, scene.camera.horizon * HEIGHT, distortion
        )
        camera = CameraModel(lens, Mounting(scene.camera.height_m))
        lanes = tuple(lane for y in (-5.4, -1.8, 1.8, 5.4, 9.0) if (lane := lane_at(y, camera)))
        locator = LaneLocator(Calibration("x", camera))
        frame = LaneFrame("front", 0, 0, 0, 0, WIDTH, HEIGHT, "m", lanes=lanes)
        costs = [
            cpu_ms(work, repeats)
            for work in (
                lambda: road_of(lanes, camera),  # noqa: B023  # called in this round
                lambda: on_paint(lanes, picture, camera),  # noqa: B023  # likewise
                lambda: locator.locate(frame, picture),  # noqa: B023  # likewise
            )
        ]
        points = sum(len(lane.points) for lane in lanes)
        print(f"{name:14} {len(lanes):5} {points:6} " + " ".join(f"{ms:8.2f}" for ms in costs))


def lane_at(y_m: float, camera: CameraModel) -> Lane | None:
    x = np.linspace(2.5, 100.0, 4000)
    pixels = camera.image_of(np.stack([x, np.full_like(x, y_m)], axis=1))
    inside = (pixels >= 0).all(axis=1) & (pixels < (WIDTH, HEIGHT)).all(axis=1)
    pixels = pixels[inside]
    if len(pixels) < 2:
        return None
    rows = np.linspace(HEIGHT, 0, 72)
    rows = rows[(rows < pixels[0, 1]) & (rows > pixels[-1, 1])]
    columns = np.interp(-rows, -pixels[:, 1], pixels[:, 0])
    return Lane(np.stack([columns, rows], axis=1).astype(np.float32), 0.9)


def cpu_ms(work: Callable[[], object], repeats: int) -> float:
    spent = []
    for _ in range(repeats):
        begun = time.thread_time()
        work()
        spent.append(1e3 * (time.thread_time() - begun))
    return statistics.median(spent)


if __name__ == "__main__":
    main()
