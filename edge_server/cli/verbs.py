"""Verbs: the frame of verbs below another, like `plan build`: help and interrupts.

Nothing heavy is imported here: every start of the command line imports this module.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TypeVar

from edge_server.cli.exit_codes import INTERRUPTED

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
