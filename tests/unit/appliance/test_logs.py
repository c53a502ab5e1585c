"""Lines go where they were asked for, in the form and of the levels that were chosen."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import pytest

from edge_server.appliance.logs import set_up_logging

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

log = logging.getLogger("tested")


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Any]:
    """Sets logging up with a file and these choices, logs a line of each level; the lines."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level

    def tell(**chosen: Any) -> list[str]:
        path = tmp_path / "log"
        set_up_logging(chosen.pop("verbose", 0), path=str(path), **chosen)
        for number in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            log.log(number, "it is %s", logging.getLevelName(number))
        return path.read_text().splitlines()

    yield tell
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = before
    root.setLevel(level)


def levels(lines: list[str]) -> list[str]:
    return [line.rpartition(" ")[2] for line in lines]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, ["INFO", "WARNING", "ERROR"]),
        ({"verbose": 1}, ["DEBUG", "INFO", "WARNING", "ERROR"]),
        ({"info": False}, ["WARNING", "ERROR"]),
        ({"warning": False}, ["INFO", "ERROR"]),
        ({"error": False, "info": False}, ["WARNING"]),
    ],
)
def test_a_level_can_be_left_out(told: Any, chosen: dict, expected: list[str]) -> None:
    assert levels(told(**chosen)) == expected


def test_iso8601_has_the_date_in_utc_and_the_severity(told: Any) -> None:
    for line in told(iso8601=True):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ [IWE] it is [A-Z]+", line)


def test_a_file_that_is_there_is_added_to(told: Any, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    assert told()[0] == "before"


def test_a_file_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        set_up_logging(0, path=str(tmp_path / "gone" / "log"))
