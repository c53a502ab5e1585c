"""Records in systemd's journal with fields to search by: MODEL, CAMERA, ERROR_ID, MESSAGE_ID.

The fields need systemd's own Python library (python3-systemd); without it records go to stderr, and
the journal has their text and priority alone. sd_notify needs no library: see `process.sd_notify`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Send = Callable[..., object]

PRIORITIES = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}
# Log lines name their subject first.
_SUBJECTS = {
    "model %s": "MODEL",
    "ensemble %s": "MODEL",
    "plan of model %s": "MODEL",
    "camera %s": "CAMERA",
}


@dataclass(frozen=True)
class CatalogEntry:
    """An event that a person has to do something about.

    Attributes:
        error_id: for `journalctl ERROR_ID=…`.
        message_id: its entry in systemd/edge-server.catalog.
        text: how its log line begins, as it stands in the code, with `%s` for names.
    """

    error_id: str
    message_id: str
    text: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.text).replace("%s", r"[^:\n]+"))


EVENTS = (
    CatalogEntry(
        "model_unavailable", "bf8858b58358482492da443825b08938", "model %s: UNAVAILABLE: "
    ),
    CatalogEntry(
        "model_not_updated", "492431430e4845f0b8e80dfeb1b205f4", "model %s: serves on as it was"
    ),
    CatalogEntry(
        "model_rolled_back", "e85b6a3f26b3473298554e809419002f", "model %s: rolled back: "
    ),
    CatalogEntry(
        "model_quarantined", "bc1b3e507c6949bbb96149879e3d7f44", "model %s: quarantined: "
    ),
    CatalogEntry(
        "model_without_plan", "efd876cb7b514c2faedeaf63707b6a40", "model %s: no plan that fits: "
    ),
    CatalogEntry(
        "camera_without_lanes",
        "b0ebf0940db144ae9643f10aa060e807",
        "camera %s: no lanes from now on: ",
    ),
    CatalogEntry(
        "settings_not_reloaded", "3396544b0eb84bd2bbc4339419923905", "settings: not reloaded"
    ),
    CatalogEntry("broker_unreachable", "0ec5f7503b454daca46dbc3a7b7040e3", "mqtt: cannot reach "),
    CatalogEntry("broker_refuses", "61fa3493f4c241af80f91b4afbb5af02", "mqtt: %s refuses us: "),
)
# Errors that end the daemon, by the name of their class, which the record has in `error_classes`.
ENDING = {
    "SettingsError": "9ecac4ab6ba545f393ab0a632035235f",
    "ModelConfigError": "8352cc244d0d4be6ba99a61394c32d26",
    "Unavailable": "4726825be8fb4b5ebc477b5e29970b60",
    "DeviceLost": "8f6cc2ede07e468caf2be8d71983577a",
    "StageStuck": "6f96b88a9c43415094399c8f129579b6",
}


def writes_to_journal() -> bool:
    """Return whether stderr is the journal itself, and no file or pipe of whoever started this."""
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def find_send() -> Send | None:
    """Return systemd's `journal.send`; None where its Python library is not installed."""
    try:
        from systemd.journal import send  # noqa: PLC0415 - optional
    except ImportError:
        return None
    found: Send = send
    return found


class JournalHandler(logging.Handler):
    """Sends each record as one entry of the journal, with its fields.

    systemd's own handler of that name also sends a record's arguments, passwords among them.
    """

    def __init__(self, send: Send) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            self._send(
                text,
                PRIORITY=str(PRIORITIES.get(record.levelno, 6)),
                SYSLOG_IDENTIFIER="edge-server",
                LOGGER=record.name,
                THREAD_NAME=str(record.threadName),
                CODE_FILE=record.pathname,
                CODE_LINE=record.lineno,
                CODE_FUNC=record.funcName,
                **fields_of(record, text),
            )
        # As every handler of logging: a line that cannot be sent ends nothing.
        except Exception:  # noqa: BLE001
            self.handleError(record)


def fields_of(record: logging.LogRecord, text: str) -> dict[str, str]:
    """Return the fields of a record whose formatted text is `text`."""
    fields: dict[str, str] = {}
    template, _, _ = str(record.msg).partition(":")
    if template in _SUBJECTS and record.args and isinstance(record.args, tuple):
        fields[_SUBJECTS[template]] = str(record.args[0])
    if record.levelno < logging.WARNING:
        return fields
    for name in getattr(record, "error_classes", ()):
        if name in ENDING:
            return {**fields, "ERROR_ID": name, "MESSAGE_ID": ENDING[name]}
    for event in EVENTS:
        if event.pattern.match(text):
            return {**fields, "ERROR_ID": event.error_id, "MESSAGE_ID": event.message_id}
    return fields
