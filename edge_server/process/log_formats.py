"""Formats of log lines: times and levels for a terminal, priorities for the journal.

A record may quote a client's text. So no quoted text begins a line that looks like one of the
daemon's, sends control sequences to a terminal, or fills the disk.
"""

from __future__ import annotations

import json
import logging
import os
import time
from datetime import datetime, timezone

_PRIORITY = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}


# A traceback has some thousand characters.
_LONGEST_TEXT = 16_384
_ESCAPED = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}


def journal_listens() -> bool:
    """Return whether stderr is connected to systemd's journal."""
    return bool(os.environ.get("JOURNAL_STREAM"))


def journal_prefix(level: int) -> str:
    """Return the journal's priority prefix `<N>`; empty when stderr is not the journal."""
    return f"<{_PRIORITY.get(level, 6)}>" if journal_listens() else ""


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]}… and {len(text) - _LONGEST_TEXT} characters more"


class TextFormatter(logging.Formatter):
    """`text`, of limited length, its further lines indented, control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        text = _shortened(super().format(record))
        return text.translate(_ESCAPED).replace("\n", "\n    ")


class TerminalFormatter(TextFormatter):
    """`12:00:00 INFO    text`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")


class Iso8601Formatter(TextFormatter):
    """`2026-01-31T12:00:00Z I text`: Triton's `ISO8601`."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        return f"{at} {record.levelname[0]} {super().format(record)}"


class JsonFormatter(logging.Formatter):
    """Each record is one JSON object on its own line, for programs; duplicate fields of a record
    are left out."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc)
        fields = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "thread": record.threadName,
            "text": _shortened(record.getMessage()),
        }
        if record.exc_info:
            fields["traceback"] = _shortened(self.formatException(record.exc_info))
        # JSON escapes control characters and newlines.
        return json.dumps(fields)


class JournalFormatter(logging.Formatter):
    """Each line of `form` with its priority; the journal adds its own time."""

    def __init__(self, form: TextFormatter | JsonFormatter) -> None:
        super().__init__()
        self.form = form

    def format(self, record: logging.LogRecord) -> str:
        prefix = journal_prefix(record.levelno)
        return "\n".join(prefix + line for line in self.form.format(record).split("\n"))


def writes_json(formatter: logging.Formatter | None) -> bool:
    """Return whether each line is a JSON object."""
    if isinstance(formatter, JournalFormatter):
        return isinstance(formatter.form, JsonFormatter)
    return isinstance(formatter, JsonFormatter)


def in_iso8601(usual: logging.Formatter | None) -> logging.Formatter:
    """Return the formatter that writes `ISO8601` in place of `usual`; JSON always has full
    times."""
    if writes_json(usual):
        return usual or JsonFormatter()
    if isinstance(usual, JournalFormatter):
        return JournalFormatter(Iso8601Formatter())
    return Iso8601Formatter()
