"""How far lines lie from the paint of the road, without a label: the paint itself is the measure.

    python benchmarks/paint.py [--clip FILE ...] [--data DIR] [--drives 7,8] [--conditions night]
                               [--check] [--pictures DIR] [--models DIR]

`lane_training/paint_finder.py` finds the paint apart from what the server does. Its middle is
compared, row by row, with the network's lines, with those moved onto their paint, and with what is
published: the tracked lines on the road, put back into the picture. Printed for each set:

- the distance along the row, in px of a picture 1280 px wide, median/90th percentile, by third of
  the line's height in the picture and by kind of line;
- the row in which the own lane's lines meet, less that of their paint, of all frames and of those
  whose paint shows it: within 1 px (standard deviation by leaving out parts of the paint), on a
  road that bends no more than `calibrate estimate` takes for straight;
- the pitch that `calibrate estimate` says of a clip, and that of its paint; the spacing of dashes
  with either;
- the change of the far distance from frame to frame;
- the share of rows whose published deviation contains the distance, once (67 %) and twice (95 %).

--clip is a drive of a camera of --fov degrees, or with the lens of --calibration, of which the
--last part is measured; --data the folder that training takes, of which frames are measured that
training never sees; --drives rendered roads, whose truth is known: there errors on the road are
measured, too, of lines by their distance and of the vehicle in its lane, each with the share that
its published deviation contains, with a calibration that errs as much as it says and, with --road,
a vehicle that slips as the tracker takes it on a motorway with crests and sags; --mounting takes a
minute of each and measures what `calibrate estimate` and the drift of a calibration say of it.
--check measures the measure: the paint against the truth of the drives.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import cv2
import numpy as np
from drive import Follower, camera_of, model_lanes
from evaluate_lane_model import SHIPPED_MODELS
from lane_training.paint_finder import Paint, Scale, find_paint, meeting, row_std_px, scale_of

from edge_server.cameras.calibration import read_calibration
from edge_server.gpu.device import Devices
from edge_server.lanes.camera_model import CameraModel, Lens, Mounting
from edge_server.lanes.paint import on_paint
from edge_server.lanes.road_geometry import PitchDrift, PitchFilter, road_of
from edge_server.pixels import Image
from edge_server.tools.mounting_estimate import MountingEstimator, mounting_of
from edge_server.tools.road.renderer import SPEED_MPS, Drive, lane_labels
from edge_server.tools.road.renderer import draw as draw_road
from edge_server.tools.road.scene import RoadScene, look
from edge_server.tools.road.variants import varied

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from drive import Detect
    from numpy.typing import NDArray

    from edge_server.lanes.types import Ego, Lane, LaneFrame
    from edge_server.tools.road.scene import View

    Floats = NDArray[np.float64]

LANE_M, DASH_M, SPACING_M = 3.66, 3.05, 12.2
SOLID_SHARE = 0.7
# The paint shows its row where that is so certain, and the road so straight: its curvature times
# half of the camera's height.
LARGEST_ROW_STD_PX, LARGEST_BEND = 1.0, 1e-3
FEWEST_ROWS = 12
FEWEST_SHARE = 0.12
THIRDS = ("near", "middle", "far")
# Of published ground errors.
DISTANCES_M = ((3.0, 15.0), (15.0, 30.0), (30.0, 60.0))
# Of each drive whose road alone is measured: one error of the yaw is common to all its frames.
CALIBRATIONS, CONSECUTIVE = 6, 20
SLIP_STD_RAD = math.radians(0.05)  # of the vehicle, as the tracker takes it
# x**4 = x + 1: the golden ratio of three dimensions.
GOLDEN = 1.2207440846057596
# A motorway is no plane: its crests and sags have radii of 15 km and more (for 120 km/h standards
# ask for 6 to 13 km).
GRADE_PER_M, WAVES_M = 1 / 15_000, (500.0, 1000.0)
OTHER_LINE_M, FITTED_TO_M = 1.0, 45.0
WITHIN = {1.0: 67, 2.0: 95}
DRIFTED_RAD = math.radians(0.8)


class Picture(NamedTuple):
    """One frame.

    Attributes:
        lanes: the network's.
        truth: of a rendered one.
    """

    bgr: NDArray[np.uint8]
    time_s: float
    lanes: tuple[Lane, ...]
    truth: Known | None = None


class Known(NamedTuple):
    """What is drawn: lines (N, 2) px, the same on the road, m, and the row of the horizon."""

    lines: list[Floats]
    ground: list[Floats]
    horizon_px: float


@dataclass
class Found:
    """What was measured of one set.

    Attributes:
        distances: px of a picture 1280 px wide, by (whose, kind, third).
        rows: differences of rows, by whose, of all frames and of those whose paint shows the row.
        dashes: spacing in m by (whose, nearer or farther than 20 m).
        contained: of each row, distance over published deviation.
        errors: by name, error on the road and its published deviation.
    """

    frames: int = 0
    measured: int = 0
    distances: dict[tuple[str, str, str], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    rows: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    dashes: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    contained: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    errors: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    jitter: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    paint_rows: list[float] = field(default_factory=list)
    said: Mounting | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clip", type=Path, action="append", default=[])
    parser.add_argument("--fov", type=float, default=57.0, help="of the clips, degrees")
    parser.add_argument("--last", type=float, default=1.0, help="share of each clip, its end")
    parser.add_argument("--calibration", type=Path, help="of the clips, for its lens")
    parser.add_argument("--models", type=Path, default=SHIPPED_MODELS, help="a repository")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--drives", default="")
    parser.add_argument("--conditions", default="")
    parser.add_argument("--frames", type=int, default=60, help="of each drive, ten a second")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--road", action="store_true", help="of drives, the road alone")
    parser.add_argument("--mounting", action="store_true", help="of drives, the mounting alone")
    parser.add_argument("--pictures", type=Path, help="draw paint, network and published lines")
    arguments = parser.parse_args()
    devices = Devices()
    try:
        detect = model_lanes(devices, arguments.models)
        for clip in arguments.clip:
            pictures = list(clip_pictures(clip, detect))
            lens = rough_camera(pictures[0].bgr, arguments.fov, 0.0, 1.3).lens
            if arguments.calibration is not None:
                lens = read_calibration(arguments.calibration).model.lens
            camera, said = estimated(pictures, lens)
            first = round(len(pictures) * (1.0 - arguments.last))
            found = measure(pictures, camera, arguments.pictures, clip.stem, first=first)
            found.said = said
            report(clip.name, found, camera)
        if arguments.data:
            for source, stills in held_out(arguments.data, detect).items():
                report(source, measure_stills(stills, arguments.fov, arguments.pictures, source))
        if arguments.drives:
            measure_drives(arguments, detect)
    finally:
        devices.close()
    return 0


def measure_drives(arguments: argparse.Namespace, detect: Detect) -> None:
    conditions = tuple(filter(None, arguments.conditions.split(",")))
    total = Found()
    for seed in numbers(arguments.drives):
        scene = varied(RoadScene.for_camera(seed), conditions, seed)
        if arguments.road:
            waves_m = WAVES_M[0] + seed % 20 / 20 * (WAVES_M[1] - WAVES_M[0])
            course = replace(scene.course, grade_per_m=GRADE_PER_M, grade_wavelength_m=waves_m)
            scene = replace(scene, course=course)
        camera = camera_of(scene)
        if arguments.mounting:
            compare_mounting(scene, camera, detect, total)
            continue
        drawn = drive_pictures(scene, seed, arguments.frames, detect)
        if arguments.check:
            check(drawn, camera.lens.fy, total)
        elif arguments.road:
            pictures = list(drawn)
            for number in range(CALIBRATIONS):
                slip_rad = SLIP_STD_RAD * normal_errors(seed, number)[2]
                follow_road(pictures, misread(camera, seed, number), slip_rad, total)
        else:
            measure(drawn, misread(camera, seed), arguments.pictures, f"drive{seed}", total)
    name = f"rendered drives {arguments.drives} {arguments.conditions}".strip()
    report(f"check of the measure: {name}" if arguments.check else name, total)


def numbers(text: str) -> list[int]:
    """Return the numbers of `7,8` or `0-49`."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def normal_errors(seed: int, number: int) -> list[float]:
    """Return an error of the pitch, of the yaw and of the slip, in standard deviations.

    Those of 20 consecutive drives fill the normal distribution evenly (additive recurrence with the
    generalised golden ratio): errors drawn by chance are up to a seventh too large over as many.
    """
    place = seed + CONSECUTIVE * number + 1
    return [NormalDist().inv_cdf((0.5 + place / GOLDEN**power) % 1.0) for power in (1, 2, 3)]


