"""Log lines: their formats, their levels, and where they go.

A record may quote a client's text. So no quoted text begins a line that looks like one of the
daemon's, sends control sequences to a terminal, or fills the disk.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

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


@dataclass(frozen=True)
class LogSettings:
    """Which records are logged, and the format of their time.

    Attributes:
        verbose_level: 1 and more adds debug records.
        iso8601: date and time in UTC.
    """

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    iso8601: bool = False


class LogSwitches(logging.Filter):
    """Applies log settings from their first change on; before that the logging configuration is
    untouched.

    The settings apply to the handlers of the root logger, the only handlers of the daemon.

    Attributes:
        settings: those that apply now; see `change`.

    Args:
        file: the log file; empty is stderr.
    """

    def __init__(self, file: str = "") -> None:
        super().__init__()
        self.file = file
        self._lock = threading.Lock()
        root = logging.getLogger()
        self.settings = LogSettings(verbose_level=int(root.isEnabledFor(logging.DEBUG)))
        self._formatters: dict[int, logging.Formatter | None] = {}

    def change(self, **changes: Any) -> LogSettings:
        """Apply the given values; the other settings stay."""
        with self._lock:
            self.settings = settings = replace(self.settings, **changes)
            root = logging.getLogger()
            root.setLevel(logging.DEBUG if settings.verbose_level else logging.INFO)
            for handler in root.handlers:
                if self not in handler.filters:
                    self._formatters[id(handler)] = handler.formatter
                    handler.addFilter(self)
                before = self._formatters.get(id(handler))
                handler.setFormatter(in_iso8601(before) if settings.iso8601 else before)
            return settings

    def filter(self, record: logging.LogRecord) -> bool:
        settings = self.settings
        if record.levelno >= logging.ERROR:
            return settings.error
        if record.levelno >= logging.WARNING:
            return settings.warning
        if record.levelno >= logging.INFO:
            return settings.info
        return settings.verbose_level > 0


def set_up_logging(
    verbose: int,
    *,
    info: bool = True,
    warning: bool = True,
    error: bool = True,
    iso8601: bool = False,
    json: bool = False,
    path: str | None = None,
) -> LogSwitches:
    """Log to stderr, or append to the file at `path`; `verbose` 1 and more adds debug lines.

    Args:
        info: False drops lines of that level; likewise `warning` and `error`.
        iso8601: times with their date, in UTC; otherwise short times for a terminal, priorities for
            the journal.
        json: one object per line, whatever `iso8601` says.

    Returns:
        The switches that change these settings, except the path, while the process runs.

    Raises:
        OSError: the file cannot be opened.
    """
    # A line may quote a file name that is not UTF-8; stderr escapes such bytes by default, a file
    # does not.
    handler = (
        logging.StreamHandler(sys.stderr)
        if path is None
        else logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    )
    if path is None and journal_listens():
        handler.setFormatter(JournalFormatter(JsonFormatter() if json else TextFormatter()))
    else:
        handler.setFormatter(JsonFormatter() if json else TerminalFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    switches = LogSwitches(path or "")
    switches.change(info=info, warning=warning, error=error, verbose_level=verbose, iso8601=iso8601)
    return switches
