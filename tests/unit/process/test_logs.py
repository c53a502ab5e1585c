"""Lines go where they were asked for, in the form and of the levels that were chosen."""

from __future__ import annotations

import json
import logging
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from edge_server.errors import SettingsError, Unavailable
from edge_server.process.logs import LogSettings, set_up_logging
from edge_server.process.text import remember_secret
from edge_server.settings import LogSection

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

log = logging.getLogger("tested")


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, as it was afterwards."""
    logger = logging.getLogger()
    before, level = logger.handlers[:], logger.level
    yield logger
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:] = before
    logger.setLevel(level)


@pytest.fixture
def logged(root: logging.Logger, tmp_path: Path) -> Any:
    """Sets logging up with a file and these choices, logs a line of each level; the lines."""

    def log_all(**chosen: Any) -> list[str]:
        path = tmp_path / "log"
        set_up_logging(LogSection(file=str(path), **chosen))
        for number in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            log.log(number, "it is %s", logging.getLevelName(number))
        return path.read_text().splitlines()

    return log_all


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
def test_a_level_can_be_left_out(logged: Any, chosen: dict, expected: list[str]) -> None:
    assert levels(logged(**chosen)) == expected


def test_iso8601_has_the_date_in_utc_and_the_severity(logged: Any) -> None:
    for line in logged(format="ISO8601"):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ [IWE] it is [A-Z]+", line)


def test_a_file_that_is_there_is_added_to(logged: Any, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    assert logged()[0] == "before"


def test_a_file_that_cannot_be_opened_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"^log\.file: .*/log: cannot be written: No such file"):
        set_up_logging(LogSection(file=str(tmp_path / "gone" / "log")))


def test_a_file_that_is_rotated_is_followed_by_a_new_one(root: Any, tmp_path: Path) -> None:
    path, moved = tmp_path / "log", tmp_path / "log.1"
    set_up_logging(LogSection(file=str(path), format="ISO8601"))
    log.info("before")
    path.rename(moved)
    log.info("after")
    path.unlink()
    log.info("removed")
    log.info("last")
    assert [line.rsplit(" ", 1)[1] for line in moved.read_text().splitlines()] == ["before"]
    assert [line.rsplit(" ", 1)[1] for line in path.read_text().splitlines()] == [
        "removed",
        "last",
    ]


def test_a_file_that_cannot_be_made_anew_is_reported_once_and_costs_no_caller(
    root: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    set_up_logging(LogSection(file=str(folder / "log")))
    folder.rename(tmp_path / "moved")
    log.info("one")
    log.info("two")
    assert capsys.readouterr().err.count("cannot be written: No such file or directory") == 1
    folder.mkdir()
    log.info("three")
    assert (folder / "log").read_text().endswith("three\n")


def test_a_full_disk_is_reported_once(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging(LogSection(file="/dev/full"))
    log.warning("one")
    log.warning("two")
    with suppress(OSError):  # the unwritten lines fail again
        root.handlers[0].close()
    (line,) = capsys.readouterr().err.splitlines()
    assert "log.file: /dev/full: cannot be written: No space left on device; " in line


def test_what_was_chosen_at_the_start_is_returned_and_can_be_changed(
    root: logging.Logger, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    switches = set_up_logging(
        LogSection(verbose=3, info=False, warning=False, format="ISO8601", file=str(path))
    )
    assert switches.settings == LogSettings(
        info=False, warning=False, error=True, verbose_level=3, iso8601=True
    )
    assert switches.file == str(path)
    log.info("silent")
    switches.change(info=True, iso8601=False)
    log.info("logged")
    (line,) = path.read_text().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO    logged", line)


@pytest.mark.parametrize("iso8601", [False, True])
def test_the_journal_gets_a_priority_on_every_line(
    root: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    iso8601: bool,
) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    set_up_logging(LogSection(format="ISO8601" if iso8601 else "default"))
    log.warning("one\ntwo")
    assert [line[:3] for line in capsys.readouterr().err.splitlines()] == ["<4>", "<4>"]


FORGED = "refused: \n12:00:00 ERROR   forged\r<3>forged\x1b[2J\x85forged\u2028forged\u202e"


@pytest.mark.parametrize("iso8601", [False, True])
@pytest.mark.parametrize("journal", [False, True])
def test_what_a_client_sent_forges_no_line_and_steers_no_terminal(
    root: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    iso8601: bool,
    journal: bool,
) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "8:1" if journal else "")
    set_up_logging(LogSection(format="ISO8601" if iso8601 else "default"))
    log.error("%s", FORGED)
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("refused: ")
    assert second.removeprefix("<3>") == (
        r"    12:00:00 ERROR   forged\x0d<3>forged\x1b[2J\x85forged\u2028forged\u202e"
    )


def test_what_a_client_sent_does_not_fill_the_disk(logged: Any, tmp_path: Path) -> None:
    logged()
    log.error("x" * 100_000)
    (line,) = [x for x in (tmp_path / "log").read_text().splitlines() if "xxx" in x]
    assert len(line) < 20_000
    assert line.endswith(" characters more")


def test_json_is_an_object_for_each_line_whatever_it_quotes(root: Any, tmp_path: Path) -> None:
    path = tmp_path / "log"
    switches = set_up_logging(LogSection(format="json", file=str(path)))
    log.info("it says %s", 'two\nlines, "quotes" and \x1b[31m')
    try:
        int("why")
    except ValueError:
        log.exception("it failed")
    # A client that asks for whole times has them already.
    switches.change(iso8601=True)
    log.warning("x" * 100_000)
    lines = path.read_text().splitlines()
    first, second, third = map(json.loads, lines)
    assert first["text"] == 'it says two\nlines, "quotes" and \x1b[31m'
    assert (first["level"], first["logger"], first["thread"]) == ("info", "tested", "MainThread")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert second["text"] == "it failed"
    assert second["traceback"].endswith("'why'")
    assert third["text"].endswith("characters more")
    assert not any("\x1b" in line for line in lines)


def test_json_in_the_journal_has_its_priority(
    root: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "1:2")
    set_up_logging(LogSection(format="json")).change(iso8601=True)
    log.warning("it warns")
    output = capsys.readouterr().err
    assert output.startswith('<4>{"time": ')
    assert json.loads(output[3:])["text"] == "it warns"


def test_other_settings_apply_to_the_lines_from_then_on(root: Any, tmp_path: Path) -> None:
    path = tmp_path / "log"
    switches = set_up_logging(LogSection(file=str(path)))
    log.debug("left out")
    switches.apply(LogSection(verbose=1, warning=False, format="json"))
    log.debug("debug")
    log.warning("left out")
    switches.apply(LogSection())
    log.warning("warning")
    first, second = path.read_text().splitlines()
    assert json.loads(first)["text"] == "debug"
    assert second.endswith("WARNING warning")
    assert root.level == logging.INFO


def test_a_log_file_that_is_a_pipe_without_a_reader_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(SettingsError, match="pipe: cannot be written"):
        set_up_logging(LogSection(file=str(pipe)))


def test_a_line_waits_for_no_reader_of_a_pipe(
    root: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        set_up_logging(LogSection(file=str(pipe)))
        logging.getLogger("x").info("first")
        assert b"first" in os.read(reader, 10_000)
        for number in range(200):  # more than a pipe holds
            logging.getLogger(str(number)).info("%s", str(number) * 5000)
        assert "cannot be written" in capsys.readouterr().err
        while os.read(reader, 1 << 20):
            with suppress(OSError):
                root.handlers[0].flush()
                break
    finally:
        os.close(reader)


def test_the_tail_has_the_lines_that_the_log_has_without_secrets(
    root: logging.Logger, tmp_path: Path
) -> None:
    switches = set_up_logging(LogSection(file=str(tmp_path / "log"), format="json"))
    remember_secret("camera-secret")
    log.debug("left out")
    log.info("camera %s: %s", "front", "rtsp://admin:camera-secret@host")
    log.error("page: a fault", exc_info=ValueError("it broke"))
    for _ in range(5):
        log.warning("again")
    switches.change(warning=False)
    log.warning("left out too")
    lines = switches.tail.after(0)
    assert [each.level for each in lines] == ["info", "error", "warning", "warning", "warning"]
    assert lines[0].text == "camera front: rtsp://admin:***@host"
    assert lines[1].text == "page: a fault\nValueError: it broke"
    assert [each.id for each in lines] == [1, 2, 3, 4, 5]


def test_a_broken_record_costs_its_own_line_of_the_tail(
    root: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    switches = set_up_logging(LogSection(file=str(tmp_path / "log")))
    log.info("%d cameras", "two")
    log.info("%d cameras", 2)
    assert [each.text for each in switches.tail.after(0)] == ["2 cameras"]
    assert capsys.readouterr().err.count("--- Logging error ---") == 1
