"""Log lines: their formats, their levels, and where they go.

A record may quote a client's text. So no quoted text begins a line that looks like one of the
daemon's, sends control sequences to a terminal, or fills the disk.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_server.process.disk import error_of_place
from edge_server.process.journal import (
    PRIORITIES,
    JournalHandler,
    find_send,
    writes_to_journal,
)
from edge_server.process.log_limits import LineLimits
from edge_server.process.masking import masked

if TYPE_CHECKING:
    import io

    from edge_server.errors import SettingsError, Unavailable
    from edge_server.settings import LogSection

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
    return f"<{PRIORITIES.get(level, 6)}>" if journal_listens() else ""


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]}… and {len(text) - _LONGEST_TEXT} characters more"


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
        verbose = logging.getLogger().isEnabledFor(logging.DEBUG)
        self.settings = LogSettings(verbose_level=int(verbose))

    def change(self, **changes: Any) -> LogSettings:
        """Apply the given values; the other settings stay."""
        with self._lock:
            self.settings = settings = replace(self.settings, **changes)
            root = logging.getLogger()
            root.setLevel(logging.DEBUG if settings.verbose_level else logging.INFO)
            for handler in root.handlers:
                handler.addFilter(self)  # once, however often it is added
            return settings

    def apply(self, section: LogSection) -> None:
        """Apply what `[log]` says, except the file."""
        for handler in logging.getLogger().handlers:
            if isinstance(handler.formatter, LogFormatter):
                handler.formatter.json = section.format == "json"
        self.change(
            info=section.info,
            warning=section.warning,
            error=section.error,
            verbose_level=section.verbose,
            iso8601=section.format == "ISO8601",
        )

    def filter(self, record: logging.LogRecord) -> bool:
        settings = self.settings
        if record.levelno >= logging.ERROR:
            return settings.error
        if record.levelno >= logging.WARNING:
            return settings.warning
        if record.levelno >= logging.INFO:
            return settings.info
        return settings.verbose_level > 0


class LogFormatter(logging.Formatter):
    """Formats records: for a terminal `12:00:00 INFO    text`; for Triton's `ISO8601`
    `2026-01-31T12:00:00Z I text`; for the journal, which adds its own time, `<6>text`; or as JSON.

    A text is of limited length and shows no secret; its further lines are indented, control
    characters escaped. JSON is
    one object on its own line, with the full time in any case; duplicate fields of a record are
    left out.

    Args:
        switches: whether times are ISO8601 now.
        json: objects instead of texts.
        journal: the lines go to the journal, each with its priority.
        prefixed: the priority is a prefix of the line; False where it is sent beside the text.
    """

    def __init__(
        self,
        switches: LogSwitches,
        *,
        json: bool = False,
        journal: bool = False,
        prefixed: bool = True,
    ) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self.json = json
        self._switches = switches
        self._journal = journal
        self._prefixed = prefixed

    def format(self, record: logging.LogRecord) -> str:
        text = self._object(record) if self.json else self._text(record)
        if not (self._journal and self._prefixed):
            return text
        prefix = journal_prefix(record.levelno)
        return "\n".join(prefix + line for line in text.split("\n"))

    def _text(self, record: logging.LogRecord) -> str:
        text = (
            _shortened(masked(super().format(record))).translate(_ESCAPED).replace("\n", "\n    ")
        )
        if self._switches.settings.iso8601:
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
            return f"{at} {record.levelname[0]} {text}"
        if self._journal:
            return text
        return f"{self.formatTime(record, self.datefmt)} {record.levelname:7} {text}"

    def _object(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc)
        fields = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "thread": record.threadName,
            "text": _shortened(masked(record.getMessage())),
        }
        if record.exc_info:
            fields["traceback"] = _shortened(masked(self.formatException(record.exc_info)))
        # JSON escapes control characters and newlines.
        return json.dumps(fields)


def logs_json() -> bool:
    """Return whether the log is JSON, for programs."""
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    return any(isinstance(each, LogFormatter) and each.json for each in formatters)


def logs_fields() -> bool:
    """Return whether records reach the journal with their fields."""
    return any(isinstance(each, JournalHandler) for each in logging.getLogger().handlers)


def check_log_file(path: str) -> None:
    """Return if the log can be appended to `path`; changes nothing.

    Raises:
        SettingsError: it cannot, and will not be; Unavailable if it may be later.
    """
    try:
        # O_NONBLOCK: the open of a pipe must not wait for its reader.
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC))
    except FileNotFoundError as error:
        directory = Path(path).absolute().parent
        if not directory.is_dir():
            raise _not_writable(path, error) from error
        if not os.access(directory, os.W_OK | os.X_OK):
            denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            raise _not_writable(path, denied) from error
    except OSError as error:
        raise _not_writable(path, error) from error


def _not_writable(path: str, error: OSError) -> SettingsError | Unavailable:
    # The file's disk may be mounted later, or have space again.
    return error_of_place(error, f"log.file: {path}: cannot be written: {error.strerror}")


class LogFile(logging.FileHandler):
    """Appends to a file, and to a new one where that was moved or removed, as logrotate does; where
    it cannot, stderr gets one line for each reason, and the log's lines are lost."""

    def __init__(self, path: str) -> None:
        # A line may quote a file name that is not UTF-8; stderr escapes such bytes by default, a
        # file does not.
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._path = path
        self._reasons: set[str] = set()

    def _open(self) -> io.TextIOWrapper:
        # O_NONBLOCK: neither the open of a pipe nor a line waits for its reader.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self.baseFilename, flags, 0o666)
        return open(descriptor, "a", encoding=self.encoding, errors=self.errors)  # noqa: PTH123

    def emit(self, record: logging.LogRecord) -> None:
        try:
            former = self.stream
            if former is not None and not self._is_at_path(former):
                self.stream = self._open()
                former.close()
        except OSError:
            self.handleError(record)
        super().emit(record)

    def _is_at_path(self, stream: io.TextIOWrapper) -> bool:
        own = os.fstat(stream.fileno())
        try:
            found = os.stat(self.baseFilename)  # noqa: PTH116 - half the time, at every line
        except FileNotFoundError:
            return False
        return (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino)

    # The name is that of logging.Handler.
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        reason = str(error.strerror)
        if reason not in self._reasons:
            self._reasons.add(reason)
            with suppress(OSError, ValueError):
                print(
                    f"edge-server: log.file: {self._path}: cannot be written: {reason}; until it "
                    "can be, the log's lines are lost",
                    file=sys.stderr,
                    flush=True,
                )


