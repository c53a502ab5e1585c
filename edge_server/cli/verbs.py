"""The frame of verbs below another, like `plan build`: help, flags, and how an interrupt ends one.

Nothing heavy is imported here: every start of the command line reads it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

OK = 0
FAILED = 1
INTERRUPTED = 130

Run = Callable[[argparse.Namespace], int]


class Verbs:
    """The verbs below `parser`, which has none yet.

    Args:
        about: what all of them are about, for its help.
        codes: what their exit codes tell, for the end of its help.
        interrupted: said when a person interrupts one of them.
    """

    def __init__(
        self, parser: argparse.ArgumentParser, *, about: str, codes: str, interrupted: str
    ) -> None:
        parser.description, parser.epilog = about, codes
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        self._parsers = parser.add_subparsers(required=True, metavar="VERB")
        self._interrupted = interrupted

    def add(self, name: str, text: str, run: Run) -> Verb:
        """One more; `run` gets what was given, and its exit code is the process's."""
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
    """One verb and the names of its flags, for the nearest to what was mistyped."""

    def __init__(self, parser: argparse.ArgumentParser, run: Run) -> None:
        self._parser = parser
        self._flags: list[str] = []
        parser.set_defaults(verb=run, flags=self._flags)

    def takes(self, name: str, **how: Any) -> None:
        """As `ArgumentParser.add_argument`."""
        self._parser.add_argument(name, **how)
        self._flags += [name] if name.startswith("-") else []
