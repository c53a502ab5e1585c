"""Roads to train on: what a camera rarely sees, among it what is easily taken for a lane line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from edge_server.tools.road.renderer import (
    draw_roadside,
    draw_vehicle,
    ground_texture,
    horizon_row,
    lane_labels,
    paint_backdrop,
    paint_branch,
    paint_line,
    paint_surfaces,
    render,
    shade_ground,
    spans,
)
from edge_server.tools.road.scene import (
    BARRIERS,
    VERGES,
    WHITE,
    WORN,
    YELLOW,
    Colour,
    Course,
    Line,
    PinholeCamera,
    RoadScene,
    Roadside,
    View,
    asphalt_texture,
    backdrop,
    fill_polygons,
    look,
    marks_ahead,
    mix,
    scaled,
    traffic,
)
from edge_server.tools.road.variants import varied
from edge_server.tools.road.weather import expose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

KERB_M = 0.2
SEAM_M, SEAM_REACH_M = 0.06, 90.0
JOINT_M, JOINT_REACH_M = 0.12, 60.0
ARROW_SPACING_M, ARROW_REACH_M = 40.0, 60.0
SHADOW_REACH_M = 80.0
DASHES_M = ((3.0, 12.0), (3.0, 9.0), (2.0, 6.0), (6.0, 12.0), (0.15, 1.2))


HARD_CONDITIONS = ("night", "rain", "bend", "fork")
HARD_BESIDE: tuple[tuple[str, ...], ...] = (
    *(("camera",), (), (), ("worn",), (), (), ("sensor",), (), ()),
)
LONGEST_DRIVE_M = 3000.0
LEAST_CONTRAST = 50.0
# How often a road has each condition of `road_variants`; left-hand traffic comes of mirroring.
_CHANCES = {
    "camera": 0.4,
    "barrier": 0.25,
    "double": 0.12,
    "dots": 0.08,
    "worn": 0.3,
    "missing": 0.16,
    "crest": 0.12,
    "bonnet": 0.15,
    "sensor": 0.2,
}
# At most one of each group.
_GROUPS = (
    {"bend": 0.24, "fork": 0.1, "merge": 0.08},
    {"night": 0.28, "sun": 0.1, "tunnel": 0.05},
    {"rain": 0.18, "snow": 0.1, "wet": 0.14},
)


@dataclass(frozen=True)
class TrainingRoad(RoadScene):
    """A road within the network's intended range.

    Attributes:
        roll_rad: clockwise turn of the image.
        kerb: BGR of the strip along both edges, as wide as a line and none; None without.
        tree_shadow: darkness of the trees' shadows on the road, 1 = none.
        seam_m: spacing of expansion joints across the road, 0 for none.
        seam_offsets_m: tar seams along the road, easily taken for lines.
        arrow: whether arrows are painted in the lanes.
    """

    roll_rad: float
    kerb: Colour | None
    tree_shadow: float
    seam_m: float
    seam_offsets_m: tuple[float, ...]
    arrow: bool


def sample_road(rng: np.random.Generator) -> RoadScene:
    """Return a random road in random conditions; one in ten has no line at all."""
    return varied(clear_road(rng), _sample_conditions(rng), int(rng.integers(1 << 31)))


def road_in(conditions: tuple[str, ...], rng: np.random.Generator) -> RoadScene:
    """Return a random road with lines, in these conditions."""
    road = clear_road(rng)
    while not road.lines:
        road = clear_road(rng)
    return varied(road, conditions, int(rng.integers(1 << 31)))


def hard_roads(count: int, seed: int) -> Iterator[tuple[str, RoadScene, float]]:
    """Yield roads for measuring in each of the hard conditions in turn: the condition's name, the
    road, and how far along it. A third have another camera, worn lines or a cheap sensor as well.
    """
    for number in range(count):
        rng = np.random.default_rng((seed, number))
        name = HARD_CONDITIONS[number % len(HARD_CONDITIONS)]
        more = HARD_BESIDE[number // len(HARD_CONDITIONS) % len(HARD_BESIDE)]
        yield name, road_in((*more, name), rng), rng.uniform(0, LONGEST_DRIVE_M)


def _sample_conditions(rng: np.random.Generator) -> list[str]:
    """Return names in the order in which they are applied: the road, then light, then weather."""
    names = [name for name, chance in _CHANCES.items() if rng.random() < chance]
    for group in _GROUPS:
        drawn = rng.random()
        for name, chance in group.items():
            if 0.0 <= drawn < chance:
                names.append(name)
            drawn -= chance
    if "tunnel" in names:
        names = [name for name in names if name not in {"rain", "snow", "wet"}]
    return names


def clear_road(rng: np.random.Generator) -> TrainingRoad:
    """Return a random road by clear daylight; one in ten has no line at all."""
    lane_m = rng.uniform(3.0, 3.9)
    left, right = int(rng.choice((1, 2, 3), p=(0.52, 0.33, 0.15))), int(rng.integers(1, 3))
    camera = PinholeCamera(
        focal=0.5 / np.tan(np.radians(rng.uniform(50, 75)) / 2),
        horizon=rng.uniform(0.3, 0.56),
        height_m=rng.uniform(1.2, 1.9),
    )
    roll_rad = np.radians(rng.uniform(-1.5, 1.5)) if rng.random() < 0.5 else 0.0
    course = Course(
        curvature_per_m=rng.normal(0, 1 / 500 if rng.random() < 0.7 else 1 / 3000),
        curvature_wavelength_m=rng.uniform(250, 1500),
        curvature_phase=rng.uniform(0, 2 * np.pi),
        grade_per_m=rng.normal(0, 1e-4) if rng.random() < 0.4 else 0.0,
        heading_rad=np.radians(rng.normal(0, 2.0)),
        # Beyond half a lane the vehicle changes lanes.
        sway_m=rng.uniform(0, 0.9) if rng.random() < 0.8 else rng.uniform(0.9, 2.0),
        sway_wavelength_m=rng.uniform(60, 300),
    )
    lines = _lines(rng, lane_m, left, right, wear=rng.uniform(0, 0.6))
    roadside, disturbances = _roadside(rng, lines)
    lines = tuple(_visible(line, roadside.asphalt) for line in lines)
    if rng.random() < 0.1:
        lines = ()
    vehicles = traffic(rng, lane_m, left, right, int(rng.integers(0, 7)))
    return TrainingRoad(
        camera, course, lines, vehicles, roadside, roll_rad=roll_rad, **disturbances
    )


def _lines(
    rng: np.random.Generator, lane_m: float, left: int, right: int, *, wear: float
) -> tuple[Line, ...]:
    dash_m, period_m = DASHES_M[int(rng.choice(5, p=(0.4, 0.2, 0.15, 0.15, 0.1)))]
    count = left + right
    lines = []
    for place in range(count):
        edge = place in (0, count - 1)
        solid = edge if rng.random() < 0.85 else not edge
        colour = YELLOW if place == 0 and rng.random() < 0.5 else WHITE
        width_m = rng.uniform(0.09, 0.24)
        double = solid and rng.random() < 0.15
        lines.append(
            Line(
                offset_m=(place - left + 0.5) * lane_m,
                strokes_m=(-width_m, width_m) if double else (0.0,),
                width_m=width_m,
                dash_m=period_m if solid else dash_m,
                period_m=period_m,
                phase_m=rng.uniform(0, period_m),
                colour=mix(colour, WORN, wear * rng.uniform(0.6, 1.3)),
            )
        )
    return tuple(lines)


def _visible(line: Line, asphalt: Colour) -> Line:
    """Return the line in a colour that a person can tell from the asphalt."""
    ahead = max(paint - ground for paint, ground in zip(line.colour, asphalt, strict=True))
    if ahead >= LEAST_CONTRAST:
        return line
    blue, green, red = (min(paint + LEAST_CONTRAST - ahead, 250.0) for paint in line.colour)
    return replace(line, colour=(blue, green, red))


def _roadside(rng: np.random.Generator, lines: tuple[Line, ...]) -> tuple[Roadside, dict[str, Any]]:
    """Return the roadside, and what stands beside it in `TrainingRoad`."""
    grey = rng.uniform(55, 165)
    asphalt = (grey * rng.uniform(0.97, 1.05), grey, grey * rng.uniform(0.95, 1.05))
    verge = VERGES[int(rng.integers(0, 4))]
    texture = asphalt_texture(rng, rng.uniform(4, 22), (-7, 10))
    has_barrier = rng.random(2) < 0.4
    barrier_left_m, barrier_right_m = np.where(has_barrier, rng.uniform(0.6, 1.1, 2), 0.0)
    has_kerb = rng.random() < 0.35
    has_seams = rng.random() < 0.35
    seam_offsets_m = rng.uniform(-7, 7, int(rng.integers(1, 4))) if has_seams else ()
    grass = mix(verge, (128.0, 128.0, 128.0), rng.uniform(0, 0.3))
    shoulder = mix(asphalt, (140.0, 145.0, 150.0), rng.uniform(0.0, 0.35))
    edge_left_m = lines[0].offset_m - rng.uniform(0.4, 4.5)
    edge_right_m = lines[-1].offset_m + rng.uniform(0.6, 4.5)
    kerb = mix(asphalt, (190.0, 195.0, 195.0), rng.uniform(-0.3, 0.8)) if has_kerb else None
    roadside = Roadside(
        asphalt=asphalt,
        verge=grass,
        shoulder=shoulder,
        edge_left_m=edge_left_m,
        edge_right_m=edge_right_m,
        barrier_height_m=(float(barrier_left_m), float(barrier_right_m)),
        barrier=mix(*BARRIERS, rng.uniform(0, 1)),
        texture=texture,
        backdrop=backdrop(
            rng,
            rng.uniform((120, 110, 80), (235, 200, 190)),
            rng.uniform(150, 245, 3),
            lambda: rng.uniform(40, 130, 3),
        ),
        tree_spacing_m=rng.uniform(14, 40) if rng.random() < 0.5 else 0.0,
    )
    return roadside, {
        "kerb": kerb,
        "tree_shadow": 1.0 if rng.random() < 0.6 else rng.uniform(0.35, 0.8),
        "seam_m": rng.uniform(4, 9) if rng.random() < 0.3 else 0.0,
        "seam_offsets_m": tuple(float(x) for x in seam_offsets_m),
        "arrow": rng.random() < 0.12,
    }


def render_road(
    scene: RoadScene, distance_m: float, width: int, height: int
) -> tuple[NDArray[np.uint8], list[NDArray[np.float32]]]:
    """Render one frame, like `road_renderer.render`, with all that a `TrainingRoad` has."""
    if not isinstance(scene, TrainingRoad):
        return render(scene, distance_m, width, height)
    view = look(scene.camera, scene.course, distance_m, width, height)
    image = paint_backdrop(view, scene.roadside)
    paint_surfaces(image, view, scene)
    _paint_kerbs(image, view, scene)
    _paint_seams(image, view, scene, distance_m)
    for line in scene.lines:
        paint_line(image, view, line, distance_m)
    for branch in scene.branches:
        paint_branch(image, view, scene, branch, distance_m)
    if scene.arrow and scene.lines:
        _paint_arrow(image, view, scene.lines[0].colour, distance_m)
    texture = ground_texture(view, scene.roadside, distance_m)
    if scene.roadside.tree_spacing_m and scene.tree_shadow < 1.0:
        texture = _cast_tree_shadows(texture, view, scene, distance_m)
    shade_ground(image, view, texture)
    draw_roadside(image, view, scene, distance_m)
    for vehicle in sorted(scene.vehicles, key=lambda vehicle: -vehicle.ahead_m):
        draw_vehicle(image, view, vehicle, distance_m)
    image = expose(image, view, scene, distance_m)
    lanes = lane_labels(view, scene.lines, scene.branches, distance_m)
    if scene.roll_rad:
        image, lanes = _roll(image, lanes, scene.roll_rad)
    return image, lanes


def _paint_kerbs(image: NDArray[np.uint8], view: View, scene: TrainingRoad) -> None:
    if scene.kerb is not None:
        for edge_m in (scene.roadside.edge_left_m, scene.roadside.edge_right_m):
            strip = view.strip(edge_m - KERB_M / 2, edge_m + KERB_M / 2, view.z_m)
            fill_polygons(image, [strip], scene.kerb)


def _paint_seams(
    image: NDArray[np.uint8], view: View, scene: TrainingRoad, distance_m: float
) -> None:
    """Paint tar along the road and joints across it: dark lines that are no lane lines."""
    place = scene.roadside
    tar = scaled(place.asphalt, 0.6)
    near_m = view.z_m[view.z_m < SEAM_REACH_M]
    for offset_m in scene.seam_offsets_m:
        strip = view.strip(offset_m - SEAM_M / 2, offset_m + SEAM_M / 2, near_m)
        fill_polygons(image, [strip], tar)
    if scene.seam_m:
        starts_m = marks_ahead(view, 0.0, scene.seam_m, distance_m, JOINT_REACH_M)
        spans_m = spans(view, starts_m, JOINT_M, JOINT_REACH_M)
        edges_m = place.edge_left_m, place.edge_right_m
        fill_polygons(image, [view.strip(*edges_m, z_m) for z_m in spans_m], tar)


def _paint_arrow(image: NDArray[np.uint8], view: View, colour: Colour, distance_m: float) -> None:
    """Paint arrows in the vehicle's lane: markings that are no lane lines."""
    for start_m in marks_ahead(view, 0.0, ARROW_SPACING_M, distance_m, ARROW_REACH_M):
        if start_m > view.z_m[0]:
            shaft = np.array((start_m, start_m + 3.0))
            head = np.array((start_m + 3.0, start_m + 3.0, start_m + 5.0))
            fill_polygons(image, [view.strip(-0.08, 0.08, shaft)], colour)
            fill_polygons(image, [view.project(np.array((-0.4, 0.4, 0.0)), head)], colour)