def set_up_logging(settings: LogSection, *, fields: bool = True) -> LogSwitches:
    """Log as `settings` say; return the switches that change them, except the file, while the
    process runs.

    Args:
        settings: the section `[log]`.
        fields: the journal gets fields with each record, where systemd's Python library is
            installed; such records do not reach a console beside the journal.

    Raises:
        SettingsError: the file cannot be opened, and will not be; Unavailable if it may be later.
    """
    switches = LogSwitches(settings.file or "")
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if settings.file is not None:
        try:
            handler = LogFile(settings.file)
        except OSError as error:
            raise _not_writable(settings.file, error) from error
    journal = settings.file is None and journal_listens()
    as_json = settings.format == "json"
    send = find_send() if journal and fields and not as_json and writes_to_journal() else None
    if send is not None:
        handler = JournalHandler(send)
    handler.setFormatter(LogFormatter(switches, journal=journal, prefixed=send is None))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    switches.apply(settings)
    # After the switches: what they leave out does not count.
    handler.addFilter(LineLimits(handler))
    return switches


def end_logging() -> None:
    """Write the counts of repeated lines that are due, and close the log."""
    for handler in logging.getLogger().handlers:
        for each in handler.filters:
            if isinstance(each, LineLimits):
                each.close()
    logging.shutdown()
