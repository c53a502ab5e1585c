"""Where log lines go: a terminal gets times and levels, the journal gets priorities."""

from __future__ import annotations

import logging
import os
import sys

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


def set_up_logging(verbose: int) -> None:
    """Log to stderr; `verbose` 1 and more adds debug lines."""
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get("JOURNAL_STREAM"):
        handler.setFormatter(_JournalFormatter("%(message)s"))
    else:
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
        )
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True
    )
