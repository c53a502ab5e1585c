"""The loop under every live camera, on a clock that the test moves: periods, silence, damage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest

from edge_server.cameras.frame import StallWatch
from edge_server.cameras.live_source import LiveSource, Picture, StreamEnded
from edge_server.cameras.source_uri import parse_source_uri
from edge_server.errors import SourceError
from edge_server.pixels import Image

if TYPE_CHECKING:
    from collections.abc import Iterable

S = 1_000_000_000
MS = 1_000_000
CAMERA = parse_source_uri("rtsp://cam/live")
IMAGE = Image.of_bgr(np.zeros((48, 64, 3), np.uint8))
# What a step of a script brings after its time.
FRAME, DAMAGE, SEEN, END = "frame", "damage", "seen", "end"


class ScriptedStream:
    """Each step is (ms until it comes, what comes); afterwards nothing does. `grab` looks up from
    its waiting as often as GStreamer's does."""

    def __init__(self, steps: Iterable[tuple[int, str]] = (), period_s: float = 0.0) -> None:
        self.seen = self.damaged = self.closed = 0
        self.period_s = period_s
        self.now_ns = 1000 * S
        self.stamp_ns: int | None = None
        self._steps = list(steps)
        self._due_ns = self.now_ns

    def play(self, *steps: tuple[int, str]) -> None:
        self._due_ns = self.now_ns
        self._steps += steps

    def grab(self, timeout_s: float) -> bool:
        until_ns = self.now_ns + round(min(timeout_s, 0.1) * S)
        if not self._steps or self._due_ns + self._steps[0][0] * MS > until_ns:
            self.now_ns = until_ns
            return False
        waits_ms, self._what = self._steps.pop(0)
        self._due_ns += waits_ms * MS
        self.now_ns = max(self.now_ns, self._due_ns)
        if self._what == END:
            raise StreamEnded
        self.seen += 1
        return self._what != SEEN

    def retrieve(self) -> Picture:
        if self._what == DAMAGE:
            raise ValueError("its end is missing")
        return Picture(IMAGE, self.stamp_ns)

    def close(self) -> None:
        self.closed += 1


def steady(count: int, every_ms: int = 40, what: str = FRAME) -> list[tuple[int, str]]:
    return [(every_ms, what)] * count


def opened(
    stream: ScriptedStream, clock: Literal["sensor", "rtp", "arrival"] = "arrival", **more: int
) -> LiveSource:
    return LiveSource(
        stream,
        CAMERA,
        clock,
        monotonic_ns=lambda: stream.now_ns,
        epoch_ns=lambda: stream.now_ns + 5 * S,
        **more,
    )


def failure(source: LiveSource, reads: int = 0) -> SourceError:
    """The error that ends the reading; after `reads` frames, where they are given."""
    found = 0
    try:
        while source.read() is not None:
            found += 1
    except SourceError as error:
        assert reads in (0, found)
        return error
    raise AssertionError("the source ended without an error")


def test_frames_count_from_zero_and_have_their_time_in_both_clocks() -> None:
    source = opened(ScriptedStream(steady(3)))
    frames = [source.read() for _ in range(3)]
    assert [each.id for each in frames if each] == [0, 1, 2]
    for number, each in enumerate(frames, 1):
        assert each is not None
        assert each.clock == "arrival"
        assert each.capture_mono_ns == 1000 * S + number * 40 * MS
        assert each.capture_epoch_ns - each.capture_mono_ns == 5 * S


@pytest.mark.parametrize(
    ("every_ms", "stated_s", "limit_ms"),
    [
        (40, 0.0, 500),  # measured
        (300, 0.0, 900),
        (1000, 0.0, 3000),
        (40, 0.3, 500),  # measured goes before stated
    ],
)
def test_a_silent_camera_stalls_after_half_a_second_or_three_periods(
    every_ms: int, stated_s: float, limit_ms: int
) -> None:
    stream = ScriptedStream(steady(10, every_ms), stated_s)
    source = opened(stream)
    error = failure(source, 10)
    assert error.reason == "stalled"
    assert f"no frame for {limit_ms / 1000:.1f} s" in str(error)
    assert stream.now_ns - 1000 * S - 10 * every_ms * MS == pytest.approx(limit_ms * MS, abs=100)


@pytest.mark.parametrize(
    ("stated_s", "limit_ms"), [(0.0, 1800), (0.04, 500), (0.3, 900), (9e9, 1800)]
)
def test_before_a_rate_is_measured_a_camera_has_what_it_states_or_1_8_s(
    stated_s: float, limit_ms: int
) -> None:
    stream = ScriptedStream(steady(1), stated_s)
    assert failure(opened(stream), 1).reason == "stalled"
    assert stream.now_ns - 1000 * S - 40 * MS == pytest.approx(limit_ms * MS, abs=100)


