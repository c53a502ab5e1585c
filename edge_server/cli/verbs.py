"""Verbs: the frame of verbs below another, like `plan build`: help, flags and interrupts.

Nothing heavy is imported here: every start of the command line imports this module.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

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
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        self._parsers = parser.add_subparsers(required=True, metavar="VERB")
        self._interrupted = interrupted

    def add(self, name: str, text: str, run: Run) -> Verb:
        """Add a verb; `run` gets the parsed arguments and returns the process's exit code."""
        parser = self._parsers.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        return Verb(parser, self._interruptible(run))

    def _interruptible(self, run: Run) -> Run:
        def until_interrupted(arguments: argparse.Namespace) -> int:
            try:
                return run(arguments)
            except KeyboardInterrupt:
                print(self._interrupted, file=sys.stderr)
                return INTERRUPTED

        return until_interrupted


class Verb:
    """One verb and the names of its flags, which suggest the nearest name after a typing error."""

    def __init__(self, parser: argparse.ArgumentParser, run: Run) -> None:
        self._parser = parser
        self._flags: list[str] = []
        parser.set_defaults(verb=run, flags=self._flags)

    def takes(self, name: str, **how: Any) -> None:
        """Add an argument, like `ArgumentParser.add_argument`."""
        self._parser.add_argument(name, **how)
        self._flags += [name] if name.startswith("-") else []


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
