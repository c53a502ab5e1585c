"""Set up logging: the destination and the levels."""

from __future__ import annotations

import logging
import sys

from edge_server.process.log_formats import (
    JournalFormatter,
    JsonFormatter,
    TerminalFormatter,
    TextFormatter,
    journal_listens,
)
from edge_server.process.log_switches import LogSwitches


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
