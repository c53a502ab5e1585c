"""Roads beyond the clear motorway: each name changes a scene in one way, and names combine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.tools.road.scene import VERGES, Branch, RoadScene, mix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Vary = Callable[[RoadScene, np.random.Generator], RoadScene]


def varied(scene: RoadScene, names: Sequence[str], seed: int) -> RoadScene:
    """Return the scene with the named conditions; the same seed always gives the same scene.

    Raises:
        KeyError: a name is not in `VARIANTS`.
    """
    rng = np.random.default_rng((seed, 77))
    scene = replace(scene, conditions=replace(scene.conditions, seed=seed))
    for name in names:
        scene = VARIANTS[name](scene, rng)
    return scene


def _weather(scene: RoadScene, **changes: Any) -> RoadScene:
    """Return the scene with other values of fields of its `Conditions`."""
    return replace(scene, conditions=replace(scene.conditions, **changes))


def _night(scene: RoadScene, rng: np.random.Generator) -> RoadScene:
    place = scene.roadside
    lit = rng.random() < 0.3
    dark = replace(place, asphalt=mix(place.asphalt, (40.0, 40.0, 42.0), 0.4))
    return _weather(
        replace(scene, roadside=dark),
        ambient=rng.uniform(0.12, 0.25) if lit else rng.uniform(0.015, 0.09),
        # A camera that sees little exposes for long: the road before the vehicle is white.
        beam=rng.uniform(0.7, 1.3) if rng.random() < 0.7 else rng.uniform(1.3, 2.3),
        street_lamp_m=rng.uniform(25, 45) if lit else 0.0,
        oncoming=int(rng.integers(0, 5)),
        noise=rng.uniform(2, 9),
        blur_px=rng.uniform(0.0, 1.0),
    )


def _rain(scene: RoadScene, rng: np.random.Generator) -> RoadScene:
    return _weather(
        scene,
        wet=rng.uniform(0.4, 1.0),
        rain=rng.uniform(0.3, 1.0),
        wiper=0.25,
        fog=rng.uniform(0.1, 0.45),
        ambient=min(scene.conditions.ambient, rng.uniform(0.6, 0.95)),
        beam=0.15 if scene.conditions.ambient == 1.0 else scene.conditions.beam,
    )


def _wet(scene: RoadScene, rng: np.random.Generator) -> RoadScene:
    return _weather(scene, wet=rng.uniform(0.3, 1.0))


def _snow(scene: RoadScene, rng: np.random.Generator) -> RoadScene:
    place = scene.roadside
    white = mix(place.verge, (230.0, 225.0, 222.0), rng.uniform(0.6, 1.0))
    slush = mix(place.shoulder, (200.0, 196.0, 194.0), rng.uniform(0.2, 0.8))
    return _weather(
        replace(scene, roadside=replace(place, verge=white, shoulder=slush)),
        snow=rng.uniform(0.3, 1.0),
        wet=rng.uniform(0.0, 0.7),
    )


def _sun(scene: RoadScene, rng: np.random.Generator) -> RoadScene:
    return _weather(
        scene,
        sun=rng.uniform(0.45, 1.0),
        sun_at=(rng.uniform(0.15, 0.85), rng.uniform(0.02, 0.3)),
        wet=rng.uniform(0.0, 0.3),
    )


def _tunnel(scene: RoadScene, rng: np.random.Generator) -> RoadScene:
    place = replace(scene.roadside, tree_spacing_m=0.0, barrier_height_m=(0.9, 0.9))
    scene = replace(scene, roadside=place)
    return _weather(scene, tunnel=True, ambient=rng.uniform(0.3, 0.7), beam=0.4, noise=3.0)


def _barrier(scene: RoadScene, rng: np.random.Generator) -> RoadScene:
    """Barriers, walls and rails close to the edge lines."""
    outer = [line.offset_m for line in scene.lines] or [-2.0, 2.0]
    heights = rng.uniform(0.5, 2.2, 2) * (rng.random(2) < 0.8)
    place = replace(
        scene.roadside,
        edge_left_m=min(outer) - rng.uniform(0.15, 0.8),
        edge_right_m=max(outer) + rng.uniform(0.15, 0.8),
        barrier_height_m=(float(heights[0]), float(heights[1])),
        barrier=mix(VERGES[3], (200.0, 200.0, 200.0), rng.uniform(0, 1)),
        rail=bool(rng.random() < 0.5),
    )
    return replace(scene, roadside=place)


def _worn(scene: RoadScene, rng: np.random.Generator) -> RoadScene:
    asphalt = scene.roadside.asphalt
    lines = tuple(
        replace(
            line,
            missing=float(rng.uniform(0.1, 0.6)),
            colour=mix(line.colour, asphalt, rng.uniform(0.2, 0.5)),
        )
        for line in scene.lines
    )
    return replace(scene, lines=lines)


def _missing(scene: RoadScene, rng: np.random.Generator) -> RoadScene:
    """One line is gone for long stretches."""
    if not scene.lines:
        return scene
    lines = list(scene.lines)
    place = int(rng.integers(len(lines)))
    lines[place] = replace(lines[place], missing=float(rng.uniform(0.55, 0.8)))
    return replace(scene, lines=tuple(lines))


def _dots(scene: RoadScene, rng: np.random.Generator) -> RoadScene:
    """Botts' dots instead of dashes."""
    spacing_m = float(rng.choice((1.0, 1.2, 2.4)))
    lines = tuple(
        replace(line, dash_m=0.12, period_m=spacing_m, width_m=0.11, strokes_m=(0.0,))
        if line.dash_m < line.period_m
        else line
        for line in scene.lines
    )
    return replace(scene, lines=lines)


