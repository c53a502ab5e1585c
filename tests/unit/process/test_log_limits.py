"""A line that repeats becomes a count, a source that floods is cut, and both say how much."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from edge_server.process.logs import MOST_LINES, SAME_LINES, WINDOW_S, LineLimits


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.levels: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.levels.append(record.levelno)


class Bench:
    """A handler with limits, and the time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.lines = Lines()
        self.limits = LineLimits(self.lines, lambda: self.now_s)
        self.lines.addFilter(self.limits)

    def log(
        self,
        text: str,
        *args: Any,
        name: str = "a",
        level: int = logging.WARNING,
        fault: Exception | None = None,
    ) -> None:
        trace = None if fault is None else (type(fault), fault, None)
        self.lines.handle(logging.LogRecord(name, level, "", 0, text, args, trace))

    def said(self) -> list[str]:
        texts, self.lines.texts = self.lines.texts, []
        return texts


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_repeated_line_is_logged_three_times_in_each_window_and_then_counted(
    bench: Bench,
) -> None:
    for _ in range(2):
        for _ in range(1000):
            bench.log("camera %s: no frames", "front")
        assert bench.said() == ["camera front: no frames"] * SAME_LINES
        bench.now_s += WINDOW_S
        bench.log("something else")
        assert bench.said() == ["camera front: no frames [997 more of it]", "something else"]


def test_lines_that_differ_are_all_logged(bench: Bench) -> None:
    bench.log("camera %s: lost", "front")
    bench.log("camera %s: lost", "rear")
    bench.log("camera front: lost", name="b")
    bench.log("camera front: lost", level=logging.ERROR)
    assert len(bench.said()) == 4


def test_a_line_without_repeats_has_no_count(bench: Bench) -> None:
    bench.log("once")
    bench.now_s += WINDOW_S
    bench.log("twice")
    assert bench.said() == ["once", "twice"]


def test_a_source_that_floods_is_cut_and_the_others_are_not(bench: Bench) -> None:
    for number in range(MOST_LINES + 5000):
        bench.log("line %d", number)
    bench.log("of another", name="b")
    said = bench.said()
    assert len(said) == MOST_LINES + 1
    assert said[-1] == "of another"
    bench.now_s += WINDOW_S
    bench.log("calm")
    assert bench.said() == [
        "log: 5000 lines of this source were left out: too many at once",
        "calm",
    ]


def test_debug_lines_have_no_limit(bench: Bench) -> None:
    for _ in range(2 * MOST_LINES):
        bench.log("detail", level=logging.DEBUG)
    assert len(bench.said()) == 2 * MOST_LINES


def test_the_count_of_an_error_names_it(bench: Bench) -> None:
    for _ in range(SAME_LINES + 1):
        bench.log("it is tried again", fault=ValueError("seven"))
    bench.limits.close()
    assert bench.said()[-1] == "it is tried again: ValueError('seven') [1 more of it]"


def test_counts_that_are_due_are_logged_at_the_end(bench: Bench) -> None:
    for _ in range(SAME_LINES + 1):
        bench.log("again")
    for number in range(MOST_LINES + 1):
        bench.log("line %d", number, name="b")
    bench.said()
    bench.limits.close()
    assert bench.said() == [
        "again [1 more of it]",
        "log: 1 lines of this source were left out: too many at once",
    ]
    bench.limits.close()
    assert bench.said() == []


def test_what_is_remembered_is_bounded(bench: Bench) -> None:
    for number in range(100_000):
        bench.log("line %d", number, name=f"source {number % 7}")
    assert len(bench.limits._lines) == 7 * MOST_LINES


def test_a_record_that_cannot_be_formatted_is_left_to_the_handler(bench: Bench) -> None:
    record = logging.LogRecord("a", logging.ERROR, "", 0, "%d", ("x",), None)
    assert bench.limits.filter(record)
    assert bench.limits.filter(record)