def misread(camera: CameraModel, seed: int, number: int = 0) -> CameraModel:
    """Return the camera as a calibration has it whose errors are as large as it says."""
    pitch, yaw, _ = normal_errors(seed, number)
    mounting = camera.mounting
    pitch_rad, yaw_rad = pitch * mounting.pitch_std_rad, yaw * mounting.yaw_std_rad
    return CameraModel(camera.lens, replace(mounting, pitch_rad=pitch_rad, yaw_rad=yaw_rad))


def clip_pictures(path: Path, detect: Detect) -> Iterator[Picture]:
    video = cv2.VideoCapture(str(path))
    fps = video.get(cv2.CAP_PROP_FPS) or 25.0
    number = 0
    while True:
        there, image = video.read()
        if not there:
            return
        bgr = np.asarray(image, np.uint8)
        yield Picture(bgr, number / fps, detect(bgr, []))
        number += 1


def held_out(folder: Path, detect: Detect) -> dict[str, list[Picture]]:
    """Return the frames that training never sees, by source."""
    from lane_training.material import Material  # noqa: PLC0415  # on the path that `drive` adds

    sets: dict[str, list[Picture]] = defaultdict(list)
    for each in Material(folder).evaluation:
        bgr = each.bgr()
        sets[each.source].append(Picture(bgr, 0.0, detect(bgr, [])))
    return dict(sorted(sets.items()))