def _double(scene: RoadScene, rng: np.random.Generator) -> RoadScene:
    """A double line, here and there with one stroke dashed."""
    if not scene.lines:
        return scene
    lines = list(scene.lines)
    place = 0 if rng.random() < 0.7 else int(rng.integers(len(lines)))
    line = lines[place]
    lines[place] = replace(
        line, strokes_m=(-1.1 * line.width_m, 1.1 * line.width_m), dash_m=line.period_m
    )
    return replace(scene, lines=tuple(lines))


def _branch(scene: RoadScene, rng: np.random.Generator, *, joins: bool) -> RoadScene:
    if not scene.lines:
        return scene
    side = 1 if rng.random() < 0.8 else -1
    line = scene.lines[-1] if side > 0 else scene.lines[0]
    branch = Branch(
        line=line,
        lane_m=rng.uniform(3.2, 3.8),
        side=side,
        away_m=rng.uniform(6.0, 20.0),
        at_m=rng.uniform(0, 250.0),
        length_m=rng.uniform(120.0, 200.0),
        period_m=260.0,
        joins=joins,
    )
    # Its own barrier would stand in its way.
    place = replace(scene.roadside, barrier_height_m=(0.0, 0.0))
    return replace(scene, roadside=place, branches=(*scene.branches, branch))


def _crest(scene: RoadScene, rng: np.random.Generator) -> RoadScene:
    course = replace(
        scene.course,
        grade_per_m=rng.uniform(2e-4, 9e-4),
        grade_wavelength_m=rng.uniform(250, 600),
    )
    return replace(scene, course=course)


def _bend(scene: RoadScene, rng: np.random.Generator) -> RoadScene:
    """A mountain road of two lanes: radii from 30 m."""
    radius_m = 30.0 * (300.0 / 30.0) ** rng.uniform(0, 1)
    course = replace(
        scene.course,
        tight=True,
        curvature_per_m=float(rng.choice((-1, 1))) / radius_m,
        # Half a wave turns by this angle.
        curvature_wavelength_m=float(np.pi * radius_m * rng.uniform(0.5, 1.7)),
        curvature_phase=rng.uniform(0, 2 * np.pi),
        sway_m=min(scene.course.sway_m, 0.4),
    )
    return replace(_two_lanes(scene, rng), course=course)


