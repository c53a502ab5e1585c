"""What light, weather, windscreen and sensor make of a painted road."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge_server.tools.road.scene import fill_polygons, marks_ahead

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.tools.road.scene import Conditions, RoadScene, View

    Floats = NDArray[np.float32]

# Light and glow change slowly across the picture: they are computed for every fourth pixel.
COARSE_PX = 4
LAMP_HEIGHT_M, STREET_LAMP_HEIGHT_M = 0.7, 6.0
LAMP_VIEW_M = 160.0
TUNNEL_HEIGHT_M, TUNNEL_LAMP_M = 5.0, 12.0
SNOW = (232.0, 226.0, 222.0)
SNOW_VIEW_M = 90.0
REFERENCE_WIDTH_PX = 640.0


def expose(
    image: NDArray[np.uint8], view: View, scene: RoadScene, distance_m: float
) -> NDArray[np.uint8]:
    """Return the picture that the scene's conditions make of a painted road by clear daylight.

    The same arguments always give the same picture. No pixel of the road is moved.
    """
    weather = scene.conditions
    rng = np.random.default_rng((weather.seed, round(abs(distance_m) * 100)))
    if weather.snow:
        _pile_snow(image, view, scene, distance_m)
    if weather.tunnel:
        _build_tunnel(image, view, scene, distance_m)
    picture = image.astype(np.float32)
    if weather.wet:
        _wet(picture, view, scene)
    lit = weather.ambient < 1.0
    if lit:
        _shine(picture, view, weather)
    if weather.fog:
        _fog(picture, view, weather)
    glow = _glow(view, scene, distance_m) if lit or weather.sun else None
    if glow is not None:
        picture += cv2.resize(glow, (view.width, view.height))
    if weather.sun:
        _veil(picture, view, weather)
    if weather.rain:
        _rain(picture, weather, rng)
    if weather.bonnet:
        draw_bonnet(picture, weather.bonnet, weather.ambient, np.random.default_rng(weather.seed))
    return _sense(picture, weather, rng)


def draw_bonnet(picture: Floats, share: float, ambient: float, rng: np.random.Generator) -> None:
    """Hide the lower edge behind the vehicle's own bonnet, which mirrors the sky.

    Args:
        share: of the picture's height, in the middle.
        ambient: light around, 1 by day.
    """
    height, width = picture.shape[:2]
    x = np.arange(width, dtype=np.float32) / width - 0.5
    top = height * (1.0 - share * (1.0 - rng.uniform(0.3, 1.2) * (2 * x) ** 2))
    first = max(int(top.min()), 0)
    y = np.arange(first, height, dtype=np.float32)[:, None]
    cover = np.clip(y - top, 0.0, 1.0)[..., None]
    shine = np.clip(1.0 - (y - top) / (0.06 * height), 0.0, 1.0)[..., None]
    paint = rng.uniform(10, 90, 3).astype(np.float32) * max(ambient, 0.1)
    mirrored = picture[: max(height // 4, 1)].mean(axis=(0, 1)) * 0.5
    picture[first:] += cover * (paint + shine * mirrored - picture[first:])


def _coarse(view: View) -> tuple[Floats, Floats]:
    """Return x (1, w) and y (h, 1) of every fourth pixel."""
    x = np.arange(0, view.width, COARSE_PX, dtype=np.float32)[None]
    y = np.arange(0, view.height, COARSE_PX, dtype=np.float32)[:, None]
    return x, y


def _ahead_m(view: View, y_px: Floats) -> Floats:
    """Return how far the ground of a row is on a level road, up to 300 m."""
    horizon_px, camera_m = view.horizon_px, _camera_height_m(view)
    below_px = np.maximum(y_px - horizon_px, view.scale_px * camera_m / 300.0)
    return np.asarray(view.scale_px * camera_m / below_px, np.float32)


def _camera_height_m(view: View) -> float:
    below_px = view.row_px[0] - view.horizon_px
    ahead_m = view.z_m[0] if view.bend is None else view.bend.ahead_m[0]
    return float(max(below_px * ahead_m / view.scale_px, 0.1))


def _pile_snow(image: NDArray[np.uint8], view: View, scene: RoadScene, distance_m: float) -> None:
    """Cover the verges, and parts of the road's edges, whose border is uneven."""
    place, snow = scene.roadside, scene.conditions.snow
    z_m = view.z_m[view.z_m < SNOW_VIEW_M]
    along = (z_m + distance_m)[:, None] / np.array((2.3, 5.1, 17.0, 41.0))
    uneven = np.sin(along * 2 * np.pi + np.arange(4)).sum(axis=1) / 4
    for edge_m, side in ((place.edge_left_m, -1.0), (place.edge_right_m, 1.0)):
        begin_m = edge_m - side * snow * (0.5 + 1.1 * uneven)
        strip = view.strip(begin_m, np.full_like(z_m, edge_m + side * 9.0), z_m)
        fill_polygons(image, [strip], SNOW)
        rim = view.strip(begin_m - side * 0.25 * snow, begin_m, z_m)
        fill_polygons(image, [rim], (178.0, 174.0, 172.0))


