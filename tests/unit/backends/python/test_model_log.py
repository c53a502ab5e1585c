"""What a model writes comes into the log, line by line, and not without end."""

from __future__ import annotations

import logging

import pytest

from edge_server.backends.python.context import (
    AT_ONCE_BYTES,
    LONGEST_LINE_BYTES,
    PER_SECOND_BYTES,
    SHORTEST_LINE_BYTES,
    ModelLog,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


def test_what_is_printed_comes_line_by_line_whatever_it_is(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    log = ModelLog("m", clock)
    log.printed(b"one\ntw")
    log.printed(b"o\n\xff\nbegun")
    assert caplog.messages == ["model m: one", "model m: two", "model m: \\xff"]
    log.end()
    log.end()
    assert caplog.messages[3:] == ["model m: begun"]


def test_a_line_keeps_its_level_and_a_long_one_is_cut(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    log = ModelLog("m", clock)
    log.line(logging.ERROR, "x" * 100_000)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert len(record.getMessage()) < LONGEST_LINE_BYTES + 20
    log.printed(b"x" * 100_000)
    assert len(caplog.records) == 2


def test_a_flood_is_cut_off_and_logged_once_a_second(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    log = ModelLog("m", clock)
    line = "x" * 63 + "\n"
    for _ in range(20_000):
        log.printed(line.encode())
    at_once = len(caplog.records)
    assert at_once * 64 <= AT_ONCE_BYTES + 64 * 64 * 64
    assert at_once >= AT_ONCE_BYTES // 64
    caplog.clear()
    for _ in range(10):
        clock.now_s += 1.0
        for _ in range(1000):
            log.printed(line.encode())
    told = [r for r in caplog.records if "lines of its log were dropped" in r.getMessage()]
    assert 1 <= len(told) <= 10
    assert sum(len(r.getMessage()) for r in caplog.records) < 12 * 1.5 * PER_SECOND_BYTES
    clock.now_s += 3600
    caplog.clear()
    log.printed(b"well again\n")
    assert caplog.messages[-1] == "model m: well again"


def test_lines_that_come_together_are_dropped_together(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """To look at each of a flood of lines would keep the daemon's other threads waiting."""
    log = ModelLog("m", clock)
    for _ in range(AT_ONCE_BYTES // LONGEST_LINE_BYTES):
        log.line(logging.INFO, "x" * LONGEST_LINE_BYTES)
    clock.reads = 0
    log.printed(b"y\n" * 30_000 + b"begun")
    assert clock.reads == 1
    clock.now_s += 60
    log.printed(b" again\n")
    assert "30000 lines of its log were dropped" in caplog.text
    assert caplog.messages[-1] == "model m: begun again"


def test_short_lines_count_as_longer_ones(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = ModelLog("m", clock)
    log.printed(b"y\n" * AT_ONCE_BYTES)
    assert len(caplog.records) == AT_ONCE_BYTES // SHORTEST_LINE_BYTES
