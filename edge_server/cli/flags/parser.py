"""The flags of `run` and `check` as argparse takes them, and their help.

Parsing a command line imports nothing heavy; the help looks up the defaults on demand.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from edge_server.cli.flags.table import DEPRECATED, GROUPS

if TYPE_CHECKING:
    from edge_server.cli.flags.flag import Flag

_EXAMPLES = """\
examples:
  edge-server {verb} --model-repository models --camera front=road.mp4 --mqtt localhost:1883
  edge-server {verb} --config /etc/edge_server/config.toml

A configuration file can say all of this and more; a flag counts more than the file. BOOL is true or
false. --help-triton also lists tritonserver's flags that set nothing here, and its deprecated ones,
each with the reason or with what took its place.
"""


def add_settings_flags(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add a flag for each setting of the command line, and every flag of tritonserver.

    `parser` must have no help of its own.
    """
    known = ["--help", "--help-triton", "--config", "--camera", "--mqtt"]
    about = parser.description or ""
    parser.add_argument(
        "-h", "--help", action=_Help, nargs=0, verb=verb, about=about, help="print this and exit"
    )
    parser.add_argument(
        "--help-triton",
        action=_Help,
        nargs=0,
        verb=verb,
        about=about,
        everything=True,
        help="the same, with all flags of tritonserver",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML")
    parser.add_argument(
        "--camera", action="append", default=[], metavar="NAME=URI", help="repeatable"
    )
    parser.add_argument("--mqtt", metavar="HOST[:PORT]", help="the broker")
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            known.append(f"--{flag.name}")
            _add(group, flag, argparse.SUPPRESS)
    parser.set_defaults(flags=known)


def _add(group: Any, flag: Flag, text: str) -> None:
    taken: dict[str, Any] = {"dest": flag.name, "help": text.replace("%", "%%")}
    if flag.value:
        group.add_argument(f"--{flag.name}", action="append", metavar=flag.value, **taken)
    else:
        group.add_argument(f"--{flag.name}", action="append_const", const="true", **taken)


class _Wide(argparse.RawDescriptionHelpFormatter):
    """Prints most flags on one line, where the terminal is wide enough."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=42)


class _Help(argparse.Action):
    """Builds the help on demand, with the defaults of the settings."""

    def __init__(
        self, *args: Any, verb: str, about: str, everything: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._verb, self._about, self._everything = verb, about, everything

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        told = argparse.ArgumentParser(
            prog=parser.prog,
            usage=parser.usage,
            description=self._about,
            epilog=_EXAMPLES.format(verb=self._verb),
            formatter_class=_Wide,
            add_help=False,
        )
        for action in parser._get_optional_actions():  # noqa: SLF001 - those without a group
            if action.help != argparse.SUPPRESS:
                told._add_action(action)  # noqa: SLF001
        for title, flags in GROUPS.items():
            group = told.add_argument_group(title)
            for flag in flags:
                if self._everything or not (flag.sets_nothing or title == DEPRECATED):
                    default = "" if title == DEPRECATED else _default(flag)
                    _add(group, flag, flag.help + default)
        told.print_help()
        parser.exit()


def _default(flag: Flag) -> str:
    """Return the default of a flag, for the end of its help."""
    from edge_server.settings import Settings  # noqa: PLC0415

    if not flag.path:
        return ""
    value: Any = Settings()
    for name in flag.path.split("."):
        value = getattr(value, name)
    if isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, (tuple, list)):
        value = ", ".join(map(str, value))
    return "" if value in ("", None) else f" (default: {value})"
