"""A verb of the command line: its declaration, which is its help; its run, and its exit codes.

Nothing heavy is imported here: every start of the command line imports this module.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from edge_server import errors
from edge_server.cli.arguments import FORMS
from edge_server.process.logs import journal_prefix, logs_fields, logs_json
from edge_server.process.masking import masked
from edge_server.process.utf8 import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    "although its files may be right (a Python model's `initialize` raised an error, no memory, no "
    "GPU yet, a full disk)",
    ALREADY_RUNNING: "another daemon holds the Unix socket, or the copies of models; of `models "
    "push --wait`: the daemon has not decided yet",
    CONFIGURATION: "the configuration, a flag's value or a model's files are wrong; a restart does "
    "not help; the text names file, key and remedy",
    DEVICE_LOST: "a GPU is lost (a CUDA error that stays), or a Jetson's came late: the daemon "
    "must be restarted",
    RESTART_ME: "a part of the daemon hung: the daemon must be restarted",
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


@dataclass(frozen=True)
class Verb:
    """A verb, or one that has verbs below it.

    Attributes:
        name: its words.
        run: `module:function` below edge_server. It gets the parsed arguments and returns the exit
            code, lines to print, or None. Empty where verbs are below.
        text: the help in one line.
        arguments: see `add_arguments`.
        about: the subject; by default `text`.
        examples: the arguments of each.
        codes: the end of the help: the meaning of exit codes.
        interrupted: printed when a user interrupts the verb, or one below it.
    """

    name: str
    run: str
    text: str
    arguments: str = ""
    about: str = ""
    examples: tuple[str, ...] = ()
    codes: str = ""
    interrupted: str = ""

    @staticmethod
    def all_of(text: str) -> list[Verb]:
        """Return the verbs of a text in the form of `commands`."""
        shared: dict[str, list[str]] = {}
        verbs = []
        for block in reversed(re.split(r"\n(?=\S)", text.strip())):
            head, *lines = block.splitlines()
            arguments = [line[4:] for line in lines if line.startswith("    ")]
            if head.startswith("@"):
                shared[head] = arguments
                continue
            arguments = [line for each in arguments for line in shared.get(each, (each,))]
            by_mark = {
                mark: [line[4:] for line in lines if line[:3] == f"  {mark}"] for mark in "$!"
            }
            prose = "\n".join(line[2:] for line in lines if line[:3] not in ("   ", "  $", "  !"))
            about, exits, codes = prose.strip().partition("exit codes:")
            name, run, text_in_short = (column.strip() for column in head.split("|"))
            verbs.append(
                Verb(
                    name,
                    run,
                    text_in_short,
                    "\n".join(arguments),
                    about=about.strip(),
                    examples=tuple(by_mark["$"]),
                    codes=exits + codes,
                    interrupted="".join(by_mark["!"]),
                )
            )
        return verbs[::-1]

    def __call__(self, arguments: argparse.Namespace) -> int:
        """Run it; return the exit code."""
        module, _, function = self.run.partition(":")
        done = getattr(import_module(f"edge_server.{module}"), function)(arguments)
        if done is None or isinstance(done, int):
            return done or OK
        for line in done:
            print(line, flush=True)
        return OK


def add_verbs(program: str, parsers: Any, verbs: Sequence[Verb]) -> list[argparse.Action]:
    """Add `verbs` to `parsers`, of argparse's `add_subparsers`; return all arguments.

    Args:
        verbs: each behind the one that it is below.
    """
    actions: list[argparse.Action] = []
    above: dict[str, tuple[Any, str]] = {"": (parsers, "")}
    for verb in verbs:
        place, _, word = verb.name.rpartition(" ")
        siblings, interrupted = above[place]
        each = siblings.add_parser(
            word,
            help=verb.text,
            description=verb.about or f"{verb.text[0].upper()}{verb.text[1:]}.",
            epilog="\n\n".join(filter(None, (_examples(program, verb, verbs), verb.codes))),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        added = list(add_arguments(each, verb.arguments))
        flags = [name for action in added for name in action.option_strings]
        interrupted = verb.interrupted or interrupted
        each.set_defaults(verb=verb, flags=flags, interrupted=interrupted)
        if not verb.run:
            below = each.add_subparsers(required=True, metavar="VERB")
            above[verb.name] = below, interrupted or "edge-server: interrupted"
        actions += added
    return actions


def _examples(program: str, verb: Verb, verbs: Sequence[Verb]) -> str:
    """Return the examples of a verb, or the first one of each verb below it."""
    shown = [(verb.name, each) for each in verb.examples]
    if not verb.run:
        below = (each for each in verbs if each.name.startswith(f"{verb.name} "))
        shown = [(each.name, each.examples[0]) for each in below]
    lines = (f"  {program} {name} {each}".rstrip() for name, each in shown)
    return "\n".join(("examples:", *lines))


def add_arguments(parser: argparse.ArgumentParser, text: str) -> Iterator[argparse.Action]:
    """Add the arguments of `text`, which has a line for each and its help behind two spaces.

    Lines further to the right continue the help. `--flag` alone is a switch; `--flag WORD`, and
    `WORD` alone, take a value, read as `FORMS` has it; `WORD...` several, `[WORD]` perhaps one, and
    `[WORD=X]` means X where it is not given; `WORD!` must be given; `WORD = X` has the default X;
    `{a,b}` are choices. Of flags behind `|` exactly one is given. A line that ends with a colon
    titles a group.
    """
    place: Any = parser
    one: Any = None
    for block in re.split(r"\n(?=\S)", text) if text else ():
        spec, *rest = re.split(r"  +|\n *", block, maxsplit=1)
        about = " ".join(" ".join(rest).split())
        if spec.endswith(":"):
            place = parser.add_argument_group(spec[:-1])
            continue
        if spec.startswith("|"):
            one = one or parser.add_mutually_exclusive_group(required=True)
        spec, _, default = spec.partition(" = ")
        words = spec.lstrip("|").split()
        names = [word.rstrip(",") for word in words if word.startswith("-")]
        how = _value("" if words[-1] in names else words[-1], names)
        if "metavar" in how and "choices" in how:
            about = ": ".join(filter(None, (about, ", ".join(how["choices"]))))
        if default:
            how["default"] = default
            about = "; ".join(filter(None, (about, f"default: {default}")))
        how["help"] = about if about == argparse.SUPPRESS else about.replace("%", "%%") or None
        yield (one if spec.startswith("|") else place).add_argument(*names, **how)


def _value(word: str, names: Sequence[str]) -> dict[str, Any]:
    """Return how argparse takes a value, of a flag with `names` or by its place."""
    if not word:
        return {"action": "store_true"}
    bare, _, const = word.strip("[]").partition("=") if word[0] == "[" else (word, "", "")
    metavar = bare.removesuffix("...").removesuffix("!")
    form = FORMS.get(names[-1] if names else metavar) or FORMS.get(metavar)
    how: dict[str, Any] = {"metavar": metavar}
    if metavar[0] == "{":
        how = {"choices": metavar.strip("{}").split(",")}
    elif isinstance(form, tuple):
        how["choices"] = form
    else:
        how["type"] = form or str
    if not names:
        how["dest"] = re.split(r"\W", metavar)[0].lower()
    if bare.endswith("..."):
        how |= {"action": "append", "default": []} if names else {"nargs": "*"}
    elif word[0] == "[":
        how |= {"nargs": "?", "const": how["type"](const)} if const else {"nargs": "?"}
    if bare.endswith("!"):
        how["required"] = True
    return how