def drive_pictures(scene: RoadScene, seed: int, frames: int, detect: Detect) -> Iterator[Picture]:
    """Yield frames of a drive with manoeuvres, ten of a second each; the seconds of consecutive
    drives fill its minute evenly."""
    seconds = frames // 10
    places = [(seed * seconds + number) / GOLDEN % 1.0 for number in range(seconds)]
    times_s = (60.0 * place + 0.1 * number for place in sorted(places) for number in range(10))
    return pictures_at(times_s, scene, detect)


def pictures_at(times_s: Iterable[float], scene: RoadScene, detect: Detect) -> Iterator[Picture]:
    course = Drive(scene, manoeuvres=True)
    for time_s in times_s:
        distance_m = course.distance_m(time_s)
        pose = course.pose(time_s)
        view = look(scene.camera, scene.course, distance_m, 1280, 720, pose=pose)
        bgr = draw_road(view, scene, distance_m)
        labels = lane_labels(view, scene.lines, scene.branches, distance_m)
        lines = [line.astype(np.float64) for line in labels]
        truth = Known(lines, [on_road(line, view) for line in lines], view.horizon_px)
        yield Picture(bgr, time_s, detect(bgr, labels), truth)


def on_road(line: Floats, view: View) -> Floats:
    """Return the points (N, 2) of a drawn line ahead and to the left of the camera, m."""
    ahead_m = view.z_m if view.bend is None else view.bend.ahead_m
    x_m = np.interp(-line[:, 1], -view.row_px, ahead_m)
    y_m = (view.width / 2 - line[:, 0]) * x_m / view.scale_px
    return np.stack([x_m, y_m], axis=1)


def rough_camera(
    bgr: NDArray[np.uint8], fov: float, pitch_rad: float, height_m: float
) -> CameraModel:
    height, width = bgr.shape[:2]
    focal = width / 2 / math.tan(math.radians(fov) / 2)
    lens = Lens(
        "pinhole", width, height, focal, focal, (width - 1) / 2, (height - 1) / 2, (0.0,) * 5
    )
    return CameraModel(lens, Mounting(height_m, pitch_rad))


