"""Verbs: the frame of verbs below another, like `plan build`: help and interrupts.

Nothing heavy is imported here: every start of the command line imports this module.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from edge_server.cli.exit_codes import INTERRUPTED

Run = Callable[[argparse.Namespace], int]


class Verbs:
    """The verbs below `parser`, which has none yet.

    Args:
        about: the subject of all the verbs, for the help of `parser`.
        codes: the meaning of their exit codes, for the end of that help.
        interrupted: the text printed when a user interrupts a verb.
    """

    def __init__(
        self, parser: argparse.ArgumentParser, *, about: str, codes: str, interrupted: str
    ) -> None:
        parser.description, parser.epilog = about, codes
        self._parsers = parser.add_subparsers(required=True, metavar="VERB")
        self._interrupted = interrupted

    def add(self, name: str, text: str, run: Run) -> argparse.ArgumentParser:
        """Add a verb; `run` gets the parsed arguments and returns the process's exit code."""
        parser = self._parsers.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        parser.set_defaults(verb=self._interruptible(run))
        return parser

    def _interruptible(self, run: Run) -> Run:
        def until_interrupted(arguments: argparse.Namespace) -> int:
            try:
                return run(arguments)
            except KeyboardInterrupt:
                print(self._interrupted, file=sys.stderr)
                return INTERRUPTED

        return until_interrupted


def positive(text: str) -> int:
    """Parse a whole number of a flag, 1 or above."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number, 1 or above")
    return int(text)


def whole_number(text: str) -> int:
    """Parse a whole number of a flag, 0 or above."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: give a whole number, 0 or above")
    return int(text)


def seconds(text: str) -> float:
    """Parse a number of seconds of a flag."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: give seconds, 0 or above")
    return value
