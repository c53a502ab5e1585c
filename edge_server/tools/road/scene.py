"""Light, weather and lens of a rendered road; by default a clear day and a perfect camera."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray


@dataclass(frozen=True)
class Conditions:
    """What lies between the road and the picture; `road_weather.expose` applies it.

    Shares are 0..1, 0 for nothing of it.

    Attributes:
        seed: of drops, streaks, lamps and noise.
        ambient: of daylight that is left; below 1 the vehicle has its headlights on.
        beam: brightness of the headlights.
        street_lamp_m: spacing of lamps beside the road, 0 for none.
        oncoming: number of vehicles with headlights that come towards the camera.
        sun: strength of a low sun ahead.
        sun_at: its place, as shares of the picture's width and of the height above the horizon.
        wet: the road's darkness and reflections.
        rain: streaks, drops on the windscreen.
        wiper: share of the frames in which a wiper is in the picture.
        fog: share of the view that is lost at 50 m.
        snow: beside the road, and over its edges.
        tunnel: the road is in one.
        bonnet: share of the picture's height that the vehicle's own bonnet hides.
        blur_px: of movement, at a width of 640.
        noise: standard deviation of the sensor's noise in levels.
        jpeg: quality of the compression, 0 for none.
    """

    seed: int = 0
    ambient: float = 1.0
    beam: float = 1.0
    street_lamp_m: float = 0.0
    oncoming: int = 0
    sun: float = 0.0
    sun_at: tuple[float, float] = (0.5, 0.1)
    wet: float = 0.0
    rain: float = 0.0
    wiper: float = 0.0
    fog: float = 0.0
    snow: float = 0.0
    tunnel: bool = False
    bonnet: float = 0.0
    blur_px: float = 0.0
    noise: float = 0.0
    jpeg: int = 0


CLEAR = Conditions()

Colour = tuple[float, float, float]

FARTHEST_M = 300.0
PROFILE_POINTS = 140
# Nearer than this nothing is projected.
NEAREST_M = 0.3
# A road that has turned further leaves the picture.
FARTHEST_TURN_RAD = 1.2
# Fixed-point coordinates of OpenCV's drawing functions: 1/16 pixel.
SUBPIXEL_BITS = 4
COORDINATE_LIMIT_PX = 20_000.0


@dataclass(frozen=True)
class PinholeCamera:
    """A pinhole camera above the road; lengths in metres, the rest as fractions of the image.

    Attributes:
        focal: focal length over the image width.
        horizon: height of the horizon, 0 = top of the image.
    """

    focal: float
    horizon: float
    height_m: float


@dataclass(frozen=True)
class Course:
    """The road's course. Curvature and sway are waves over the distance driven.

    Attributes:
        curvature_per_m: largest curvature; 1/150 is a tight ramp.
        curvature_wavelength_m, curvature_phase: of its slow change along the road.
        grade_per_m: vertical curvature; positive climbs.
        heading_rad: of the road relative to the camera.
        sway_m, sway_wavelength_m: amplitude and wavelength of the vehicle's drift in its lane.
        grade_wavelength_m: of the vertical curvature's change along the road; 0 keeps it.
        tight: bends turn so far within view that they are projected by their true angles; without
            it by those of small bends.
    """

    curvature_per_m: float
    curvature_wavelength_m: float
    curvature_phase: float
    grade_per_m: float
    heading_rad: float
    sway_m: float
    sway_wavelength_m: float
    grade_wavelength_m: float = 0.0
    tight: bool = False


@dataclass(frozen=True)
class Pose:
    """How the vehicle stands on its road, beside what the course says.

    Attributes:
        left_m: of the lane's middle in which the drive began.
        heading_rad: positive to the left.
        pitch_rad: positive looks down, as in braking.
    """

    left_m: float = 0.0
    heading_rad: float = 0.0
    pitch_rad: float = 0.0


@dataclass(frozen=True)
class Bend:
    """Where the road of a tight bend lies.

    Attributes:
        ahead_m: (N,) distance straight ahead of the lane's middle.
        turn_rad: (N,) direction of the road there, positive to the right.
        below_m: (N,) how far it is below the camera.
    """

    ahead_m: NDArray[np.float64]
    turn_rad: NDArray[np.float64]
    below_m: NDArray[np.float64]


@dataclass(frozen=True)
class View:
    """The road ahead at one moment, projected.

    Attributes:
        z_m: (N,) distances ahead along the road, increasing.
        centre_m: (N,) sideways position of the lane's middle.
        row_px: (N,) image row of the ground there, strictly decreasing.
        scale_px: focal length in pixels; a metre at z covers scale_px / z.
        horizon_px: image row of what is infinitely far on a level road.
        bend: of a tight course; None where `z_m` is straight ahead.
    """

    z_m: NDArray[np.float64]
    centre_m: NDArray[np.float64]
    row_px: NDArray[np.float64]
    scale_px: float
    width: int
    height: int
    horizon_px: float = 0.0
    bend: Bend | None = None

    def project(
        self,
        offset_m: float | NDArray[np.float64],
        z_m: NDArray[np.float64],
        up_m: float | NDArray[np.float64] = 0.0,
    ) -> NDArray[np.float64]:
        """Return the pixels (..., 2) of points beside the lane's middle, `up_m` above the road;
        each argument may have a value for each point."""
        if self.bend is not None:
            return self._project_bend(self.bend, offset_m, z_m, up_m)
        zoom = self.scale_px / z_m
        x = self.width / 2 + zoom * (np.interp(z_m, self.z_m, self.centre_m) + offset_m)
        y = np.interp(z_m, self.z_m, self.row_px) - zoom * up_m
        return np.stack(np.broadcast_arrays(x, y), axis=-1)

    def _project_bend(
        self,
        bend: Bend,
        offset_m: float | NDArray[np.float64],
        z_m: NDArray[np.float64],
        up_m: float | NDArray[np.float64],
    ) -> NDArray[np.float64]:
        turn = np.interp(z_m, self.z_m, bend.turn_rad)
        ahead_m = np.interp(z_m, self.z_m, bend.ahead_m) - offset_m * np.sin(turn)
        aside_m = np.interp(z_m, self.z_m, self.centre_m) + offset_m * np.cos(turn)
        zoom = self.scale_px / np.maximum(ahead_m, NEAREST_M)
        x = self.width / 2 + zoom * aside_m
        y = self.horizon_px + zoom * (np.interp(z_m, self.z_m, bend.below_m) - up_m)
        return np.stack(np.broadcast_arrays(x, y), axis=-1)

    def strip(
        self,
        left_m: float | NDArray[np.float64],
        right_m: float | NDArray[np.float64],
        z_m: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return the outlines (..., 2N, 2) of bands of road; `z_m` is (..., N)."""
        left, right = self.project(left_m, z_m), self.project(right_m, z_m)
        return np.concatenate((left, right[..., ::-1, :]), axis=-2)