def _cast_tree_shadows(
    shade: NDArray[np.uint8], view: View, scene: TrainingRoad, distance_m: float
) -> NDArray[np.uint8]:
    """Add blotches across the road, one cluster per tree, in half-size pixels."""
    place = scene.roadside
    mask = np.zeros_like(shade)
    for tree_m in marks_ahead(view, 0.0, place.tree_spacing_m, distance_m, SHADOW_REACH_M):
        seed = abs(round(float(tree_m + distance_m) / place.tree_spacing_m))
        rng = np.random.default_rng(seed)
        for _ in range(10):
            turn = np.linspace(0, 2 * np.pi, 9)[:-1]
            reach = rng.uniform(0.3, 1.8) * rng.uniform(0.6, 1.3, turn.shape)
            z_m = tree_m + rng.uniform(-5, 5) + reach * np.sin(turn)
            if z_m.min() > view.z_m[0]:
                offset_m = rng.uniform(place.edge_left_m - 2, place.edge_right_m) + reach * np.cos(
                    turn
                )
                blotch = (view.project(offset_m, z_m) - (0, horizon_row(view))) / 2
                fill_polygons(mask, [blotch], (255.0, 255.0, 255.0))
    dark = cv2.multiply(shade, scene.tree_shadow)
    return np.asarray(np.where(cv2.blur(mask, (3, 3)) > 127, dark, shade), np.uint8)


def _roll(
    image: NDArray[np.uint8], lanes: list[NDArray[np.float32]], roll_rad: float
) -> tuple[NDArray[np.uint8], list[NDArray[np.float32]]]:
    """Rotate the image about its centre, and the labels with it."""
    height, width = image.shape[:2]
    turn = cv2.getRotationMatrix2D((width / 2, height / 2), -np.degrees(roll_rad), 1.0)
    turned = cv2.warpAffine(image, turn, (width, height), borderMode=cv2.BORDER_REPLICATE)
    matrix, shift = turn[:, :2].astype(np.float32), turn[:, 2].astype(np.float32)
    return turned, [lane @ matrix.T + shift for lane in lanes]