def estimated(pictures: Sequence[Picture], lens: Lens) -> tuple[CameraModel, Mounting]:
    """Return the camera as `calibrate estimate` finds it, and what it says of the mounting."""
    estimator = MountingEstimator(lens)
    for picture in pictures:
        estimator.add(picture.lanes, Image.of_bgr(picture.bgr))
    found = estimator.estimate()
    if found is None:
        raise SystemExit("the clip shows too little straight road")
    said = mounting_of(
        found, found.height_m(LANE_M), Mounting(1.0), least_std_rad=math.radians(0.1)
    )
    return CameraModel(lens, said), said


def compare_mounting(scene: RoadScene, camera: CameraModel, detect: Detect, found: Found) -> None:
    """Note the errors of the pitch by `calibrate estimate`, and by the drift of a calibration that
    is off by `DRIFTED_RAD`, over a minute of the drive."""
    drifted = camera.pitched(-DRIFTED_RAD)
    estimator = MountingEstimator(camera.lens)
    pitch, drift = PitchFilter(drifted.mounting.pitch_std_rad), PitchDrift()
    for picture in pictures_at((0.5 * number for number in range(130)), scene, detect):
        found.frames += 1
        image, at_ns = Image.of_bgr(picture.bgr), round(picture.time_s * 1e9)
        estimator.add(picture.lanes, image)
        pitch.predict(at_ns)
        before_rad, pitched = pitch.rad, drifted.pitched(pitch.rad)
        lines, lanes = on_paint(picture.lanes, image, pitched)
        road = road_of(lanes, pitched, lines=lines, pitch=pitch)
        if road.pitch is not None:
            drift.add(before_rad + road.pitch.rad, road.ego.curvature_1pm, at_ns)
    estimate = estimator.estimate()
    if estimate is not None:
        said = estimate.pitch_rad
        found.errors["estimate rad"].append((said.median, said.std))
    if drift.pitch is not None:
        found.errors["drift rad"].append((drift.pitch.median - DRIFTED_RAD, drift.pitch.std))


def follow(follower: Follower, picture: Picture) -> LaneFrame:
    motion = None if picture.truth is None else (SPEED_MPS, None)
    return follower.follow(picture.time_s, picture.lanes, picture.bgr, motion)


def measure_stills(
    pictures: Sequence[Picture], fov: float, folder: Path | None, name: str
) -> Found:
    """Each picture by itself, with the pitch that its paint shows."""
    found = Found()
    for number, picture in enumerate(pictures):
        seen = look_at(picture)
        if seen is None or math.isnan(seen.meeting_px):
            found.frames += 1
            continue
        flat = rough_camera(picture.bgr, fov, 0.0, 1.3)
        pitch = math.atan((flat.lens.cy - seen.meeting_px) / flat.lens.fy)
        height_m = LANE_M / seen.scale.per_row
        camera = rough_camera(picture.bgr, fov, pitch, height_m)
        measure([picture], camera, folder, f"{name}_{number}", found)
    return found


class Seen(NamedTuple):
    """The paint of a picture's lines.

    Attributes:
        own: numbers of the own lane's lines.
        meeting_px: the row in which their paint meets; NaN where too little of it is seen.
        std_px: its standard deviation.
        bend_px2: of their paint, see `Meeting`.
    """

    scale: Scale
    paints: list[Paint]
    own: tuple[int, int]
    meeting_px: float = math.nan
    std_px: float = math.inf
    bend_px2: float = 0.0


def look_at(picture: Picture) -> Seen | None:
    """Return None where the own lane has not got two lines that part."""
    lines = [lane.points.astype(np.float64) for lane in picture.lanes]
    height, width = picture.bgr.shape[:2]
    feet = [foot(line, height) for line in lines]
    left = max(
        (n for n, x in enumerate(feet) if x <= width / 2), key=feet.__getitem__, default=None
    )
    right = min(
        (n for n, x in enumerate(feet) if x > width / 2), key=feet.__getitem__, default=None
    )
    if left is None or right is None:
        return None
    scale = scale_of(lines[left], lines[right])
    if scale is None:
        return None
    luma = cv2.cvtColor(picture.bgr, cv2.COLOR_BGR2GRAY)
    paints = [find_paint(luma, line, scale) for line in lines]
    own = paints[left], paints[right]
    seen = Seen(scale, paints, (left, right))
    if any(len(each.rows) < 2 * FEWEST_ROWS or each.share < FEWEST_SHARE for each in own):
        return seen
    pair = [(each.rows, each.x_px) for each in own]
    met = meeting(pair, scale.horizon_px)
    return seen._replace(
        meeting_px=met.row_px, std_px=row_std_px(pair, met), bend_px2=abs(met.bend)
    )


