"""The journal's fields: what a record is about, and which entry of the catalog explains it."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from edge_server import errors
from edge_server.process.logs import (
    ENDING,
    EVENTS,
    JournalHandler,
    LogFormatter,
    LogSwitches,
    fields_of,
)
from edge_server.process.text import remember_secret

ROOT = Path(__file__).parents[3]
CATALOG = (ROOT / "systemd/edge-server.catalog").read_text()


class Journal:
    """What systemd's library would be given."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        handler = JournalHandler(self.send)
        handler.setFormatter(LogFormatter(LogSwitches(), journal=True, prefixed=False))
        self.log = logging.Logger("edge_server.test")
        self.log.addHandler(handler)

    def send(self, text: str, **fields: Any) -> None:
        self.entries.append({"MESSAGE": text, **fields})

    @property
    def last(self) -> dict[str, Any]:
        return self.entries[-1]


@pytest.fixture
def journal() -> Journal:
    return Journal()


def test_a_record_names_its_model_and_its_camera(journal: Journal) -> None:
    journal.log.info("model %s: READY, version %s", "lane_detection", 1)
    assert journal.last["MODEL"] == "lane_detection"
    assert journal.last["MESSAGE"] == "model lane_detection: READY, version 1"
    assert (journal.last["PRIORITY"], journal.last["LOGGER"]) == ("6", "edge_server.test")
    journal.log.warning("camera %s: %s", "front", "stalled")
    assert journal.last["CAMERA"] == "front"
    assert "MODEL" not in journal.last
    journal.log.info("grpc: listening on %s", "127.0.0.1:8001")
    assert not {"MODEL", "CAMERA", "ERROR_ID"} & journal.last.keys()


def test_an_event_has_its_number_and_its_model(journal: Journal) -> None:
    journal.log.error("model %s: UNAVAILABLE: %s", "m", "no file")
    assert (journal.last["MODEL"], journal.last["ERROR_ID"]) == ("m", "model_unavailable")
    assert re.fullmatch("[0-9a-f]{32}", journal.last["MESSAGE_ID"])


def test_the_error_that_ends_the_daemon_is_known_by_its_class(journal: Journal) -> None:
    classes = [kind.__name__ for kind in errors.ModelLoadError.__mro__]
    journal.log.error("%s", "text", extra={"error_classes": classes})
    assert journal.last["ERROR_ID"] == "ModelConfigError"
    for name in ENDING:
        assert issubclass(getattr(errors, name), errors.EdgeServerError)


def test_an_entry_holds_a_whole_traceback_and_no_secret(journal: Journal) -> None:
    remember_secret("hunter2-sesame")
    try:
        int("hunter2-sesame")
    except ValueError:
        journal.log.exception("camera %s: the reader failed", "front")
    entry = journal.last
    assert "Traceback" in entry["MESSAGE"]
    assert "hunter2" not in str(entry)


def test_every_event_is_logged_somewhere_with_that_text() -> None:
    code = "".join(path.read_text() for path in (ROOT / "edge_server").rglob("*.py"))
    own = (ROOT / "edge_server/process/logs.py").read_text()
    for _, _, begins in EVENTS:
        # mqtt's lines are made of parts.
        is_whole = not begins.startswith("mqtt: ")
        piece = begins if is_whole else begins.removeprefix("mqtt: ").replace("%s", "")
        assert code.count(piece.strip()) > own.count(piece.strip()), begins


def test_the_text_of_an_event_is_recognised() -> None:
    for error_id, _, begins in EVENTS:
        text = begins.replace("%s", "name")
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "%s", (text,), None)
        assert fields_of(record, f"{text} more")["ERROR_ID"] == error_id
        record.levelno = logging.INFO
        assert "ERROR_ID" not in fields_of(record, text)


def test_the_catalog_explains_every_event_and_nothing_else() -> None:
    numbers = [number for _, number, _ in EVENTS] + list(ENDING.values())
    assert len(set(numbers)) == len(numbers)
    assert sorted(re.findall("^-- ([0-9a-f]{32})$", CATALOG, re.MULTILINE)) == sorted(numbers)
    # A field that an event does not have would be shown as it is.
    assert set(re.findall("@([A-Z_]+)@", CATALOG)) <= {"MODEL", "CAMERA"}
