"""The command line: the arguments of each verb, and what becomes of an error.

Nothing heavy is imported here: a verb imports its code when it runs.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from edge_server import errors
from edge_server.cli.commands import COMMANDS
from edge_server.cli.flags import nearest
from edge_server.cli.verbs import INTERRUPTED, OK, PATHS, Verb, add_verbs, report

if TYPE_CHECKING:
    from collections.abc import Sequence

_EPILOG = """\
examples:
  edge-server demo --frames 100
  edge-server check --config /etc/edge_server/config.toml
  edge-server status
  edge-server VERB --help

exit codes: 0 ended as requested, 1 failed, 2 usage, 69 something is unavailable,
75 another daemon holds the socket or the copies of models,
78 settings or files of a model are wrong, and a restart does not help,
86 a GPU is lost, 87 a part of the daemon hung: restart it"""


def run_command(argv: Sequence[str]) -> int:
    """Run one verb; return the exit code. Our errors print one line, without a traceback."""
    parser = command_line()
    if mistake := _unknown_verb(argv):
        parser.error(mistake)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(nearest(unknown, arguments.flags))
    try:
        code: int = arguments.verb(arguments)
    except KeyboardInterrupt:
        # A verb that could leave something behind has a text that tells what is there.
        if text := getattr(arguments, "interrupted", ""):
            print(text, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed the pipe.
        _discard_output()
        return OK
    except (errors.EdgeServerError, OSError, ModuleNotFoundError) as error:
        return report(_ours(error))
    return code


def _unknown_verb(argv: Sequence[str]) -> str:
    """Return what is wrong with the verb of a command, with the nearest one; empty if nothing."""
    below = [verb.name.split() for verb in Verb.all_of(COMMANDS)]
    for given, word in enumerate(argv):
        known = list(dict.fromkeys(words[given] for words in below if len(words) > given))
        if word.startswith("-") or not known:
            return ""
        if word not in known:
            close = difflib.get_close_matches(word, known, n=1)
            which = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            return f"unknown verb {' '.join(argv[: given + 1])}; {which}"
        below = [words for words in below if words[given : given + 1] == [word]]
    return ""


def _ours(error: errors.EdgeServerError | OSError | ModuleNotFoundError) -> errors.EdgeServerError:
    """Return what a person can be told of `error`; raise a fault of the program."""
    if isinstance(error, errors.EdgeServerError):
        return error
    if isinstance(error, ModuleNotFoundError):
        if (error.name or "").startswith("edge_server"):
            raise error
        from edge_server.board.installation import missing

        return errors.Unsupported(f"the library {missing(error)}")
    if isinstance(error, PermissionError) and error.filename is not None:
        # `Path.exists` and `is_dir` raise it for what lies in a directory that is closed.
        return errors.Unavailable(f"{error.filename}: {error.strerror}")
    if error.errno != errno.ENOSPC:
        raise error
    _discard_output()
    return errors.EdgeServerError(f"the output cannot be written: {error.strerror}")


def command_line() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    return _command_line()[0]


def _command_line() -> tuple[argparse.ArgumentParser, list[argparse.Action]]:
    """Return the parser of all verbs, and their arguments."""
    parser = argparse.ArgumentParser(
        prog="edge-server",
        description="Lane detection appliance: cameras in, lanes out on MQTT and gRPC.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print it and exit")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    return parser, add_verbs(parser.prog, verbs, Verb.all_of(COMMANDS))


def print_completion(arguments: argparse.Namespace) -> None:
    """Print a shell's script, the same each time."""
    import shtab

    parser, actions = _command_line()
    for action in actions:
        if action.metavar in (*PATHS, "REPO"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # so shtab wants it
    print(shtab.complete(parser, arguments.shell), end="")


def _discard_output() -> None:
    """Keep the interpreter's last flush from raising, too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _PrintVersion(argparse.Action):
    """argparse's own version action, but with the lookup on demand."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import version

        print(f"edge-server {version('edge-server')}")
        parser.exit()