def look(
    camera: PinholeCamera,
    course: Course,
    distance_m: float,
    width: int,
    height: int,
    *,
    pose: Pose | None = None,
) -> View:
    """Integrate heading and position along the road ahead and project the ground.

    A pitch moves the horizon, as a lens does that is shifted: for angles of a degree or two the
    picture differs from a tilted camera's by less than 0.5 %.
    """
    pose = pose or Pose()
    scale_px = camera.focal * width
    nearest_m = scale_px * camera.height_m / ((1.0 - camera.horizon) * height)
    z_m = np.geomspace(0.85 * nearest_m, FARTHEST_M, PROFILE_POINTS)
    if course.tight:
        z_m = np.concatenate((np.linspace(0.1, 0.99, 12) * z_m[0], z_m))
    bends = course.curvature_per_m, course.curvature_wavelength_m, course.curvature_phase
    heading_rad = course.heading_rad + pose.heading_rad
    turned, bent_m = _integrals(*bends, distance_m, z_m)
    turn = heading_rad + turned
    sway = course.sway_m * np.sin(2 * np.pi * distance_m / course.sway_wavelength_m)
    rise = _rise(course, distance_m, z_m)
    horizon_px = camera.horizon * height - scale_px * pose.pitch_rad
    if course.tight:
        step = np.diff(z_m, prepend=0.0)
        halfway = heading_rad + _integrals(*bends, distance_m, z_m - 0.5 * step)[0]
        aside_m = np.cumsum(np.sin(halfway) * step)
        ahead_m = np.cumsum(np.cos(halfway) * step)
        below_m = camera.height_m - rise * z_m
        row_px = horizon_px + scale_px * below_m / ahead_m
        shown = (np.diff(row_px) < 0) & (np.abs(turn[1:]) < FARTHEST_TURN_RAD)
    else:
        aside_m = heading_rad * z_m + bent_m
        row_px = camera.horizon * height + scale_px * (
            camera.height_m / z_m - rise - pose.pitch_rad
        )
        shown = np.diff(row_px) < 0
    # Beyond a crest the ground's rows descend in the image again: hidden, as is what turns away.
    visible = np.append(True, np.cumprod(shown).astype(bool))
    bend = Bend(ahead_m[visible], turn[visible], below_m[visible]) if course.tight else None
    road = z_m[visible], (aside_m - sway + pose.left_m)[visible], row_px[visible]
    return View(*road, scale_px, width, height, horizon_px, bend)


