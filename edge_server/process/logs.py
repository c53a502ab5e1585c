"""Log lines: their formats, their levels, and where they go.

A record may quote a client's text. So no quoted text begins a line that looks like one of the
daemon's, sends control sequences to a terminal, or fills the disk.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import lru_cache
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edge_server.process.disk import error_of_place
from edge_server.process.text import masked, shortened

if TYPE_CHECKING:
    from collections.abc import Callable

    Send = Callable[..., object]
    import io

    from edge_server.errors import SettingsError, Unavailable
    from edge_server.settings import LogSection

# How often the same line is logged in a window, so that a state that comes and goes shows as what
# it is; and how many lines of one logger: a start with many models logs hundreds.
WINDOW_S = 30.0
SAME_LINES = 3
MOST_LINES = 300


class LineLimits(logging.Filter):
    """Drops repeated lines and floods of a handler, and logs how many of them were dropped.

    The counts are logged once a window is over and the handler gets another line, or closes. Debug
    lines have no limits.
    """

    def __init__(
        self, handler: logging.Handler, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._handler = handler
        self._now_s = now_s
        self._lock = threading.Lock()
        self._until_s = -math.inf
        # How often each line and each logger has come in this window.
        self._lines: Counter[tuple[str, int, str]] = Counter()
        self._sources: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is logged; counts that are due are logged before it."""
        if record.levelno <= logging.DEBUG:
            return True
        now_s = self._now_s()
        if now_s >= self._until_s:
            self.close()
            self._until_s = now_s + WINDOW_S
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 - the handler reports a broken record
            return True
        if record.exc_info:
            # One fault with two traces is two lines.
            text += f": {record.exc_info[1]!r}"
        key = record.name, record.levelno, text
        with self._lock:
            if self._lines[key] < SAME_LINES:
                self._sources[record.name] += 1
                if self._sources[record.name] > MOST_LINES:
                    # Its text is not kept.
                    return False
            self._lines[key] += 1
            return self._lines[key] <= SAME_LINES

    def close(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, Counter()
            sources, self._sources = self._sources, Counter()
        for (name, level, text), count in lines.items():
            if count > SAME_LINES:
                self._write(name, level, f"{text} [{count - SAME_LINES} more of it]")
        for name, count in sources.items():
            if count > MOST_LINES:
                left = count - MOST_LINES
                text = f"log: {left} lines of this source were left out: too many at once"
                self._write(name, logging.WARNING, text)

    def _write(self, name: str, level: int, text: str) -> None:
        record = logging.LogRecord(name, level, "", 0, "%s", (text,), None)
        self._handler.acquire()
        try:
            self._handler.emit(record)
        finally:
            self._handler.release()


@lru_cache(maxsize=256)
def log_once(log: logging.Logger, text: str) -> None:
    """Log `text` once in the life of this process: a lost camera is opened again and again."""
    log.info("%s", text)


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


# What a person has to do something about: for `journalctl ERROR_ID=…`, its entry in
# systemd/edge-server.catalog, and how its log line begins, as it stands in the code, with `%s` for
# names.
EVENTS = (
    ("model_unavailable", "bf8858b58358482492da443825b08938", "model %s: UNAVAILABLE: "),
    ("model_not_updated", "492431430e4845f0b8e80dfeb1b205f4", "model %s: serves on as it was"),
    ("model_rolled_back", "e85b6a3f26b3473298554e809419002f", "model %s: rolled back: "),
    ("model_quarantined", "bc1b3e507c6949bbb96149879e3d7f44", "model %s: quarantined: "),
    ("model_without_plan", "efd876cb7b514c2faedeaf63707b6a40", "model %s: no plan that fits: "),
    (
        "camera_without_lanes",
        "b0ebf0940db144ae9643f10aa060e807",
        "camera %s: no lanes from now on: ",
    ),
    ("settings_not_reloaded", "3396544b0eb84bd2bbc4339419923905", "settings: not reloaded"),
    ("broker_unreachable", "0ec5f7503b454daca46dbc3a7b7040e3", "mqtt: cannot reach "),
    ("broker_refuses", "61fa3493f4c241af80f91b4afbb5af02", "mqtt: %s refuses us: "),
)
_EVENT_PATTERNS = [
    (error_id, message_id, re.compile(re.escape(text).replace("%s", r"[^:\n]+")))
    for error_id, message_id, text in EVENTS
]
# Errors that end the daemon, by the name of their class, which the record has in `error_classes`.
ENDING = {
    "SettingsError": "9ecac4ab6ba545f393ab0a632035235f",
    "ModelConfigError": "8352cc244d0d4be6ba99a61394c32d26",
    "Unavailable": "4726825be8fb4b5ebc477b5e29970b60",
    "DeviceLost": "8f6cc2ede07e468caf2be8d71983577a",
    "StageStuck": "6f96b88a9c43415094399c8f129579b6",
}


def writes_to_journal() -> bool:
    """Return whether stderr is the journal itself, and no file or pipe."""
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
    fields: dict[str, str] = {}
    template, _, _ = str(record.msg).partition(":")
    if template in _SUBJECTS and record.args and isinstance(record.args, tuple):
        fields[_SUBJECTS[template]] = str(record.args[0])
    if record.levelno < logging.WARNING:
        return fields
    for name in getattr(record, "error_classes", ()):
        if name in ENDING:
            return {**fields, "ERROR_ID": name, "MESSAGE_ID": ENDING[name]}
    for error_id, message_id, pattern in _EVENT_PATTERNS:
        if pattern.match(text):
            return {**fields, "ERROR_ID": error_id, "MESSAGE_ID": message_id}
    return fields


# A traceback has some thousand characters.
_LONGEST_TEXT = 16_384
_ESCAPED = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}
# Line ends that are no control characters, and what lets the rest of a line run backwards.
_ESCAPED |= {
    code: f"\\u{code:04x}"
    for code in (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}


def journal_listens() -> bool:
    return bool(os.environ.get("JOURNAL_STREAM"))


def journal_prefix(level: int) -> str:
    """Return the journal's priority prefix `<N>`; empty when stderr is not the journal."""
    return f"<{PRIORITIES.get(level, 6)}>" if journal_listens() else ""


def _shortened(text: str) -> str:
    return shortened(text, _LONGEST_TEXT, counted=True)


def _plain(text: str) -> str:
    """Return `text` of limited length, without secrets, its control characters escaped."""
    return _shortened(masked(text)).translate(_ESCAPED)


class TailLine(NamedTuple):
    """A line of the log; `id` counts those of this process, `level` is a word like `warning`."""

    id: int
    epoch_ms: int
    level: str
    text: str


# Of each line of the tail; a traceback is rarely longer.
_LONGEST_KEPT = 4096


class LogTail(logging.Handler):
    """Keeps the newest lines of the log in memory: for people who see the page, not the journal.

    Any thread may read it. At most `kept` lines of 4096 characters.
    """

    def __init__(self, kept: int = 300) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter())
        self._lines: deque[TailLine] = deque(maxlen=kept)
        self._count = 0

    @property
    def last_id(self) -> int:
        """The id of the newest line; 0 before the first one."""
        return self._count

    def after(self, line_id: int) -> list[TailLine]:
        """Return the lines that came after that one, the oldest first; all of them for an id that
        this process has not given."""
        lines = self._lines.copy()
        return [each for each in lines if each.id > line_id or line_id > self._count]

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = shortened(_plain(self.format(record)), _LONGEST_KEPT, counted=True)
        except Exception:  # noqa: BLE001 - the log's own handler reports a broken record
            return
        self._count += 1
        at_ms = round(1e3 * record.created)
        self._lines.append(TailLine(self._count, at_ms, record.levelname.lower(), text))


