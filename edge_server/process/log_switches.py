"""Log settings, changed while the process runs."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from typing import Any

from edge_server.process.log_formats import in_iso8601


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

    Args:
        file: the log file; empty is stderr.
    """

    def __init__(self, file: str = "") -> None:
        super().__init__()
        self.file = file
        self._lock = threading.Lock()
        root = logging.getLogger()
        self._settings = LogSettings(verbose_level=int(root.isEnabledFor(logging.DEBUG)))
        self._formatters: dict[int, logging.Formatter | None] = {}

    @property
    def settings(self) -> LogSettings:
        return self._settings

    def change(self, **changes: Any) -> LogSettings:
        """Apply the given values; the other settings stay."""
        with self._lock:
            self._settings = settings = replace(self._settings, **changes)
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
        settings = self._settings
        if record.levelno >= logging.ERROR:
            return settings.error
        if record.levelno >= logging.WARNING:
            return settings.warning
        if record.levelno >= logging.INFO:
            return settings.info
        return settings.verbose_level > 0
