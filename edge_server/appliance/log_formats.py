"""How a log line looks: a terminal gets times and levels, the journal gets priorities.

What is told may quote what a client sent. So nothing in it begins a line that looks like one of
ours, steers a terminal, or fills the disk.
"""

from __future__ import annotations

import logging
import os
import time

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
    """Whether what is written to stderr goes to systemd's journal."""
    return bool(os.environ.get("JOURNAL_STREAM"))


def journal_prefix(level: int) -> str:
    """`<N>` in front of a line is how the journal learns its priority; nothing elsewhere."""
    return f"<{_PRIORITY.get(level, 6)}>" if journal_listens() else ""


class TextFormatter(logging.Formatter):
    """`text`, of limited length, its further lines indented, control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if len(text) > _LONGEST_TEXT:
            text = f"{text[:_LONGEST_TEXT]}… and {len(text) - _LONGEST_TEXT} characters more"
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


class JournalFormatter(logging.Formatter):
    """Each line of `form` with its priority; the journal has times of its own."""

    def __init__(self, form: TextFormatter) -> None:
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        prefix = journal_prefix(record.levelno)
        return "\n".join(prefix + line for line in self._form.format(record).split("\n"))


def in_iso8601(usual: logging.Formatter | None) -> logging.Formatter:
    """What writes `ISO8601` where `usual` wrote before."""
    if isinstance(usual, JournalFormatter):
        return JournalFormatter(Iso8601Formatter())
    return Iso8601Formatter()