@dataclass(frozen=True)
class LogSettings:
    """Which records are logged, debug ones from `verbose_level` 1 on, and the format of their
    time."""

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    iso8601: bool = False


class LogSwitches(logging.Filter):
    """Applies log settings to the handlers of the root logger, from their first change on.

    Attributes:
        settings: those that apply now.
        file: the log file; empty is stderr.
        tail: the newest lines; empty where `set_up_logging` has not connected it.
    """

    def __init__(self, file: str = "") -> None:
        super().__init__()
        self.file = file
        self.tail = LogTail()
        self._lock = threading.Lock()
        verbose = logging.getLogger().isEnabledFor(logging.DEBUG)
        self.settings = LogSettings(verbose_level=int(verbose))

    def change(self, **changes: Any) -> LogSettings:
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
    characters escaped. JSON is one object on its own line, with the full time in any case.

    Args:
        switches: whether times are ISO8601 now.
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
        text = _plain(super().format(record)).replace("\n", "\n    ")
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
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    return any(isinstance(each, LogFormatter) and each.json for each in formatters)


def logs_fields() -> bool:
    return any(isinstance(each, JournalHandler) for each in logging.getLogger().handlers)


def check_log_file(path: str) -> None:
    """Raise SettingsError where the log cannot be appended to `path`, Unavailable where it may be
    later; nothing is changed."""
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


class LogFile(WatchedFileHandler):
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
        return open(
            self.baseFilename,
            "a",
            encoding=self.encoding,
            errors=self.errors,
            opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK, 0o666),
        )

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

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
    logging.basicConfig(level=logging.INFO, handlers=[handler, switches.tail], force=True)
    switches.apply(settings)
    # After the switches: what they leave out does not count.
    for each in (handler, switches.tail):
        each.addFilter(LineLimits(each))
    return switches


def end_logging() -> None:
    for handler in logging.getLogger().handlers:
        for each in handler.filters:
            if isinstance(each, LineLimits):
                each.close()
    logging.shutdown()
