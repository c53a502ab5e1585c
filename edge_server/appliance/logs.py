"""Where log lines go: a terminal gets times and levels, the journal gets priorities."""

from __future__ import annotations

import logging
import os
import sys
import time

_PRIORITY = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}


def journal_prefix(level: int) -> str:
    """`<N>` in front of a line is how the journal learns its priority; nothing elsewhere."""
    return f"<{_PRIORITY.get(level, 6)}>" if os.environ.get("JOURNAL_STREAM") else ""


class _JournalFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        prefix = journal_prefix(record.levelno)
        return "\n".join(prefix + line for line in super().format(record).splitlines())


class _Iso8601Formatter(logging.Formatter):
    """`2026-01-31T12:00:00Z I text`: Triton's `ISO8601`."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        return f"{at} {record.levelname[0]} {super().format(record)}"


def set_up_logging(
    verbose: int,
    *,
    info: bool = True,
    warning: bool = True,
    error: bool = True,
    iso8601: bool = False,
    path: str | None = None,
) -> None:
    """Log to stderr, or to the end of the file at `path`; `verbose` 1 and more adds debug lines.

    Args:
        info: False leaves lines of that level out; likewise `warning` and `error`.
        iso8601: times with their date, in UTC; else short ones for a terminal, priorities for
            the journal.

    Raises:
        OSError: the file cannot be opened.
    """
    handler = logging.StreamHandler(sys.stderr) if path is None else logging.FileHandler(path)
    if iso8601:
        handler.setFormatter(_Iso8601Formatter("%(message)s"))
    elif path is None and os.environ.get("JOURNAL_STREAM"):
        handler.setFormatter(_JournalFormatter("%(message)s"))
    else:
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
        )
    silent = {
        level
        for level, told in (
            (logging.INFO, info),
            (logging.WARNING, warning),
            (logging.ERROR, error),
        )
        if not told
    }
    handler.addFilter(lambda record: record.levelno not in silent)
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True
    )