def _rise(course: Course, distance_m: float, z_m: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how far the road has risen, by its distance ahead."""
    if not course.grade_wavelength_m:
        return np.asarray(0.5 * course.grade_per_m * z_m)
    _, risen_m = _integrals(course.grade_per_m, course.grade_wavelength_m, 0.0, distance_m, z_m)
    return risen_m / z_m


def _integrals(
    per_m: float,
    wavelength_m: float,
    phase: float,
    distance_m: float,
    z_m: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the change of direction from the vehicle to `z_m` ahead, and how far that leads aside,
    where the direction changes by `per_m` times a sine of the way."""
    rate = 2 * np.pi / wavelength_m
    begin = rate * distance_m + phase
    at = begin + rate * z_m
    turned = per_m / rate * (np.cos(begin) - np.cos(at))
    aside_m = per_m / rate * (z_m * np.cos(begin) - (np.sin(at) - np.sin(begin)) / rate)
    return turned, aside_m


def fill_polygons(
    image: NDArray[np.uint8], outlines: Iterable[NDArray[np.float64]], colour: Colour
) -> None:
    """Fill anti-aliased polygons given in pixels."""
    clipped = [np.clip(outline, -COORDINATE_LIMIT_PX, COORDINATE_LIMIT_PX) for outline in outlines]
    fixed = [np.round(outline * (1 << SUBPIXEL_BITS)).astype(np.int32) for outline in clipped]
    cv2.fillPoly(image, fixed, colour, cv2.LINE_AA, SUBPIXEL_BITS)


def marks_ahead(
    view: View, phase_m: float, period_m: float, distance_m: float, reach_m: float
) -> NDArray[np.float64]:
    """Return the distances ahead of objects repeated every `period_m` along the road."""
    first = np.floor((distance_m + view.z_m[0] - phase_m) / period_m) - 1
    last = np.ceil((distance_m + min(reach_m, view.z_m[-1]) - phase_m) / period_m)
    return np.arange(first, last + 1) * period_m + phase_m - distance_m


def scaled(colour: Colour, factor: float) -> Colour:
    """Return the same colour, brighter or darker."""
    blue, green, red = [min(255.0, factor * channel) for channel in colour]
    return blue, green, red


TEXTURE_PX = 512
TEXTURE_MIDDLE = 128

WHITE: Colour = (225.0, 228.0, 230.0)
YELLOW: Colour = (60.0, 175.0, 225.0)
WORN: Colour = (95.0, 95.0, 95.0)  # what is left of a line is asphalt
VERGES: tuple[Colour, ...] = (
    *((60.0, 120.0, 95.0), (75.0, 135.0, 150.0)),
    *((90.0, 120.0, 130.0), (70.0, 90.0, 75.0)),
)
BARRIERS: tuple[Colour, Colour] = (165.0, 168.0, 170.0), (110.0, 105.0, 100.0)
HILLS = np.array((75, 95, 80))
# A branch is as wide as a lane at this share of its length, and then leads away; the gore between
# it and the road begins where they are so far apart.
_WIDENED = 0.3
_GORE_M = 0.25


@dataclass(frozen=True)
class Line:
    """One painted boundary.

    Attributes:
        offset_m: sideways from the middle of the vehicle's lane, positive to the right.
        strokes_m: sideways offsets of the parallel strokes (two for a double line).
        width_m: of one stroke.
        dash_m, period_m: painted length and repeat; equal for a solid line.
        phase_m: where the first dash begins.
        colour: BGR, already mixed with the asphalt by wear.
        missing: share of the paint that is gone, in patches.
    """

    offset_m: float
    strokes_m: tuple[float, ...]
    width_m: float
    dash_m: float
    period_m: float
    phase_m: float
    colour: Colour
    missing: float = 0.0


@dataclass(frozen=True)
class Branch:
    """A lane that leaves the road, or joins it, again and again.

    Attributes:
        line: of the road's edge, beside which it begins, and of its own two lines.
        lane_m: its width.
        side: 1 to the right of `line`, -1 to its left.
        away_m: how far from the road it is led.
        at_m, length_m, period_m: where along the road it begins, how long it is, and the repeat.
        joins: it comes from the side instead of leaving.
    """

    line: Line
    lane_m: float
    side: int
    away_m: float
    at_m: float
    length_m: float
    period_m: float
    joins: bool

    def edges_m(
        self, phase_m: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the offsets of the lines beside and away from the road, at a distance of 0 to
        `length_m` from the beginning; the first is NaN where the lane is still part of the road."""
        share = phase_m / self.length_m
        if self.joins:
            share = 1.0 - share
        widened = np.clip(share / _WIDENED, 0.0, 1.0)
        width_m = self.lane_m * widened**2 * (3.0 - 2.0 * widened)
        led_m = self.away_m * np.clip((share - _WIDENED) / (1.0 - _WIDENED), 0.0, 1.0) ** 2
        inner_m = self.line.offset_m + self.side * np.where(led_m > _GORE_M, led_m, np.nan)
        return inner_m, self.line.offset_m + self.side * (led_m + width_m)


@dataclass(frozen=True)
class DrawnVehicle:
    """A box on the road about `ahead_m` ahead, whose distance oscillates by `swing_m`."""

    lane_m: float
    ahead_m: float
    swing_m: float
    width_m: float
    height_m: float
    colour: Colour


@dataclass(frozen=True, eq=False)
class Roadside:
    """Objects beside, on and above the road.

    Attributes:
        asphalt, verge, shoulder: BGR of the surfaces.
        edge_left_m, edge_right_m: where the pavement ends.
        barrier_height_m: left and right, 0 for none.
        barrier: BGR.
        texture: (512, 512) uint8 brightness of the ground, 128 = unchanged; it tiles.
        backdrop: (h, w, 3) uint8 BGR sky and hills, its bottom edge at the horizon.
        tree_spacing_m: 0 for none.
        rail: barriers are rails on posts.
    """

    asphalt: Colour
    verge: Colour
    shoulder: Colour
    edge_left_m: float
    edge_right_m: float
    barrier_height_m: tuple[float, float]
    barrier: Colour
    texture: NDArray[np.uint8]
    backdrop: NDArray[np.uint8]
    tree_spacing_m: float
    rail: bool = False


@dataclass(frozen=True)
class RoadScene:
    """A road, its camera and all visible objects; `render` turns the scene into images."""

    camera: PinholeCamera
    course: Course
    lines: tuple[Line, ...]
    vehicles: tuple[DrawnVehicle, ...]
    roadside: Roadside
    branches: tuple[Branch, ...] = field(default=(), kw_only=True)
    conditions: Conditions = field(default=CLEAR, kw_only=True)

    @classmethod
    def for_camera(cls, seed: int) -> RoadScene:
        """Return a motorway by daylight: three or four clear lines, mild curves."""
        rng = np.random.default_rng(seed)
        lane_m = rng.uniform(3.5, 3.7)
        left, right = ((1, 2), (2, 1), (2, 2))[int(rng.integers(0, 3))]
        camera = PinholeCamera(
            rng.uniform(0.85, 1.0), rng.uniform(0.38, 0.44), rng.uniform(1.3, 1.5)
        )
        course = Course(
            curvature_per_m=rng.uniform(1 / 1500, 1 / 700) * rng.choice((-1, 1)),
            curvature_wavelength_m=rng.uniform(900, 1500),
            curvature_phase=rng.uniform(0, 2 * np.pi),
            grade_per_m=0.0,
            heading_rad=0.0,
            sway_m=rng.uniform(0.08, 0.2),
            sway_wavelength_m=rng.uniform(150, 300),
        )
        lines = _lines(rng, lane_m, left, right)
        roadside = _roadside(rng, lines)
        return cls(camera, course, lines, traffic(rng, lane_m, left, right, 3), roadside)


def mix(a: Colour, b: Colour, share_b: float) -> Colour:
    """Return the colour between `a` and `b`."""
    blue, green, red = (x + (y - x) * share_b for x, y in zip(a, b, strict=True))
    return blue, green, red


def _lines(rng: np.random.Generator, lane_m: float, left: int, right: int) -> tuple[Line, ...]:
    """Boundaries of `left + right - 1` lanes: solid at the edges, dashed between."""
    dash_m, period_m = 3.0, 12.0
    count = left + right
    lines = []
    for place in range(count):
        colour = YELLOW if place == 0 and rng.random() < 0.5 else WHITE
        width_m = rng.uniform(0.12, 0.18)
        lines.append(
            Line(
                offset_m=(place - left + 0.5) * lane_m,
                strokes_m=(0.0,),
                width_m=width_m,
                dash_m=period_m if place in (0, count - 1) else dash_m,
                period_m=period_m,
                phase_m=rng.uniform(0, period_m),
                colour=mix(colour, WORN, 0.08 * rng.uniform(0.6, 1.3)),
            )
        )
    return tuple(lines)


def traffic(
    rng: np.random.Generator, lane_m: float, left: int, right: int, count: int
) -> tuple[DrawnVehicle, ...]:
    """Return `count` cars and lorries in the lanes ahead."""
    vehicles = []
    for _ in range(count):
        tall = rng.random() < 0.25
        lane = int(rng.integers(1 - left, max(right, 2 - left)))
        grey = rng.uniform(20, 220)
        tint = rng.uniform(-12, 12, 3) if rng.random() < 0.7 else rng.uniform(-90, 50, 3)
        blue, green, red = np.clip(grey + tint, 8, 245)
        vehicles.append(
            DrawnVehicle(
                lane_m=lane * lane_m + rng.uniform(-0.3, 0.3),
                ahead_m=rng.uniform(14, 90) if lane else rng.uniform(24, 90),
                swing_m=rng.uniform(-8, 8),
                width_m=rng.uniform(2.3, 2.6) if tall else rng.uniform(1.7, 2.0),
                height_m=rng.uniform(2.8, 3.8) if tall else rng.uniform(1.35, 1.8),
                colour=(float(blue), float(green), float(red)),
            )
        )
    return tuple(vehicles)


def _roadside(rng: np.random.Generator, lines: tuple[Line, ...]) -> Roadside:
    grey = rng.uniform(85, 110)
    asphalt = (grey * rng.uniform(0.97, 1.05), grey, grey * rng.uniform(0.95, 1.05))
    verge = VERGES[int(rng.integers(0, 2))]
    texture = asphalt_texture(rng, rng.uniform(6, 9), (1, 4))
    has_barrier = rng.random(2) < 0.35
    barrier_left_m, barrier_right_m = np.where(has_barrier, rng.uniform(0.6, 1.1, 2), 0.0)
    return Roadside(
        asphalt=asphalt,
        verge=mix(verge, (128.0, 128.0, 128.0), rng.uniform(0, 0.3)),
        shoulder=mix(asphalt, (140.0, 145.0, 150.0), rng.uniform(0.0, 0.35)),
        edge_left_m=lines[0].offset_m - rng.uniform(0.4, 2.5),
        edge_right_m=lines[-1].offset_m + rng.uniform(0.6, 3.5),
        barrier_height_m=(float(barrier_left_m), float(barrier_right_m)),
        barrier=mix(*BARRIERS, rng.uniform(0, 1)),
        texture=texture,
        backdrop=backdrop(rng, np.array((205, 150, 95)), np.array((235, 220, 205)), lambda: HILLS),
        tree_spacing_m=rng.uniform(14, 40),
    )


def asphalt_texture(
    rng: np.random.Generator, contrast: float, polish: tuple[float, float]
) -> NDArray[np.uint8]:
    """Return (512, 512) uint8 brightness of the ground, 128 = unchanged.

    Args:
        contrast: of the noise.
        polish: range of the tyres' tracks' brightness.
    """
    texture = TEXTURE_MIDDLE + contrast * noise_tile(rng, (8, 32, 128, 256))
    # Tyres polish two bands in every lane; the tile is two lanes wide, so the bands are periodic.
    across = np.cos(np.linspace(0, 8 * np.pi, TEXTURE_PX, endpoint=False)).astype(np.float32)
    texture += rng.uniform(*polish) * across
    return np.asarray(np.clip(texture, 20, 250).astype(np.uint8))


def noise_tile(rng: np.random.Generator, scales: tuple[int, ...]) -> NDArray[np.float32]:
    """Return (512, 512) float32 noise of several octaves, about -1..1, periodic at its edges."""
    tile = np.zeros((TEXTURE_PX, TEXTURE_PX), np.float32)
    for cells in scales:
        coarse = rng.standard_normal((cells, cells)).astype(np.float32)
        wrapped = np.pad(coarse, 2, mode="wrap")
        size = TEXTURE_PX * (cells + 4) // cells
        pad = 2 * TEXTURE_PX // cells
        tile += cv2.resize(wrapped, (size, size))[pad : pad + TEXTURE_PX, pad : pad + TEXTURE_PX]
    return np.asarray(tile / len(scales) ** 0.5, np.float32)


def backdrop(
    rng: np.random.Generator,
    zenith: NDArray[Any],
    haze: NDArray[Any],
    hills: Callable[[], NDArray[Any]],
) -> NDArray[np.uint8]:
    """Return sky with a few clouds, and two ranges of hills along the bottom edge.

    Args:
        zenith, haze: BGR at the top and at the horizon.
        hills: returns the BGR of the next range.
    """
    height, width = 200, 640
    fade = np.linspace(0, 1, height)[:, None, None] ** 1.5
    sky = (zenith * (1 - fade) + haze * fade).astype(np.float32).repeat(width, 1)
    cloud = cv2.resize(noise_tile(rng, (4, 8, 16, 32))[:, :128], (width, height))
    cover = np.clip(cloud - rng.uniform(0.3, 1.2), 0, 1)[..., None] * (1 - 0.5 * fade)
    sky += (245 - sky) * np.minimum(cover, 0.8)
    columns = np.arange(width)
    for share, tone in ((0.22, 0.45), (0.1, 0.8)):
        waves = np.zeros(width)
        for k in (1, 2, 5, 9, 23):
            waves += np.sin(columns / width * 2 * np.pi * k + rng.uniform(0, 6.28)) / k
        crest = height * (1 - share * rng.uniform(0.3, 1.0) * (1.1 + 0.5 * waves))
        below = np.arange(height)[:, None] > crest[None]
        sky[below] = haze + (hills() - haze) * tone
    return np.clip(sky, 0, 255).astype(np.uint8)