def _two_lanes(scene: RoadScene, rng: np.random.Generator) -> RoadScene:
    """Keep the own lane and one beside it."""
    lines = sorted(scene.lines, key=lambda line: abs(line.offset_m))[:3]
    if len(lines) < 2:
        return scene
    lines.sort(key=lambda line: line.offset_m)
    middle = min(range(len(lines)), key=lambda i: abs(lines[i].offset_m))
    solid = [
        replace(line, dash_m=line.period_m) if i != middle or rng.random() < 0.5 else line
        for i, line in enumerate(lines)
    ]
    place = replace(
        scene.roadside,
        edge_left_m=lines[0].offset_m - rng.uniform(0.1, 0.9),
        edge_right_m=lines[-1].offset_m + rng.uniform(0.1, 0.9),
    )
    reach_m = lines[0].offset_m - 1.0, lines[-1].offset_m + 1.0
    vehicles = tuple(v for v in scene.vehicles if reach_m[0] < v.lane_m < reach_m[1])
    return replace(scene, lines=tuple(solid), roadside=place, vehicles=vehicles[:1])


def _left(scene: RoadScene, _: np.random.Generator) -> RoadScene:
    """Left-hand traffic: the road as in a mirror."""
    place = scene.roadside
    course = replace(
        scene.course,
        curvature_per_m=-scene.course.curvature_per_m,
        heading_rad=-scene.course.heading_rad,
    )
    return replace(
        scene,
        course=course,
        lines=tuple(replace(line, offset_m=-line.offset_m) for line in scene.lines[::-1]),
        vehicles=tuple(replace(v, lane_m=-v.lane_m) for v in scene.vehicles),
        roadside=replace(
            place,
            edge_left_m=-place.edge_right_m,
            edge_right_m=-place.edge_left_m,
            barrier_height_m=place.barrier_height_m[::-1],
        ),
        branches=tuple(
            replace(b, side=-b.side, line=replace(b.line, offset_m=-b.line.offset_m))
            for b in scene.branches
        ),
    )


def _camera(scene: RoadScene, rng: np.random.Generator) -> RoadScene:
    """Another camera: 0.6 to 2.5 m high, 40 to 110 degrees wide, tilted by up to 6 degrees."""
    half_rad = np.radians(rng.uniform(40, 110)) / 2
    focal = 0.5 / np.tan(half_rad)
    tilt = np.tan(np.radians(rng.uniform(-6, 6))) * focal * 16 / 9
    camera = replace(
        scene.camera,
        focal=float(focal),
        horizon=float(np.clip(0.45 + tilt, 0.28, 0.6)),
        height_m=rng.uniform(0.6, 2.5),
    )
    return replace(scene, camera=camera)


def _bonnet(scene: RoadScene, rng: np.random.Generator) -> RoadScene:
    return _weather(scene, bonnet=rng.uniform(0.04, 0.16))


def _sensor(scene: RoadScene, rng: np.random.Generator) -> RoadScene:
    """A cheap camera: noise, movement and strong compression."""
    return _weather(
        scene,
        noise=rng.uniform(2, 14),
        jpeg=int(rng.integers(8, 45)),
        blur_px=rng.uniform(0.0, 1.6),
    )


VARIANTS: dict[str, Vary] = {
    "night": _night,
    "rain": _rain,
    "wet": _wet,
    "snow": _snow,
    "sun": _sun,
    "tunnel": _tunnel,
    "barrier": _barrier,
    "worn": _worn,
    "missing": _missing,
    "dots": _dots,
    "double": _double,
    "fork": partial(_branch, joins=False),
    "merge": partial(_branch, joins=True),
    "crest": _crest,
    "bend": _bend,
    "left": _left,
    "camera": _camera,
    "bonnet": _bonnet,
    "sensor": _sensor,
}