def shown_by(seen: Seen, focal_px: float) -> tuple[str, ...]:
    """Return the names of the frames' groups to which this one counts."""
    shows = seen.std_px <= LARGEST_ROW_STD_PX and seen.bend_px2 <= LARGEST_BEND * focal_px**2
    return ("all", "shown") if shows else ("all",)


def foot(line: Floats, height: int) -> float:
    lower = line[: max(2, len(line) // 2)]
    slope, at = np.polyfit(lower[:, 1], lower[:, 0], 1)
    return float(at + slope * height)


def measure(
    pictures: Iterable[Picture],
    camera: CameraModel,
    folder: Path | None,
    name: str,
    found: Found | None = None,
    *,
    first: int = 0,
) -> Found:
    """Measure the pictures from number `first` on; those before are followed."""
    found = found or Found()
    follower = Follower(camera)
    before: dict[tuple[str, int], float] = {}
    for number, picture in enumerate(pictures):
        frame = follow(follower, picture)
        if number < first:
            continue
        found.frames += 1
        if picture.truth is not None:
            compare_ground(frame, picture.truth.ground, found)
        seen = look_at(picture)
        if seen is None:
            continue
        found.measured += 1
        published = [on_picture(lane, follower) for lane in frame.lanes[: len(picture.lanes)]]
        network = [lane.points[::-1].astype(np.float64) for lane in picture.lanes]
        moved = moved_lines(picture, camera)
        lines_of: dict[str, Sequence[Floats | None]]
        lines_of = {"network": network, "moved": moved, "published": published}
        compare_rows(seen, lines_of, camera, found)
        compare_dashes(seen, camera, found)
        after: dict[tuple[str, int], float] = {}
        for place, paint in enumerate(seen.paints):
            kind = kind_of(seen, place)
            for whose, lines in lines_of.items():
                line = lines[place]
                if line is None:
                    continue
                off = compare_line(paint, line, 1280 / picture.bgr.shape[1], found, (whose, kind))
                key = whose, frame.lanes[place].id
                if off is not None and key[1]:
                    after[key] = off
                    if key in before:
                        found.jitter[whose].append(abs(off - before[key]))
        before = after
        if folder is not None and number % 20 == 0:
            draw(folder / f"{name}_{number}.png", picture, seen, published)
    return found


def follow_road(
    pictures: Iterable[Picture], camera: CameraModel, slip_rad: float, found: Found
) -> None:
    """Measure the lanes of a vehicle that points by `slip_rad` to the left of its way, and its
    camera by as much to the right of where the vehicle points."""
    mounting = replace(camera.mounting, yaw_rad=camera.mounting.yaw_rad - slip_rad)
    follower = Follower(CameraModel(camera.lens, mounting))
    cosine, sine = math.cos(slip_rad), math.sin(slip_rad)
    to_vehicle = np.array([[cosine, -sine], [sine, cosine]])
    for picture in pictures:
        found.frames += 1
        frame = follow(follower, picture)
        if picture.truth is not None:
            lines = [line @ to_vehicle for line in picture.truth.ground]
            compare_ground(frame, lines, found)


def kind_of(seen: Seen, place: int) -> str:
    beside = "own" if place in seen.own else "side"
    return f"{beside} {'solid' if seen.paints[place].share >= SOLID_SHARE else 'dashed'}"


def on_picture(lane: Lane, follower: Follower) -> Floats | None:
    """Return (N, 3) x, y and the published deviation of x, px, downwards; None without ground."""
    if lane.ground is None:
        return None
    polynomial = lane.ground.polynomial
    x_m = 1 / np.linspace(1 / polynomial.x_max_m, 1 / max(polynomial.x_min_m, 2.0), 200)
    powers = np.vander(x_m, 4, increasing=True)
    y_m = powers @ polynomial.coefficients
    std_m = np.sqrt(np.einsum("ij,jk,ik->i", powers, polynomial.covariance, powers))
    at, beside = (follower.locator.to_image(np.stack([x_m, y], axis=1)) for y in (y_m, y_m + std_m))
    line: Floats = np.column_stack([at, np.abs(beside[:, 0] - at[:, 0])])
    line = line[np.isfinite(line).all(axis=1)]
    line = line[np.append(True, np.diff(line[:, 1]) > 0)] if len(line) else line
    return line if len(line) > 4 else None


def compare_line(
    paint: Paint, line: Floats, scale: float, found: Found, key: tuple[str, str]
) -> float | None:
    """Note the distances of one line; return their median in the far third."""
    if len(paint.rows) < FEWEST_ROWS:
        return None
    top, bottom = line[0, 1], line[-1, 1]
    inside = (paint.rows >= top) & (paint.rows <= bottom)
    rows, x = paint.rows[inside], paint.x_px[inside]
    signed = (np.interp(rows, line[:, 1], line[:, 0]) - x) * scale
    third = np.clip(((bottom - rows) / max(bottom - top, 1.0) * 3).astype(int), 0, 2)
    for number, word in enumerate(THIRDS):
        found.distances[key[0], key[1], word] += np.abs(signed[third == number]).tolist()
    if line.shape[1] == 3:
        std = np.maximum(np.interp(rows, line[:, 1], line[:, 2]) * scale, 1e-6)
        for number, word in enumerate(THIRDS):
            found.contained[word] += (np.abs(signed) / std)[third == number].tolist()
    far = signed[third == 2]
    return float(np.median(far)) if len(far) >= FEWEST_ROWS / 2 else None


def moved_lines(picture: Picture, camera: CameraModel) -> list[Floats]:
    """Return the network's lines moved onto their paint, without the vehicle's own pitch."""
    lines, _ = on_paint(picture.lanes, Image.of_bgr(picture.bgr), camera)
    ends = np.cumsum([len(lane.points) for lane in picture.lanes])[:-1]
    return [line[::-1] for line in np.split(lines.points, ends)]


def compare_rows(
    seen: Seen, lines_of: dict[str, Sequence[Floats | None]], camera: CameraModel, found: Found
) -> None:
    if math.isnan(seen.meeting_px):
        return
    found.paint_rows.append(seen.meeting_px)
    for whose, lines in lines_of.items():
        own = [lines[place] for place in seen.own]
        if own[0] is not None and own[1] is not None:
            pair = [(line[:, 1], line[:, 0]) for line in own if line is not None]
            off = meeting(pair, seen.scale.horizon_px).row_px - seen.meeting_px
            for group in shown_by(seen, camera.lens.fy):
                found.rows[whose, group].append(off)


def compare_dashes(seen: Seen, camera: CameraModel, found: Found) -> None:
    """Note the spacing of dashes with the camera's pitch, and with that of the paint."""
    if math.isnan(seen.meeting_px):
        return
    lens = camera.lens
    said_px = lens.cy - lens.fy * math.tan(camera.mounting.pitch_rad)
    for place in seen.own:
        paint = seen.paints[place]
        if paint.share >= SOLID_SHARE or len(paint.rows) < FEWEST_ROWS:
            continue
        begins, ends = stretches(paint.rows)
        for whose, horizon_px in (("said", said_px), ("paint", seen.meeting_px)):
            if horizon_px >= begins[0] - 2:
                continue
            # The lane is so many times as wide as the camera is high.
            focal_m = lens.fy * LANE_M / seen.scale.per_row
            near_m, far_m = focal_m / (ends - horizon_px), focal_m / (begins - horizon_px)
            is_dash = (far_m - near_m > 0.5 * DASH_M) & (far_m - near_m < 1.5 * DASH_M)
            for one, next_ in itertools.pairwise(np.flatnonzero(is_dash)[::-1]):
                spacing_m = (near_m[next_] + far_m[next_] - near_m[one] - far_m[one]) / 2
                if abs(spacing_m / SPACING_M - 1) < 0.35 and far_m[next_] < 60:
                    where = "near" if near_m[one] < 12 else "far"
                    found.dashes[whose, where].append(spacing_m)


def stretches(rows: Floats) -> tuple[Floats, Floats]:
    """Return the first and the last row of each stretch of paint."""
    breaks = np.flatnonzero(np.diff(rows) > 2)
    return rows[np.append(0, breaks + 1)] - 0.5, rows[np.append(breaks, len(rows) - 1)] + 0.5


def compare_ground(frame: LaneFrame, lines: Sequence[Floats], found: Found) -> None:
    """Note the errors on the road, and what is published of them."""
    for lane in frame.lanes:
        if lane.ground is None or lane.predicted:
            continue
        polynomial = lane.ground.polynomial
        x_m = np.arange(np.ceil(polynomial.x_min_m), polynomial.x_max_m, 2.0)
        powers = np.vander(x_m, 4, increasing=True)
        y_m = powers @ polynomial.coefficients
        std_m = np.sqrt(np.einsum("ij,jk,ik->i", powers, polynomial.covariance, powers))
        errors = [y_m - np.interp(x_m, *line.T, np.nan, np.nan) for line in lines if len(line) > 1]
        errors = [each for each in errors if np.isfinite(each).any()]
        if not errors:
            continue
        error = min(errors, key=lambda each: abs(float(each[np.isfinite(each)][0])))
        if abs(float(error[np.isfinite(error)][0])) > OTHER_LINE_M:
            continue
        for low, high in DISTANCES_M:
            inside = (x_m >= low) & (x_m < high) & np.isfinite(error)
            pairs = zip(error[inside].tolist(), std_m[inside].tolist(), strict=True)
            found.errors[f"line {low:g}-{high:g} m"] += pairs
    if frame.ego is not None:
        compare_ego(frame.ego, lines, found)


def compare_ego(ego: Ego, lines: Sequence[Floats], found: Found) -> None:
    """Note the vehicle's errors against the drawn lines."""
    fits = [
        np.polyfit(*line[line[:, 0] < FITTED_TO_M].T, 4)[::-1] for line in lines if len(line) > 9
    ]
    left = min((fit for fit in fits if fit[0] > 0), key=lambda fit: fit[0], default=None)
    right = max((fit for fit in fits if fit[0] <= 0), key=lambda fit: fit[0], default=None)
    if left is None or right is None:
        return
    c0, c1, c2 = ((left + right) / 2)[:3].tolist()
    cosine = math.cos(math.atan(c1))
    if ego.lateral_offset_m is None or abs(ego.lateral_offset_m + c0 * cosine) > OTHER_LINE_M:
        return
    values = {
        "offset m": (ego.lateral_offset_m, -c0 * cosine, ego.lateral_offset_std_m),
        "heading rad": (ego.heading_error_rad, -math.atan(c1), ego.heading_error_std_rad),
        "curvature 1/m": (ego.curvature_1pm, 2 * c2 * cosine**3, ego.curvature_std_1pm),
        "width m": (ego.lane_width_m, float(left[0] - right[0]) * cosine, ego.lane_width_std_m),
    }
    for name, (said, true, std) in values.items():
        if said is not None:
            found.errors[name].append((said - true, math.nan if std is None else std))


def check(pictures: Iterable[Picture], focal_px: float, found: Found) -> None:
    """Note the paint's distance from the truth, as if the truth were published."""
    for picture in pictures:
        found.frames += 1
        seen = look_at(picture)
        if seen is None or picture.truth is None:
            continue
        found.measured += 1
        for place, paint in enumerate(seen.paints):
            if len(paint.rows) < FEWEST_ROWS:
                continue
            lines = [line[::-1] for line in picture.truth.lines]
            line = min(lines, key=lambda line: far_off(paint, line))
            if far_off(paint, line) < 20:
                compare_line(paint, line, 1.0, found, ("truth", kind_of(seen, place)))
            else:
                found.contained["paint of no line"].append(1.0)
        if not math.isnan(seen.meeting_px):
            off = picture.truth.horizon_px - seen.meeting_px
            for group in shown_by(seen, focal_px):
                found.rows["truth", group].append(off)
            found.contained["vanishing row"].append(abs(off) / seen.std_px)


def far_off(paint: Paint, line: Floats) -> float:
    return float(np.median(np.abs(np.interp(paint.rows, line[:, 1], line[:, 0]) - paint.x_px)))


def report(name: str, found: Found, camera: CameraModel | None = None) -> None:
    print(f"\n{name}: paint measured in {found.measured} of {found.frames} frames")
    keys = sorted({key[:2] for key in found.distances})
    everything: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for (whose, _, third), values in found.distances.items():
        everything[whose, "all lines", third] += values
    for key in [*keys, *sorted({key[:2] for key in everything})]:
        cells = []
        for third in THIRDS:
            values = found.distances.get((*key, third)) or everything.get((*key, third)) or []
            cells.append(f"{third} {percentiles(values)}")
        print(f"  {key[0]:9} {key[1]:10} px from the paint: " + "   ".join(cells))
    for (whose, group), rows in sorted(found.rows.items()):
        values = np.array(rows)[np.isfinite(rows)]
        if len(values):
            middle = float(np.median(values))
            print(
                f"  vanishing row, {whose} less paint, {group}: {middle:+.1f}, "
                f"|d| {percentiles(values)}, {len(values)} frames"
            )
    if camera is not None and found.said is not None and found.paint_rows:
        lens = camera.lens
        pitch = math.degrees(math.atan((lens.cy - float(np.median(found.paint_rows))) / lens.fy))
        said = math.degrees(found.said.pitch_rad)
        std = math.degrees(found.said.pitch_std_rad)
        print(f"  pitch {said:+.2f} +- {std:.2f} deg said, {pitch:+.2f} by the paint")
    for (whose, where), spacing in sorted(found.dashes.items()):
        print(
            f"  dashes, pitch {whose}, {where}: every {np.median(spacing):.2f} m ({len(spacing)})"
        )
    for whose, values_ in found.jitter.items():
        print(f"  far third, change from frame to frame, {whose}: {percentiles(values_)} px")
    for word, shares in found.contained.items():
        inside = ", ".join(f"{np.mean(np.array(shares) <= k):.1%} ({w})" for k, w in WITHIN.items())
        print(f"  {word}: {len(shares)} rows within once and twice the deviation: {inside}")
    for what, pairs in found.errors.items():
        error, std_ = np.abs(np.array(pairs).T)
        text = f"  {what:14} |error| {percentiles(error, 4)}"
        if np.isfinite(std_).any():
            ratio = error / std_
            text += f", over its deviation {np.median(ratio):.2f}; contained " + ", ".join(
                f"{np.mean(ratio <= k):.1%} ({w})" for k, w in WITHIN.items()
            )
        print(f"{text}, {len(error)} values")


def percentiles(values: Sequence[float] | Floats, digits: int = 1) -> str:
    if not len(values):
        return "-"
    half, most = np.percentile(np.abs(values), (50, 90))
    return f"{half:.{digits}f}/{most:.{digits}f}"


def draw(path: Path, picture: Picture, seen: Seen, published: Sequence[Floats | None]) -> None:
    """Draw twice as large: paint green, the network's points red, published lines blue."""
    image = cv2.resize(picture.bgr, None, fx=2, fy=2)
    for lane, line, paint in zip(picture.lanes, published, seen.paints, strict=True):
        if line is not None:
            curve = (2 * line[:, :2] + 0.5).round().astype(np.int32)
            cv2.polylines(image, [curve], False, (255, 80, 0), 1, cv2.LINE_AA)
        for x, y in 2 * lane.points + 0.5:
            cv2.circle(image, (round(float(x)), round(float(y))), 2, (0, 0, 255), -1)
        at = np.stack([2 * paint.rows, 2 * paint.x_px + 0.5], axis=1).round().astype(int)
        image[at[:, 0], np.clip(at[:, 1], 0, image.shape[1] - 1)] = (0, 255, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), image[len(image) // 3 :])


if __name__ == "__main__":
    sys.exit(main())
