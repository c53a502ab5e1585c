"""Faults of pictures begin after a second, and a parked vehicle has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.cameras.inspection import PictureHealth
from edge_server.pixels import Colour, ColourRange, Image, PixelFormat

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

FPS = 25
FULL = Colour(range=ColourRange.FULL)
RNG = np.random.default_rng(3)
# A world of soft blobs, through which a camera drives.
HEIGHT, WIDTH = 144, 256
WORLD = np.kron(RNG.uniform(40, 220, (24, 400)), np.ones((6, 6))).astype(np.float32)
WORLD = (WORLD + np.roll(WORLD, 1, 0) + np.roll(WORLD, 1, 1)) / 3
SPEED_PX = 2


def view(place: int = 0) -> NDArray[np.float32]:
    return WORLD[:, place : place + WIDTH]


def grey(picture: NDArray[np.float32], colour: Colour = FULL) -> Image:
    pixels = np.clip(np.rint(picture), 0, 255).astype(np.uint8)
    return Image.of_packed(PixelFormat.GREY, pixels[..., np.newaxis], colour)


def noisy(picture: NDArray[np.float32], sigma: float = 2.0) -> NDArray[np.float32]:
    return picture + RNG.normal(0, sigma, picture.shape).astype(np.float32)


class Watch:
    """Shows pictures at their rate, and notes which fault there is after each."""

    def __init__(self, *, raw: bool = False, colour: Colour = FULL, still: bool = False) -> None:
        self.health = PictureHealth()
        self.frames = 0
        self._raw, self._colour, self._still = raw, colour, still

    def show(self, pictures: Iterable[NDArray[np.float32]]) -> list[str]:
        found = []
        for picture in pictures:
            now = self.frames / FPS
            self.frames += 1
            image = grey(picture, self._colour)
            fault = self.health.inspect(image, now, raw=self._raw, still=self._still)
            found.append(fault.code if fault else "")
        return found

    def drive(self, seconds: float = 3.0) -> list[str]:
        return self.show(view(SPEED_PX * n) for n in range(round(seconds * FPS)))


def begin_of(reason: str, found: list[str]) -> float:
    """Seconds until the fault begins, which then stays."""
    begin = found.index(reason)
    assert set(found[begin:]) == {reason}
    return begin / FPS


BLACK = np.zeros((HEIGHT, WIDTH), np.float32)
FAULTS = {
    "black": BLACK,
    "white_out": BLACK + 250,
    "covered": BLACK + 90 + np.linspace(-4, 4, WIDTH, dtype=np.float32),
    "dark": view() * 0.12,
}


def test_a_drive_is_well() -> None:
    assert set(Watch().drive(10.0)) == {""}


@pytest.mark.parametrize("reason", FAULTS)
def test_a_fault_begins_after_a_second_and_ends_soon_where_it_costs_lanes(reason: str) -> None:
    watch = Watch()
    watch.drive()
    begin_s = begin_of(reason, watch.show(noisy(FAULTS[reason]) for _ in range(50)))
    assert 1.0 <= begin_s <= 1.3
    found = watch.drive()
    last = max(number for number, each in enumerate(found) if each == reason)
    assert (1.6 if reason == "dark" else 0.2) <= last / FPS <= (2.1 if reason == "dark" else 0.8)
    assert set(found[: last + 1]) == {reason}


@pytest.mark.parametrize("reason", FAULTS)
def test_half_a_second_is_no_fault(reason: str) -> None:
    watch = Watch()
    watch.drive()
    assert set(watch.show(noisy(FAULTS[reason]) for _ in range(FPS // 2))) == {""}
    assert set(watch.drive()) == {""}


def half_covered(picture: NDArray[np.float32], part: tuple[slice, slice]) -> NDArray[np.float32]:
    covered = picture.copy()
    covered[part] = 60
    return noisy(covered, 1.0)


@pytest.mark.parametrize(
    "part",
    [(slice(HEIGHT // 2, None), slice(None)), (slice(None), slice(WIDTH // 2))],
    ids=["lower", "left"],
)
def test_a_half_covered_lens_is_covered(part: tuple[slice, slice]) -> None:
    watch = Watch()
    watch.drive()
    pictures = (half_covered(view(SPEED_PX * n), part) for n in range(50))
    assert begin_of("covered", watch.show(pictures)) <= 1.3


def test_limited_range_is_judged_by_its_own_black_and_white() -> None:
    def limited(picture: NDArray[np.float32]) -> NDArray[np.float32]:
        return 16 + np.clip(noisy(picture), 0, 255) * (219 / 255)

    for reason in ("black", "white_out"):
        watch = Watch(colour=Colour(range=ColourRange.LIMITED))
        assert begin_of(reason, watch.show(limited(FAULTS[reason]) for _ in range(50))) <= 1.3


@pytest.mark.parametrize("sigma", [0.7, 2.0, 4.0])
def test_a_parked_raw_camera_is_not_frozen(sigma: float) -> None:
    watch = Watch(raw=True)
    assert set(watch.show(noisy(view(), sigma) for _ in range(100))) == {""}


def test_identical_pictures_of_a_sensor_are_frozen_and_the_next_other_one_is_not() -> None:
    watch = Watch(raw=True)
    watch.show(noisy(view()) for _ in range(50))  # parked
    assert 1.0 <= begin_of("frozen", watch.show([view()] * 50)) <= 1.1
    assert watch.show([noisy(view())]) == [""]


def test_a_parked_stream_may_repeat_its_picture_for_long() -> None:
    watch = Watch()
    assert set(watch.show([view()] * 500)) == {""}


@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_a_stream_that_stands_from_one_frame_to_the_next_is_frozen_until_it_moves(
    sigma: float,
) -> None:
    watch = Watch()
    watch.drive()
    found = watch.show(noisy(view(148), sigma) for _ in range(50))
    assert 0.9 <= begin_of("frozen", found) <= 1.2
    assert watch.show([view(150), view(152)])[-1] == ""


def test_a_clock_that_runs_in_a_frozen_picture_makes_no_difference() -> None:
    def with_clock(number: int) -> NDArray[np.float32]:
        picture = view(148).copy()
        picture[5:10, 5 : 10 + number] = 250
        return picture

    watch = Watch()
    watch.drive()
    assert begin_of("frozen", watch.show(with_clock(number) for number in range(50))) <= 1.2


def test_a_vehicle_that_brakes_hard_is_not_frozen() -> None:
    watch = Watch()
    watch.drive()
    speeds = np.linspace(SPEED_PX, 0, FPS)  # px per frame, down to 0 within a second
    places = 148 + np.rint(np.cumsum(speeds)).astype(int)
    watch.show(view(place) for place in places)
    assert set(watch.show([view(places[-1])] * 100)) == {""}


def test_a_scene_that_changes_at_once_and_stands_is_not_frozen() -> None:
    watch = Watch()
    assert set(watch.show([view(0)] * 50 + [view(WIDTH)] * 100)) == {""}


def test_the_only_picture_of_a_recording_is_not_frozen() -> None:
    watch = Watch(raw=True, still=True)
    assert set(watch.show([view()] * 100)) == {""}


def blurred(picture: NDArray[np.float32]) -> NDArray[np.float32]:
    for axis in (0, 1):
        for _ in range(2):
            picture = sum(np.roll(picture, shift, axis) for shift in range(-3, 4)) / 7
    return picture


def test_a_lens_is_blurred_against_its_own_median() -> None:
    unfocused = [blurred(view(50 * n)) for n in range(5)]
    watch = Watch()
    watch.drive(25.0)
    assert begin_of("blurred", watch.show(unfocused * 10)) <= 1.3
    new = Watch()
    assert set(new.show(unfocused * 30)) == {""}  # another lens, as far as anybody knows


def test_fog_is_degraded_and_not_blurred() -> None:
    watch = Watch()
    watch.drive(25.0)
    fog = (120 + 0.3 * (view(SPEED_PX * n) - 120) for n in range(50))
    assert begin_of("degraded", watch.show(fog)) <= 1.3


def test_what_is_usual_stays_known_when_the_source_is_opened_again() -> None:
    watch = Watch()
    watch.drive(25.0)
    watch.health.restart()
    fog = (120 + 0.3 * (view(SPEED_PX * n) - 120) for n in range(50))
    assert begin_of("degraded", watch.show(fog)) <= 1.3


@given(
    st.sampled_from(PixelFormat),
    st.integers(1, 60),
    st.integers(1, 60),
    st.booleans(),
    st.integers(0, 255),
)
def test_a_picture_of_any_size_and_format_is_judged_or_left_out(
    pixel_format: PixelFormat, height: int, width: int, limited: bool, level: int
) -> None:
    shape = {
        PixelFormat.BGR: (height, width, 3),
        PixelFormat.GREY: (height, width, 1),
        PixelFormat.YUY2: (height, 2 * width, 2),
    }.get(pixel_format, (3 * height, 2 * width, 1))
    colour = Colour(range=ColourRange.LIMITED if limited else ColourRange.FULL)
    image = Image.of_packed(pixel_format, np.full(shape, level, np.uint8), colour)
    health = PictureHealth()
    for number in range(30):
        health.inspect(image, number / 10, raw=True)


def test_a_size_that_changes_is_no_motion_and_no_error() -> None:
    watch = Watch()
    watch.drive()
    small = [view()[:72, :128], view()[:96, :128]] * 30
    assert "frozen" not in watch.show(small)


def test_pictures_of_another_size_are_not_compared_with_the_usual_ones() -> None:
    health = PictureHealth()
    large = noisy(np.kron(view(), np.ones((4, 4), np.float32)), 50.0)
    # As a decoder makes them for a model that needs no more.
    small = large.reshape(HEIGHT, 4, WIDTH, 4).mean((1, 3))
    for second, picture in enumerate([large] * 25 + [small] * 5):
        assert health.inspect(grey(picture), float(second), raw=False, still=True) is None