def _build_tunnel(
    image: NDArray[np.uint8], view: View, scene: RoadScene, distance_m: float
) -> None:
    """Draw walls, a ceiling and its lamps."""
    place = scene.roadside
    left_m, right_m = place.edge_left_m - 0.6, place.edge_right_m + 0.6
    corners = [
        (view.project(edge_m, view.z_m), view.project(edge_m, view.z_m, TUNNEL_HEIGHT_M))
        for edge_m in (left_m, right_m)
    ]
    fill_polygons(image, [np.concatenate((corners[0][1], corners[1][1][::-1]))], (58.0, 60.0, 62.0))
    for foot, top in corners:
        fill_polygons(image, [np.concatenate((foot, top[::-1]))], (96.0, 102.0, 104.0))
    for edge_m in (left_m + 1.0, right_m - 1.0):
        for lamp_m in marks_ahead(view, 0.0, TUNNEL_LAMP_M, distance_m, LAMP_VIEW_M):
            if lamp_m > view.z_m[0]:
                at = np.array((lamp_m, lamp_m + 2.5))
                lamp = [view.project(edge_m + a, at, TUNNEL_HEIGHT_M - 0.1) for a in (-0.15, 0.15)]
                strip = np.concatenate((lamp[0], lamp[1][::-1]))
                fill_polygons(image, [strip], (190.0, 235.0, 250.0))


def _wet(picture: Floats, view: View, scene: RoadScene) -> None:
    """Darken the ground and mirror in it what is above the horizon, most of it far away."""
    horizon = int(np.clip(view.horizon_px, 1, view.height - 2))
    ground = picture[horizon:]
    above = picture[:horizon][::-1]
    mirrored = cv2.resize(above, (view.width, len(ground)))
    # A rough surface draws lights out towards the viewer.
    sigma = max(view.width / REFERENCE_WIDTH_PX, 0.5)
    mirrored = cv2.GaussianBlur(mirrored, (0, 0), sigmaX=3 * sigma, sigmaY=14 * sigma)
    y = np.arange(horizon, view.height, dtype=np.float32)[:, None]
    grazing = np.clip(_ahead_m(view, y) / 40.0, 0.08, 1.0) ** 0.5
    place = scene.roadside
    puddles = cv2.resize(place.texture[:256, :128], (view.width, len(ground)))
    uneven = np.clip((puddles.astype(np.float32) - 108.0) / 40.0, 0.15, 1.0)
    share = (0.75 * scene.conditions.wet * grazing * uneven)[..., None]
    ground *= 1.0 - 0.35 * scene.conditions.wet
    ground += share * (mirrored - ground)


def _shine(picture: Floats, view: View, weather: Conditions) -> None:
    """Leave of the daylight what there is, and light the road with the vehicle's headlights."""
    x, y = _coarse(view)
    z_m = _ahead_m(view, y)
    aside = (x - view.width / 2) / view.scale_px
    reach = 1.0 / (1.0 + (z_m / 24.0) ** 2) * np.clip(z_m / 5.0, 0.35, 1.0)
    beam = np.exp(-0.5 * (aside / 0.42) ** 2) * reach
    # Above the horizon a low beam lights what is near and low; the row says how much.
    up = np.clip((view.horizon_px - y) / (0.12 * view.height), 0.0, 1.0)
    beam = np.where(up > 0, 0.16 * np.exp(-0.5 * (aside / 0.6) ** 2) * (1.0 - up), beam)
    light = weather.ambient + weather.beam * (1.0 - weather.ambient) * beam.astype(np.float32)
    light = cv2.resize(light.astype(np.float32), (view.width, view.height))[..., None]
    # Paint has glass beads in it that send light back to where it comes from.
    blue, green, red = cv2.split(picture)
    brightest = cv2.max(cv2.max(blue, green), red)[..., None]
    bright = np.clip((brightest - 150.0) / 60.0, 0.0, 1.0)
    picture *= light * (1.0 + 0.9 * bright * (light > weather.ambient + 0.02))
    if weather.ambient < 0.5:
        picture *= np.array((0.92, 0.98, 1.05), np.float32)


