"""A verb of the command line: its declaration, which is its help; its run, its exit codes, and how
the values of its arguments are read.

Nothing heavy is imported here: every start of the command line imports this module.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from edge_server import errors
from edge_server.cli.flags import add_settings_flags
from edge_server.process.logs import journal_prefix, logs_fields, logs_json
from edge_server.process.text import masked, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

log = logging.getLogger(__name__)

_SETTINGS = "@settings"
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
        run: `module:function` below edge_server. It gets the parsed arguments and returns the exit
            code, lines to print, or None. Empty where verbs are below.
        text: the help in one line.
        arguments: see `add_arguments`.
        about: the subject; by default `text`.
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
            add_help=not verb.arguments.startswith(_SETTINGS),
        )
        added = list(add_arguments(each, verb.arguments))
        flags = [name for action in added for name in action.option_strings]
        flags += each.get_default("flags") or ()
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
    titles a group. `@settings` stands for the flags of all settings.
    """
    place: Any = parser
    one: Any = None
    for block in re.split(r"\n(?=\S)", text) if text else ():
        spec, *rest = re.split(r"  +|\n *", block, maxsplit=1)
        about = " ".join(" ".join(rest).split())
        if spec == _SETTINGS:
            add_settings_flags(parser)
            continue
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


N = TypeVar("N", int, float)


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


def form(pattern: str, read: Callable[..., Any], words: str) -> Callable[[str], Any]:
    """Return a parser of a value that has the form `pattern`, whose groups `read` gets; `words` say
    what it takes."""

    def parse(text: str) -> Any:
        if (found := re.fullmatch(pattern, text)) is None:
            raise argparse.ArgumentTypeError(f"{text}: {words}")
        return read(*found.groups())

    return parse


def _floats(*texts: str) -> tuple[float, ...]:
    return tuple(map(float, texts))


def _time(text: str) -> datetime:
    try:
        value = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        value = datetime.min
    if value.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text}: write it as 2026-12-01T03:00+01:00")
    return value


_DATATYPES = ("FP16", "FP32", "FP64", "BOOL", "UINT8", "INT8", "INT16", "INT32", "INT64")
_FORMATS = (
    *("onnx", "keras", "savedmodel", "graphdef", "paddle"),
    *("torchscript", "torch-export", "torch-module", "torch-weights"),
)
_INPUT = re.compile(r"(?:(?P<name>[^:]+):)?(?P<shape>-?\d+(?:x-?\d+)*|)(?::(?P<type>\w+))?")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text}: give names with commas between")
    return names


def _tensor(text: str) -> tuple[str, str, list[int]]:
    match = _INPUT.fullmatch(text)
    datatype = ((match and match["type"]) or "FP32").upper()
    if match is None or datatype not in _DATATYPES:
        raise argparse.ArgumentTypeError(
            f"{text}: give it as NAME:SHAPE or NAME:SHAPE:TYPE, like images:-1x3x360x640:FP32; "
            f"types are {', '.join(_DATATYPES)}"
        )
    sizes = [int(size) for size in match["shape"].split("x")] if match["shape"] else []
    if any(size == 0 or size < -1 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text}: a size is 1 or more, or -1 for any")
    return match["name"] or "", datatype, sizes


