"""Light, weather and lens of a rendered road; by default a clear day and a perfect camera."""

from __future__ import annotations

from dataclasses import dataclass


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