def _fog(picture: Floats, view: View, weather: Conditions) -> None:
    """Mix the far road, and everything above it, with grey."""
    y = np.arange(view.height, dtype=np.float32)[:, None]
    kept = (1.0 - weather.fog) ** (_ahead_m(view, y) / 50.0)
    grey = 205.0 * max(weather.ambient, 0.12)
    picture += ((1.0 - kept) * 0.97)[..., None] * (grey - picture)


def _lamps(view: View, scene: RoadScene, distance_m: float) -> NDArray[np.float64]:
    """Return lamps as rows of x, y, radius in pixels, brightness of blue, green and red."""
    weather = scene.conditions
    rng = np.random.default_rng(weather.seed)
    lamps: list[tuple[float, ...]] = []

    def add(
        place_m: tuple[float, float, float], radius_m: float, colour: tuple[float, ...]
    ) -> None:
        offset_m, z_m, up_m = place_m
        if view.z_m[0] < z_m < min(LAMP_VIEW_M, float(view.z_m[-1])):
            x, y = view.project(offset_m, np.array((z_m,)), up_m)[0]
            lamps.append((x, y, max(view.scale_px * radius_m / z_m, 0.8), *colour))

    if weather.ambient < 1.0:
        for vehicle in scene.vehicles:
            rear_m = vehicle.ahead_m
            rear_m += vehicle.swing_m * np.sin(distance_m / 95.0 + vehicle.ahead_m)
            for side in (-0.4, 0.4):
                aside_m = vehicle.lane_m + side * vehicle.width_m
                tone = 1.0 - 0.75 * weather.ambient
                add((aside_m, rear_m, LAMP_HEIGHT_M), 0.16, (40 * tone, 40 * tone, 260 * tone))
        edges = [line.offset_m for line in scene.lines] or [-3.0]
        for _ in range(weather.oncoming):
            lane_m = min(edges) - rng.uniform(1.5, 5.0)
            # They come twice as fast as the road.
            gap_m = np.mod(rng.uniform(0, 180.0) - distance_m, 180.0) + 6.0
            tone = rng.uniform(0.6, 1.2)
            for side in (-0.75, 0.75):
                white = (330.0 * tone, 350.0 * tone, 360.0 * tone)
                add((lane_m + side, float(gap_m), LAMP_HEIGHT_M), 0.3, white)
        if weather.street_lamp_m:
            edge_m = scene.roadside.edge_right_m + 1.5
            for lamp_m in marks_ahead(view, 0.0, weather.street_lamp_m, distance_m, LAMP_VIEW_M):
                add((edge_m, float(lamp_m), STREET_LAMP_HEIGHT_M), 0.4, (110.0, 210.0, 290.0))
    if weather.sun:
        share_x, share_y = weather.sun_at
        y = view.horizon_px - share_y * view.height
        strength = 420.0 * weather.sun
        radius = 0.03 * view.width
        lamps.append((share_x * view.width, y, radius, 0.8 * strength, 0.93 * strength, strength))
    return np.array(lamps).reshape(-1, 6)


def _glow(view: View, scene: RoadScene, distance_m: float) -> Floats | None:
    """Return what lamps and sun add, with their halo, and their track on a wet road."""
    lamps = _lamps(view, scene, distance_m).astype(np.float32)
    if not len(lamps):
        return None
    x, y = _coarse(view)
    lamp_x, lamp_y, radius = (lamps[:, i, None, None] for i in range(3))
    away = ((x - lamp_x) ** 2 + (y - lamp_y) ** 2) / radius**2
    disc = np.exp(-0.5 * away) + 0.12 / (1.0 + away / 12.0)
    wet = max(scene.conditions.wet, 0.45 * scene.conditions.sun)
    if wet:
        below = np.maximum(y - view.horizon_px, 0.0) / view.height
        track = np.exp(-0.5 * ((x - lamp_x) / (1.6 * radius)) ** 2) * (y > lamp_y)
        disc += 0.5 * wet * track * np.exp(-5.0 * below) * (below > 0)
    return np.asarray(np.einsum("lhw,lc->hwc", disc, lamps[:, 3:]), np.float32)


