"""Capture times from timestamps: pace, drift, stalls, jumps, NTP."""

from __future__ import annotations

import pytest

from edge_server.cameras.frame import TimestampMapper

MS = 1_000_000
S = 1000 * MS
START = 500 * S


def play(
    mapper: TimestampMapper,
    frames: int,
    *,
    first: int = 0,
    transit_ms: int = 20,
    offset_ns: int = -77 * S,
    period_ms: float = 40,
) -> list[tuple[float, str]]:
    """Frames of a camera whose clock is off by `offset_ns`; their ages on arrival in ms."""
    ages = []
    for number in range(first, first + frames):
        taken = START + int(number * period_ms * MS)
        # Every frame but each fifth is a little late.
        arrival = taken + (transit_ms + (number % 5) * 3) * MS
        capture = mapper.map(arrival, taken + offset_ns)
        ages.append(((arrival - capture.mono_ns) / MS, capture.clock))
    return ages


def test_the_pace_of_rtp_shows_how_late_a_frame_is() -> None:
    assert play(TimestampMapper("rtp"), 10) == [(3.0 * (n % 5), "rtp") for n in range(10)]


def test_after_a_stall_the_backlog_is_not_fresh() -> None:
    mapper = TimestampMapper("rtp")
    play(mapper, 100)
    taken = START + 100 * 40 * MS
    capture = mapper.map(taken + 3 * S + 20 * MS, taken - 77 * S)
    assert capture == (taken + 20 * MS, "rtp")


def test_a_drifting_clock_is_followed() -> None:
    mapper = TimestampMapper("rtp")
    for number in range(15000):  # ten minutes, 100 ppm fast
        taken = START + number * 40 * MS
        arrival = taken + 20 * MS
        capture = mapper.map(arrival, int(number * 40 * MS * 1.0001))
    assert arrival - capture.mono_ns < 10 * MS
    assert mapper.faults == 0


def test_a_capture_is_never_later_than_its_arrival_nor_before_the_last_one() -> None:
    mapper = TimestampMapper("sensor")
    early = mapper.map(START, START + 30 * MS)
    assert early == (START, "sensor")
    assert mapper.map(START + 10 * MS, START + 31 * MS).mono_ns == START + 10 * MS
    assert mapper.faults == 0


@pytest.mark.parametrize("clock", ["sensor", "rtp"])
@pytest.mark.parametrize("jump_s", [-1, -3600, 3600])
def test_a_timestamp_that_jumps_is_counted_and_its_frame_gets_the_arrival(
    clock: str, jump_s: int
) -> None:
    mapper = TimestampMapper("sensor" if clock == "sensor" else "rtp")
    for number in range(50):
        mapper.map(START + number * 40 * MS + 5 * MS, START + number * 40 * MS)
    arrival = START + 50 * 40 * MS + 5 * MS
    assert mapper.map(arrival, arrival - 5 * MS + jump_s * S) == (arrival, "arrival")
    assert mapper.faults == 1


def test_after_a_jump_the_pace_counts_from_there() -> None:
    mapper = TimestampMapper("rtp")
    play(mapper, 50)
    play(mapper, 1, first=50, offset_ns=9000 * S)
    assert {clock for _, clock in play(mapper, 20, first=51, offset_ns=9000 * S)} == {"rtp"}
    assert mapper.faults == 1


def test_a_frozen_timestamp_is_a_fault_each_time() -> None:
    mapper = TimestampMapper("rtp")
    for number in range(4):
        mapper.map(START + number * 40 * MS, 7)
    assert mapper.faults == 3


def test_ntp_time_is_used_from_the_first_on_and_between_two() -> None:
    mapper = TimestampMapper("rtp")
    play(mapper, 10)
    taken = START + 10 * 40 * MS
    capture = mapper.map(taken + 60 * MS, taken - 77 * S, ntp_ns=taken)
    assert capture.clock == "ntp"
    taken += 40 * MS
    assert mapper.map(taken + 60 * MS, taken - 77 * S) == (taken, "ntp")


def test_a_camera_whose_clock_was_never_set_keeps_to_the_pace() -> None:
    mapper = TimestampMapper("rtp")
    capture = mapper.map(START, START - 77 * S, ntp_ns=START - 50 * 365 * 86400 * S)
    assert capture.clock == "rtp"


def test_without_timestamps_the_arrival_is_the_time() -> None:
    assert TimestampMapper("rtp").map(START, None) == (START, "arrival")
    assert TimestampMapper("arrival").map(START, START - S) == (START, "arrival")