def test_what_comes_after_a_silence_is_a_backlog_unless_the_driver_says_how_old_it_is() -> None:
    late = [*steady(10), (501, FRAME), (40, FRAME)]
    assert failure(opened(ScriptedStream(late)), 10).reason == "stalled"

    class Blocking(ScriptedStream):
        """A library that waits longer than it is told."""

        def grab(self, timeout_s: float) -> bool:
            return super().grab(timeout_s) or super().grab(9.0)

    stream = Blocking([*steady(10), *[(599, FRAME)] * 2])
    stream.now_ns -= 1
    source = opened(stream, "sensor")
    assert all(source.read() for _ in range(10))


def test_a_caller_that_comes_late_is_no_silence_of_the_camera() -> None:
    stream = ScriptedStream(steady(10))
    source = opened(stream)
    for _ in range(10):
        source.read()
    stream.now_ns += 9 * S
    stream.play((400, FRAME))
    assert source.read() is not None


def test_no_first_frame_is_an_error_and_closes_the_stream() -> None:
    stream = ScriptedStream()
    with pytest.raises(SourceError, match=r"^rtsp://cam/live: no frame within 4 s") as caught:
        opened(stream)
    assert caught.value.reason == "unavailable"
    assert (stream.closed, stream.now_ns) == (1, 1004 * S)


def test_damaged_images_are_counted_and_not_delivered() -> None:
    stream = ScriptedStream([*steady(2), *steady(3, what=DAMAGE), *steady(1)])
    source = opened(stream)
    for _ in range(3):
        source.read()
    stream.damaged = 4  # those that the stream itself drops
    assert source.corrupt == 7


@pytest.mark.parametrize(("what", "word"), [(DAMAGE, "its end is missing"), (SEEN, "no decoder")])
@pytest.mark.parametrize(("every_ms", "limit_s"), [(40, 1.5), (500, 1.5), (900, 2.7)])
def test_images_that_come_and_cannot_be_used_are_a_fault_of_their_own(
    what: str, word: str, every_ms: int, limit_s: float
) -> None:
    stream = ScriptedStream([*steady(10, every_ms), *steady(200, every_ms, what)])
    error = failure(opened(stream), 10)
    assert error.reason == "corrupt"
    assert word in str(error)
    after_s = (stream.now_ns - 1000 * S) / S - 10 * every_ms / 1000
    # A reader that takes longer seems to hang (`Limits` in camera.py).
    assert limit_s <= after_s + 1e-6 < max(2.0, 6 * every_ms / 1000)


def test_a_camera_whose_first_images_are_all_damaged_is_given_up() -> None:
    stream = ScriptedStream(steady(900, what=DAMAGE))
    with pytest.raises(SourceError, match="all of them damaged") as caught:
        opened(stream)
    assert caught.value.reason == "corrupt"
    assert stream.now_ns <= 1004 * S + 40 * MS


def test_silence_after_damage_is_a_stall() -> None:
    stream = ScriptedStream([*steady(10), *steady(5, what=DAMAGE)])
    assert failure(opened(stream), 10).reason == "stalled"


def test_a_recording_ends() -> None:
    source = opened(ScriptedStream([*steady(1), (0, END), (0, END)]))
    assert source.read() is not None
    assert source.read() is None
    stream = ScriptedStream([(0, END)])
    with pytest.raises(SourceError, match="without a frame"):
        opened(stream)
    assert stream.closed == 1


@pytest.mark.parametrize(("stated_s", "late_ms"), [(0.03, 90), (0.0, 120)])
def test_a_driver_stamps_a_frame_up_to_its_periods_late(stated_s: float, late_ms: int) -> None:
    stream = ScriptedStream(steady(10), stated_s)
    stream.stamp_ns = stream.now_ns + 30 * MS
    source = opened(stream, "sensor", late_periods=3)
    frame = source.read()
    assert frame is not None
    assert (frame.clock, frame.capture_mono_ns) == ("sensor", 1000 * S + 30 * MS)
    for _ in range(8):
        stream.stamp_ns += 40 * MS
        frame = source.read()
    assert frame is not None
    assert frame.uncertainty_ns == pytest.approx(late_ms * MS, abs=1000)


def test_a_closed_source_reads_nothing_and_closes_once() -> None:
    stream = ScriptedStream(steady(2))
    source = opened(stream)
    source.close()
    source.close()
    assert stream.closed == 1
    assert failure(source, 1).reason == "lost"


def test_a_rate_is_the_mean_of_its_last_intervals_and_can_be_measured_anew() -> None:
    watch = StallWatch()
    for number in range(5):
        assert watch.limit_s(0.3, 1.0) == 1.0
        watch.arrive(0.1 * number)
    watch.arrive(0.5)
    assert watch.period_s == pytest.approx(0.1)
    assert watch.limit_s(0.2, 1.0) == pytest.approx(0.3)
    for number in range(1, 31):
        watch.arrive(0.5 + 0.2 * number)
    assert watch.is_full
    assert watch.period_s == pytest.approx(0.2)
    watch.measure_anew()
    assert watch.period_s is None
    assert watch.last == pytest.approx(6.5)