def _veil(picture: Floats, view: View, weather: Conditions) -> None:
    """Take contrast out of a picture into which the sun shines."""
    x = np.arange(view.width, dtype=np.float32)[None]
    y = np.arange(view.height, dtype=np.float32)[:, None]
    at_x = weather.sun_at[0] * view.width
    at_y = view.horizon_px - weather.sun_at[1] * view.height
    away = ((x - at_x) ** 2 + (y - at_y) ** 2) / (0.6 * view.width) ** 2
    share = (0.55 * weather.sun / (1.0 + 3.0 * away))[..., None]
    picture *= 1.0 - 0.35 * weather.sun
    picture += share * (np.array((205.0, 225.0, 240.0), np.float32) - picture)


def _rain(picture: Floats, weather: Conditions, rng: np.random.Generator) -> None:
    """Draw streaks in the air, drops on the windscreen, and now and then a wiper."""
    height, width = picture.shape[:2]
    scale = width / REFERENCE_WIDTH_PX
    mask = np.zeros((height, width), np.float32)
    count = int(220 * weather.rain)
    begin = rng.uniform((0, 0), (width, height), (count, 2))
    length = rng.uniform(4, 18, count) * scale
    slant = rng.normal(0.08, 0.12)
    end = begin + np.stack((slant * length, length), axis=1)
    segments = list(np.stack((begin, end), axis=1).astype(np.int32))
    cv2.polylines(mask, segments, False, 1.0, 1, cv2.LINE_AA)
    tone = 200.0 * max(weather.ambient, 0.15)
    picture += (0.35 * mask)[..., None] * (tone - picture)
    smeared = cv2.blur(picture, (max(int(13 * scale), 3),) * 2)[::-1]
    drops = np.zeros((height, width), np.float32)
    for x, y, radius in rng.uniform((0, 0, 1.5), (width, height, 7.0), (int(60 * weather.rain), 3)):
        place = (int(x), int(y))
        axes = (max(int(radius * scale), 1), max(int(1.3 * radius * scale), 1))
        cv2.ellipse(drops, place, axes, 0, 0, 360, 0.75, -1, cv2.LINE_AA)
    picture += cv2.blur(drops, (3, 3))[..., None] * (smeared - picture)
    if rng.random() < weather.wiper:
        pivot = np.array((width * rng.uniform(0.25, 0.8), height * 1.15))
        turn = rng.uniform(-1.2, 1.2)
        tip = pivot + width * 0.75 * np.array((np.sin(turn), -np.cos(turn)))
        blade = np.zeros((height, width), np.float32)
        thick = max(int(rng.uniform(5, 13) * scale), 1)
        ends = tuple(map(int, pivot)), tuple(map(int, tip))
        cv2.line(blade, *ends, 0.93, thick, cv2.LINE_AA)
        picture += cv2.blur(blade, (5, 5))[..., None] * (18.0 - picture)


def _sense(picture: Floats, weather: Conditions, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Take the picture: movement, the sensor's noise, compression."""
    height, width = picture.shape[:2]
    if weather.blur_px:
        reach = weather.blur_px * width / REFERENCE_WIDTH_PX
        sigmas = 0.5 * reach + 0.01, reach
        picture = np.asarray(cv2.GaussianBlur(picture, (0, 0), sigmaX=sigmas[0], sigmaY=sigmas[1]))
    if weather.noise:
        noise = rng.standard_normal((height, width), np.float32)
        shot = 0.5 + 0.5 * np.sqrt(np.clip(picture, 0.0, 255.0) / 128.0)
        picture += (weather.noise * noise)[..., None] * shot.astype(np.float32)
    image = np.clip(picture, 0.0, 255.0).astype(np.uint8)
    if weather.jpeg:
        _, coded = cv2.imencode(".jpg", image, (cv2.IMWRITE_JPEG_QUALITY, weather.jpeg))
        image = np.asarray(cv2.imdecode(coded, cv2.IMREAD_COLOR), np.uint8)
    return image
