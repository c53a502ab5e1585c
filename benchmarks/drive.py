"""How well lanes on the road, tracking and warnings agree with the known truth of a rendered drive.

    python benchmarks/drive.py [--seeds 7,8] [--seconds 60] [--fps 15] [--true-lanes]
                               [--conditions night,rain]

Each frame goes through the shipped lane model (or, with --true-lanes, the renderer's own lines take
its place), then through the geometry alone and through geometry and tracking. The vehicle's speed
and yaw rate are known, as over `SetVehicleState`; --no-motion withholds them.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge_server.cameras.calibration import Calibration
from edge_server.gpu.device import Devices
from edge_server.lanes.camera_model import CameraModel, Lens, Mounting
from edge_server.lanes.departure import DepartureRule
from edge_server.lanes.road_geometry import road_of
from edge_server.lanes.types import Lane, LaneFrame, VehicleState, lanes_from_rows
from edge_server.pipeline.event_log import EventLog
from edge_server.pipeline.road_follower import LaneLocator, RoadEvents, RoadFollower
from edge_server.pipeline.vehicle import VehicleInputs
from edge_server.pixels import Image
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor
from edge_server.tools.road.renderer import SPEED_MPS, Drive, Truth, render
from edge_server.tools.road.scene import RoadScene
from edge_server.tools.road.variants import VARIANTS, varied

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from evaluate_lane_model import SHIPPED_MODELS, load_models

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from edge_server.lanes.types import Ego
    from edge_server.pipeline.event_log import Event

    Detect = Callable[[NDArray[np.uint8], list[NDArray[np.float32]]], tuple[Lane, ...]]

WIDTH, HEIGHT = 1280, 720
ROW_STEP_PX = 5
OTHER_LANE_CM = 100.0
# A warning belongs to a departure that begins so much later, or has not ended.
EARLY_S = 1.5


class Sample(NamedTuple):
    time_s: float
    truth: Truth
    alone: Ego
    tracked: Ego
    ids: tuple[int, int]  # of the ego lane's boundaries, 0 where there is none


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="7,8,9")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--fps", type=float, default=15.0)
    parser.add_argument("--true-lanes", action="store_true")
    parser.add_argument("--no-motion", action="store_true")
    parser.add_argument("--conditions", default="", help=f"some of {','.join(VARIANTS)}")
    arguments = parser.parse_args()
    arguments.conditions = tuple(filter(None, arguments.conditions.split(",")))
    for name in arguments.conditions:
        if name not in VARIANTS:
            parser.error(f"--conditions {name}: not one of {', '.join(VARIANTS)}")

    devices = Devices()
    try:
        detect = true_lanes if arguments.true_lanes else model_lanes(devices)
        for seed in map(int, arguments.seeds.split(",")):
            samples, events = drive(seed, arguments, detect)
            report(seed, samples, events, arguments.fps)
    finally:
        devices.close()
    return 0


def true_lanes(_: NDArray[np.uint8], lines: list[NDArray[np.float32]]) -> tuple[Lane, ...]:
    """Return the renderer's lines on every fifth row, as a network gives them."""
    lanes = []
    for line in lines:
        rows = np.arange(HEIGHT - 1, line[:, 1].min(), -ROW_STEP_PX)
        x = np.interp(rows, line[::-1, 1], line[::-1, 0])
        inside = (x >= 0) & (x < WIDTH)
        if inside.sum() > 1:
            lanes.append(Lane(np.stack((x, rows), axis=1)[inside].astype(np.float32), 1.0))
    return tuple(lanes)


def model_lanes(devices: Devices, models: Path = SHIPPED_MODELS) -> Detect:
    """Return what asks the model of a repository, the shipped one by default."""
    data_plane = load_models(models, devices)

    def detect(image: NDArray[np.uint8], _: object) -> tuple[Lane, ...]:
        request = InferRequest("lane_detection", {"image": Tensor.of(image[np.newaxis])})
        outputs = data_plane.infer(request).outputs
        points, scores = outputs["lane_points"].array, outputs["lane_scores"].array
        return lanes_from_rows(points[0], scores[0])

    return detect


def drive(
    seed: int, arguments: argparse.Namespace, detect: Detect
) -> tuple[list[Sample], list[Event]]:
    """Return each frame's truth and lanes, and the events of the drive."""
    scene = varied(RoadScene.for_camera(seed), arguments.conditions, seed)
    course = Drive(scene, manoeuvres=True)
    model = camera_of(scene)
    follower = Follower(model)
    follower.log.worker.start()
    samples = []
    for number in range(int(arguments.seconds * arguments.fps)):
        time_s = number / arguments.fps
        pose, after = course.pose(time_s), course.pose(time_s + 0.01)
        truth = course.truth(time_s)
        image, lines = render(scene, course.distance_m(time_s), WIDTH, HEIGHT, pose)
        lanes = detect(image, lines)
        # The vehicle turns with the road, and as it steers.
        yaw_rate = truth.curvature_1pm * SPEED_MPS
        yaw_rate += (after.heading_rad - pose.heading_rad) / 0.01
        motion = None if arguments.no_motion else (SPEED_MPS, yaw_rate)
        alone = road_of(lanes, model).ego
        followed = follower.follow(time_s, lanes, image, motion)
        assert followed.ego is not None
        by_index = {lane.index: lane.id for lane in followed.lanes}
        ids = by_index.get(-1, 0), by_index.get(1, 0)
        samples.append(Sample(time_s, truth, alone, followed.ego, ids))
    follower.log.worker.stop()
    return samples, follower.log.after(0)


