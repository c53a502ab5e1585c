"""Verbs: the frame of verbs below another, like `plan build`: their help.

Nothing heavy is imported here: every start of the command line imports this module.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from typing import TypeVar

from edge_server import errors
from edge_server.process.logs import journal_prefix, logs_fields, logs_json
from edge_server.process.masking import masked
from edge_server.process.utf8 import shown

log = logging.getLogger(__name__)

OK = 0
FAILED = 1
USAGE = 2
UNAVAILABLE = 69
ALREADY_RUNNING = 75
CONFIGURATION = 78
DEVICE_LOST = 86
RESTART_ME = 87
INTERRUPTED = 130

# systemd does not restart a process that ended with 2 or 78: those codes are for permanent errors.
# Temporary errors have one of the others. An error class that is missing has its parent's code.
EXIT_CODES: dict[type[BaseException], int] = {
    errors.SettingsError: CONFIGURATION,
    errors.InvalidRequest: CONFIGURATION,
    errors.ModelConfigError: CONFIGURATION,
    errors.ModelLoadError: UNAVAILABLE,
    errors.SourceError: UNAVAILABLE,
    errors.SourceUriError: CONFIGURATION,
    errors.Unavailable: UNAVAILABLE,
    errors.Unsupported: CONFIGURATION,
    errors.AlreadyRunning: ALREADY_RUNNING,
    errors.DeviceLost: DEVICE_LOST,
    errors.StageStuck: RESTART_ME,
    errors.EdgeServerError: FAILED,
}

EXIT_CODE_MEANINGS = {
    OK: "ended as requested, also by SIGTERM",
    FAILED: "failed",
    USAGE: "usage: a verb, flag or argument that is unknown or missing",
    UNAVAILABLE: "something required is unavailable and may come: a taken port, a repository or "
    "another place that is not mounted yet, an unreadable recording, a model that did not load "
    "this time though its files are not known to be wrong (a Python model's `initialize` raised, "
    "no memory, no GPU yet, a full disk)",
    ALREADY_RUNNING: "another daemon holds the Unix socket, or the copies of models",
    CONFIGURATION: "the configuration, a flag's value or a model's files are wrong and stay so; "
    "the text names file, key and remedy",
    DEVICE_LOST: "a GPU is lost (a CUDA error that stays): restart me",
    RESTART_ME: "a part of the daemon hung: restart me",
    INTERRUPTED: "interrupted by SIGINT before the verb ended",
}


def report(error: errors.EdgeServerError) -> int:
    """Print `error`, or log it where programs read the log; return its exit code."""
    prefix = journal_prefix(logging.ERROR)
    for line in masked(str(error)).splitlines():
        if logs_json() or logs_fields():
            log.error("%s", line, extra={"error_classes": _class_names(error)})
        else:
            print(f"{prefix}edge-server: {shown(line)}", file=sys.stderr, flush=True)
    return next(EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES)


def _class_names(error: errors.EdgeServerError) -> list[str]:
    return [kind.__name__ for kind in type(error).__mro__]


N = TypeVar("N", int, float)
Run = Callable[[argparse.Namespace], int]


class Verbs:
    """The verbs below `parser`, which has none yet.

    Args:
        about: the subject of all the verbs, for the help of `parser`.
        codes: the meaning of their exit codes, for the end of that help.
        interrupted: the text printed when a user interrupts a verb.
    """

    def __init__(
        self,
        parser: argparse.ArgumentParser,
        *,
        about: str,
        codes: str,
        interrupted: str = "\nedge-server: interrupted",
    ) -> None:
        parser.description, parser.epilog = about, codes
        self._parsers = parser.add_subparsers(required=True, metavar="VERB")
        self._interrupted = interrupted

    def add(self, name: str, text: str, run: Run) -> argparse.ArgumentParser:
        """Add a verb; `run` gets the parsed arguments and returns the process's exit code."""
        parser = self._parsers.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        parser.set_defaults(verb=run, interrupted=self._interrupted)
        return parser


def number(
    kind: Callable[[str], N], is_right: Callable[[N], bool], words: str
) -> Callable[[str], N]:
    """Return a parser of a flag's number, which names in `words` what it takes."""

    def parse(text: str) -> N:
        try:
            value = kind(text)
        except ValueError:
            pass
        else:
            if is_right(value):
                return value
        raise argparse.ArgumentTypeError(f"{text}: give {words}")

    return parse


def _digits(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


positive = number(_digits, lambda value: value >= 1, "a whole number, 1 or above")
whole_number = number(_digits, lambda _: True, "a whole number, 0 or above")
seconds = number(float, lambda value: 0 <= value < 1e6, "seconds, 0 or above")


def interval(text: str) -> float:
    """Parse seconds of a flag that are repeated."""
    value = seconds(text)
    if value < 0.1:
        raise argparse.ArgumentTypeError(f"{text}: give seconds, 0.1 or above")
    return value
