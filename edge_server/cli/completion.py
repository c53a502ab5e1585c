"""`edge-server completion`: scripts that make a shell complete verbs, flags and files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.cli.examples import verbs_of
from edge_server.cli.verbs import OK

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

SHELLS = ("bash", "zsh", "fish")
_ABOUT = """\
Prints a script that makes a shell complete verbs, flags and the names of files. The Debian package
has installed them already.
"""
_EXAMPLES = """\
examples:
  source <(edge-server completion bash)
  edge-server completion bash > ~/.local/share/bash-completion/completions/edge-server
  edge-server completion zsh > "${fpath[1]}/_edge-server"
  edge-server completion fish > ~/.config/fish/completions/edge-server.fish

exit codes: 0 done, 2 usage
"""
# Words for what a flag takes that are a path; the rest are other people's words.
_PATHS = ("FILE", "DIR", "FOLDER", "PNG", "KEY", "PUB", "REPO", "DIRECTORY", "PATH")


def add_completion(
    parser: argparse.ArgumentParser, command_line: Callable[[], argparse.ArgumentParser]
) -> None:
    """Add the arguments of `completion`.

    Args:
        command_line: makes the parser of all verbs.
    """
    parser.description, parser.epilog = _ABOUT, _EXAMPLES
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))

    def run(arguments: argparse.Namespace) -> int:
        print(completion(command_line(), arguments.shell), end="")
        return OK

    parser.set_defaults(verb=run)


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for `shell`, one of SHELLS; the same for the same `parser`."""
    import shtab

    # argparse has no other list of them.
    actions = (each for _, verb in verbs_of(parser) for each in verb._actions)  # noqa: SLF001
    for action in actions:
        if action.type is Path or action.metavar in _PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # so shtab wants it
    return str(shtab.complete(parser, shell))
