"""The camera and the road's course: project the road ahead into the image, and draw there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import cv2
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
        height_m: above the road.
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
        self, offset_m: float | NDArray[np.float64], z_m: NDArray[np.float64], up_m: float = 0.0
    ) -> NDArray[np.float64]:
        """Return the pixels (..., 2) of points beside the lane's middle, `up_m` above the road."""
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
        up_m: float,
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
        """Return the outline (2N, 2) of a band of road."""
        return np.concatenate((self.project(left_m, z_m), self.project(right_m, z_m)[::-1]))


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
    wave = 2 * np.pi * (distance_m + z_m) / course.curvature_wavelength_m + course.curvature_phase
    curvature = course.curvature_per_m * np.sin(wave)
    if course.tight:
        z_m = np.concatenate((np.linspace(0.1, 0.99, 12) * z_m[0], z_m))
        return _look_round(camera, course, distance_m, _Picture(width, height, z_m, pose))
    step = np.diff(z_m, prepend=0.0)
    heading = course.heading_rad + pose.heading_rad + np.cumsum(curvature * step)
    sway = course.sway_m * np.sin(2 * np.pi * distance_m / course.sway_wavelength_m)
    centre_m = np.cumsum(heading * step) - sway + pose.left_m
    row_px = camera.horizon * height + scale_px * (
        camera.height_m / z_m - _rise(course, distance_m, z_m) - pose.pitch_rad
    )
    # Beyond a crest the ground's rows descend in the image again: hidden.
    visible = np.append(True, np.cumprod(np.diff(row_px) < 0).astype(bool))
    horizon_px = camera.horizon * height - scale_px * pose.pitch_rad
    road = z_m[visible], centre_m[visible], row_px[visible]
    return View(*road, scale_px, width, height, horizon_px)


def _rise(course: Course, distance_m: float, z_m: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how far the road has risen, by its distance ahead."""
    if not course.grade_wavelength_m:
        return np.asarray(0.5 * course.grade_per_m * z_m)
    wave = 2 * np.pi * (distance_m + z_m) / course.grade_wavelength_m
    step = np.diff(z_m, prepend=0.0)
    slope = np.cumsum(course.grade_per_m * np.sin(wave) * step)
    return np.asarray(np.cumsum(slope * step) / z_m)


class _Picture(NamedTuple):
    width: int
    height: int
    z_m: NDArray[np.float64]
    pose: Pose


def _look_round(
    camera: PinholeCamera, course: Course, distance_m: float, picture: _Picture
) -> View:
    """Project a road with tight bends, up to where it turns away."""
    width, height, z_m, pose = picture
    scale_px = camera.focal * width
    step = np.diff(z_m, prepend=0.0)
    wave = 2 * np.pi * (distance_m + z_m) / course.curvature_wavelength_m + course.curvature_phase
    turned = course.curvature_per_m * np.sin(wave) * step
    turn = course.heading_rad + pose.heading_rad + np.cumsum(turned)
    halfway = turn - 0.5 * turned
    sway = course.sway_m * np.sin(2 * np.pi * distance_m / course.sway_wavelength_m)
    aside_m = np.cumsum(np.sin(halfway) * step) - sway + pose.left_m
    ahead_m = np.cumsum(np.cos(halfway) * step)
    below_m = camera.height_m - _rise(course, distance_m, z_m) * z_m
    horizon_px = camera.horizon * height - scale_px * pose.pitch_rad
    row_px = horizon_px + scale_px * below_m / ahead_m
    visible = np.append(True, (np.diff(row_px) < 0) & (np.abs(turn[1:]) < FARTHEST_TURN_RAD))
    visible = np.cumprod(visible).astype(bool)
    bend = Bend(ahead_m[visible], turn[visible], below_m[visible])
    road = z_m[visible], aside_m[visible], row_px[visible]
    return View(*road, scale_px, width, height, horizon_px, bend)


def fill_polygons(
    image: NDArray[np.uint8], outlines: list[NDArray[np.float64]], colour: Colour
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
    blue, green, red = (min(255.0, factor * channel) for channel in colour)
    return blue, green, red