class Follower:
    """The part of the server that puts lanes on the road, for pictures in their order."""

    def __init__(self, camera: CameraModel) -> None:
        self.log, self._vehicle, rule = EventLog(), VehicleInputs(), DepartureRule()
        self.locator = LaneLocator(Calibration("measured", camera))
        self._follower = RoadFollower(
            self.locator, self._vehicle, RoadEvents(self.log, rule), rule.half_width_m
        )
        self._size = camera.lens.width, camera.lens.height

    def follow(
        self,
        time_s: float,
        lanes: tuple[Lane, ...],
        bgr: NDArray[np.uint8],
        motion: tuple[float, float | None] | None,
    ) -> LaneFrame:
        """Return the tracked lanes; `motion` is the vehicle's speed and yaw rate where known."""
        mono_ns = int(time_s * 1e9) + 1
        if motion is not None:
            self._vehicle.put(VehicleState(mono_ns, *motion))
        frame = LaneFrame("front", 1, 0, mono_ns, mono_ns, *self._size, "m", lanes=lanes)
        return self._follower.follow(frame, Image.of_bgr(bgr))


def camera_of(scene: RoadScene) -> CameraModel:
    # It is shifted, not tilted: its optical axis is level. OpenCV draws with the origin in the
    # middle of the first pixel.
    focal_px = scene.camera.focal * WIDTH
    centre = WIDTH / 2, scene.camera.horizon * HEIGHT
    lens = Lens("pinhole", WIDTH, HEIGHT, focal_px, focal_px, *centre, (0.0,) * 5)
    return CameraModel(lens, Mounting(scene.camera.height_m))


# How each value is read from an Ego and a Truth, in a unit that people know.
VALUES: dict[str, tuple[str, Callable[[Ego, Truth], float]]] = {
    "offset": ("cm", lambda ego, t: 100 * (or_nan(ego.lateral_offset_m) - t.offset_m)),
    "heading": ("deg", lambda ego, t: np.degrees(or_nan(ego.heading_error_rad) - t.heading_rad)),
    "curvature": ("1/km", lambda ego, t: 1e3 * (or_nan(ego.curvature_1pm) - t.curvature_1pm)),
    "width": ("cm", lambda ego, t: 100 * (or_nan(ego.lane_width_m) - t.width_m)),
}


def or_nan(value: float | None) -> float:
    return np.nan if value is None else value


def report(seed: int, samples: list[Sample], events: list[Event], fps: float) -> None:
    """Print the errors and the warnings of one drive.

    On the line between two lanes either of them may be the vehicle's; frames in which the geometry
    or the tracker takes the other one than the truth are left out of the errors.
    """
    print(f"\nseed {seed}: {len(samples)} frames")
    print(f"{'':26} {'median':>9} {'p95':>9} {'known':>7}   jitter (mean change of the error)")
    same_lane = [
        all(abs(VALUES["offset"][1](ego, s.truth)) < OTHER_LANE_CM for ego in (s.alone, s.tracked))
        for s in samples
    ]
    for name, (unit, error_of) in VALUES.items():
        for how in ("alone", "tracked"):
            errors = np.array([error_of(getattr(s, how), s.truth) for s in samples])
            share = np.isfinite(errors).mean()
            errors[~np.array(same_lane)] = np.nan
            jitter = np.nanmean(np.abs(np.diff(errors)))
            median, p95 = np.nanpercentile(np.abs(errors), (50, 95))
            row = f"{name:10} {how:8} {unit:6} {median:9.3f} {p95:9.3f} {share:7.1%}   {jitter:.3f}"
            print(row)
    switches = sum(
        0 not in (a, b) and a != b
        for one, two in pairwise(samples)
        for a, b in zip(one.ids, two.ids, strict=True)
        if one.truth.changing == two.truth.changing == "none"
    )
    minutes = len(samples) / fps / 60
    print(f"identity switches outside lane changes: {switches / minutes:.1f} per minute")
    print_warnings(samples, events)


def print_warnings(samples: list[Sample], events: list[Event]) -> None:
    """Print which departures were warned of, and which lane changes were seen."""
    begun: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.phase == "begin":
            begun[f"{event.kind} {event.cause}"].append(event.mono_ns / 1e9)
    hits = set()
    departures = [
        (side, [s.time_s for s in group])
        for side, group in groupby(samples, key=lambda s: s.truth.departing)
        if side != "none"
    ]
    for side, times_s in departures:
        at = begun[f"lane_departure {side}"]
        hit = next((t for t in at if times_s[0] - EARLY_S <= t <= times_s[-1]), None)
        said = "MISSED" if hit is None else f"warned {times_s[0] - hit:+.2f} s before"
        print(f"departure to the {side} at {times_s[0]:.1f} s: {said}")
        hits |= {hit} - {None}
    changing = [s.time_s for s in samples if s.truth.changing != "none"]
    warned = {t for key, at in begun.items() if key.startswith("lane_departure") for t in at}
    at_changes = {t for t in warned - hits if any(abs(t - c) < EARLY_S for c in changing)}
    print(
        f"departure warnings: {len(hits)} of {len(departures)} hit, "
        f"{len(warned - hits - at_changes)} false, {len(at_changes)} at lane changes, as nobody "
        "indicates"
    )
    for key, at in begun.items():
        if key.startswith("lane_change"):
            print(f"{key} seen at", ", ".join(f"{t:.1f} s" for t in at))
    truth = [
        (k, [s.time_s for s in g]) for k, g in groupby(samples, key=lambda s: s.truth.changing)
    ]
    print(
        "true lane changes:", [f"{k} {t[0]:.1f} to {t[-1]:.1f} s" for k, t in truth if k != "none"]
    )


if __name__ == "__main__":
    sys.exit(main())