def file_with(*suffixes: str) -> Callable[[str], Path]:
    """Return a parser of a file's name that ends with one of `suffixes`."""

    def parse(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower().replace(".jpeg", ".jpg") not in suffixes:
            ends = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
            raise argparse.ArgumentTypeError(f"{text}: give a name that ends in {ends}")
        return path

    return parse


def numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    """Return a parser of `1,2,4` and `1:4` (from, to), of numbers from `least` on."""

    def parse(text: str) -> tuple[int, ...]:
        try:
            if ":" in text:
                first, last = map(int, text.split(":"))
                found = tuple(range(first, last + 1))
            else:
                found = tuple(map(int, text.split(",")))
        except ValueError:
            found = ()
        if not found or min(found) < least or len(found) > 64:
            raise argparse.ArgumentTypeError(
                f"{text}: give whole numbers, {least} or above, like 1,2,4 or 1:4"
            )
        return tuple(dict.fromkeys(found))

    return parse


def _in_range(kind: type[N], low: float, what: str) -> Callable[[str], N]:
    return number(kind, lambda value: low <= value < 1e6, what)


def _angle(text: str) -> float:
    value = _in_range(float, 10, "an angle")(text)
    if value > 120:
        raise argparse.ArgumentTypeError(f"{text}: a wider lens needs calibrate intrinsics")
    return value


def _size(width: str, height: str) -> tuple[int, int]:
    return _in_range(int, 16, "a width")(width), _in_range(int, 16, "a height")(height)


SHELLS = ("bash", "zsh", "fish")
# Words for a value that is a path.
PATHS = ("DIR", "FILE", "FOLDER", "PATH", "PICTURE", "PICTURES", "PNG", "KEY", "PUB", "SRC", "DST")
_FLOAT = r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*"
_POSITIVE = form(r"(0*[1-9]\d*)", int, "give a whole number, 1 or above")
_WHOLE = form(r"(\d+)", int, "give a whole number, 0 or above")
# How a value is read, or its choices, by the word for it or by its flag; others are texts.
FORMS: Mapping[str, Callable[[str], Any] | tuple[str, ...]] = {
    **dict.fromkeys(PATHS, lambda text: Path(text).expanduser()),
    "ACTION": ("get-current", "get-primary", "set-primary", "get-state", "set-state"),
    "SLOT": ("A", "B"),
    "STATE": ("good", "bad"),
    "OUTCOME": ("pending", "committed", "rolled_back", "failed"),
    "SHELL": SHELLS,
    "FORMAT": _FORMATS,
    "IMAGE": file_with(".png", ".jpg"),
    "RESULT": file_with(".png", ".jpg", ".npz"),
    "N": _POSITIVE,
    "PORT": _POSITIVE,
    "COUNT": _WHOLE,
    "CORE": _WHOLE,
    "N,…": numbers(1),
    "US,…": numbers(0),
    "S": number(float, lambda value: 0 <= value < 1e6, "seconds, 0 or above"),
    "--seconds": number(float, lambda value: 0 < value <= 3600, "seconds, above 0, up to 3600"),
    "--interval": number(float, lambda value: 0.1 <= value < 1e6, "seconds, 0.1 or above"),
    "VERSION": form(r"([1-9]\d*)", int, "a version is a whole number from 1"),
    "D": form("([0-9a-f]{1,64})", str, "a digest is hexadecimal, as `list` shows it"),
    "--sha256": form(
        "(?:sha256:)?([0-9A-Fa-f]{64})", str.lower, "a sha256 has 64 hexadecimal digits"
    ),
    "--limit": number(float, lambda value: 0 <= value <= 1, "a share, 0 to 1"),
    "--tolerance": float,
    "PERCENT": number(float, lambda value: 0 <= value <= 100, "percent, 0 to 100"),
    "TIME": _time,
    "--max-celsius": float,
    "NAMES": _names,
    "NAME:SHAPE[:TYPE]": _tensor,
    "NAME=FILE": form(
        "([^=]+)=(.+)", lambda name, path: (name, Path(path)), "give it as NAME=FILE"
    ),
    "METRES": float,
    "--lane-width": _in_range(float, 0.1, "metres"),
    "DEG": float,
    "--fov": _angle,
    "WxH": form("([^x]*)x(.*)", _size, "write it as 1280x720"),
    "U,V=X,Y": form(
        f"{_FLOAT},{_FLOAT}={_FLOAT},{_FLOAT}",
        _floats,
        "write it as U,V=X,Y, like 512,630=6.0,1.5",
    ),
    "X,Y": form(f"{_FLOAT},{_FLOAT}", _floats, "write it as X,Y in metres, like 6.0,0.9"),
}
