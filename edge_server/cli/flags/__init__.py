"""The flags of `run` and `check`: as argparse takes them, their help, and the settings they give.

Parsing a command line imports nothing heavy; settings are imported when a flag is applied, and for
the defaults in the help.
"""

from __future__ import annotations

import argparse
import difflib
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

from edge_server.cli.flags import values
from edge_server.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from edge_server.cli.flags.values import Effect


DEPRECATED = "Deprecated"
# In `--help-triton` only.
_TRITONS = ("Without effect", DEPRECATED)
# Flags whose values must not appear in the journal.
_SECRET = frozenset({"grpc-restricted-protocol", "http-restricted-api"})

_EXAMPLES = """\
examples:
  {program} --model-repository models --camera front=road.mp4 --mqtt localhost:1883
  {program} --config /etc/edge_server/config.toml

A configuration file can set all of this and more; a flag counts more than the file. BOOL is true or
false. --help-triton also lists tritonserver's flags that set nothing here, and its deprecated ones,
each with the reason or with what took its place.
"""


@dataclass(frozen=True)
class Flag:
    """One flag of the command line.

    Attributes:
        name: without the dashes.
        value: the name of the value in the help; empty for a flag without a value.
        effect: see `flags.txt`.
        text: what the flag is for, or why it has no effect.
    """

    name: str
    value: str
    effect: str
    text: str

    @property
    def path(self) -> str:
        """The flag's setting, `table.key`; empty if it has none, or more than one."""
        return self.effect.partition(" ")[0] if "." in self.effect else ""

    @property
    def spelling(self) -> str:
        return f"{self.name} {self.value}".rstrip()

    @property
    def help(self) -> str:
        before = {"ignored": "no effect: ", "refused": "only false: "}.get(self.effect, "")
        return f"{before}{self.text}" if self.text else f"sets {self.path}"

    def apply(self, given: str) -> Effect:
        """Return the effect of the flag with the value `given`.

        Raises:
            ValueError: the value is invalid, or the flag is refused.
        """
        if self.effect == "ignored":
            return self.text
        if self.effect == "refused":
            if values.boolean(given):
                raise ValueError(self.text)
            return "it is off in any case"
        kind, _, form = self.effect.partition(" ")
        read = getattr(values, form) if form else _form_of(self.path)
        value: Any = read(given)
        return value if kind == "special" else (self.path, value)


def is_list(path: str) -> bool:
    """Return whether the setting at `path` takes a flag's values one after the other."""
    from edge_server.settings.read import type_of

    return get_origin(type_of(path)) is tuple


def _form_of(path: str) -> Callable[[str], Any]:
    """Return the parser for the type of the setting at `path`."""
    from edge_server.settings import RateLimitResourceSection, Restriction
    from edge_server.settings.read import type_of, types_in

    forms: dict[Any, Callable[[str], Any]] = {
        str: values.text,
        bool: values.boolean,
        int: values.whole,
        float: values.number,
        Restriction: values.restriction,
        RateLimitResourceSection: values.rate_limit_resource,
    }
    types = types_in(type_of(path))
    if words := next((get_args(each) for each in types if get_origin(each) is Literal), None):
        return values.one_of(*words)
    return next(forms[each] for each in types if each in forms)


def _read_table() -> dict[str, tuple[Flag, ...]]:
    """Return the flags by the title of their group."""
    groups: dict[str, tuple[Flag, ...]] = {}
    title = ""
    for line in Path(__file__).with_name("flags.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            flag, effect, text = (column.strip() for column in line.split("|"))
            name, _, value = flag.partition(" ")
            groups[title] += (Flag(name, value, effect, text),)
        elif line and not line.startswith("#"):
            title = line
            groups[title] = ()
    return groups


GROUPS: Mapping[str, tuple[Flag, ...]] = MappingProxyType(_read_table())


def add_settings_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting of the command line, and every flag of tritonserver.

    `parser` must have no help of its own.
    """
    parser.formatter_class = _Wide
    parser.usage = f"{parser.prog} [FLAG ...]"
    parser.epilog = _EXAMPLES.format(program=parser.prog)
    actions: dict[argparse.Action, Flag] = {}
    shown = {flag for title in GROUPS for flag in GROUPS[title] if title not in _TRITONS}
    add = parser.add_argument
    printing: dict[str, Any] = {"action": _Help, "nargs": 0, "actions": actions}
    add("-h", "--help", **printing, shown=shown, help="print this and exit")
    add("--help-triton", **printing, help="the same, with all flags of tritonserver")
    add("--config", type=Path, metavar="FILE", help="settings in TOML")
    add("--camera", action="append", default=[], metavar="NAME=URI", help="repeatable")
    add("--mqtt", metavar="HOST[:PORT]", help="the broker")
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            how: dict[str, Any] = {"action": "append_const", "const": "true"}
            if flag.value:
                how = {"action": "append", "metavar": flag.value}
            # `_Help` adds the defaults, which take an import; completion needs the flags.
            text = flag.help.replace("%", "%%") if flag in shown else argparse.SUPPRESS
            action = group.add_argument(f"--{flag.name}", dest=flag.name, help=text, **how)
            actions[action] = flag
    own = ["--help", "--help-triton", "--config", "--camera", "--mqtt"]
    parser.set_defaults(flags=[*own, *(f"--{flag.name}" for flag in actions.values())])


class _Wide(argparse.RawDescriptionHelpFormatter):
    """Prints most flags on one line, where the terminal is wide enough."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=42)


class _Help(argparse.Action):
    """Prints the help of the flags in `shown`, or of all; looks up their defaults on demand."""

    def __init__(
        self,
        *args: Any,
        actions: Mapping[argparse.Action, Flag],
        shown: Collection[Flag] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._actions, self._shown = actions, shown

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        for action, flag in self._actions.items():
            if self._shown is None or flag in self._shown:
                action.help = f"{flag.help}{_default(flag)}".replace("%", "%%")
        parser.print_help()
        parser.exit()


def _default(flag: Flag) -> str:
    """Return the default of a flag, for the end of its help."""
    from edge_server.settings import Settings

    if not (flag.path and flag.value) or flag in GROUPS[DEPRECATED]:
        return ""
    value: Any = Settings()
    for name in flag.path.split("."):
        value = getattr(value, name)
    if isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, (tuple, list)):
        value = ", ".join(map(str, value))
    return "" if value in ("", None) else f" (default: {value})"


@dataclass(frozen=True)
class Chosen:
    """The result of the flags.

    Attributes:
        overrides: table → key → value, to be laid over the configuration file.
        notes: a line for each flag without effect, or with a deprecated spelling.
    """

    overrides: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def choose(given: Mapping[str, Sequence[str]]) -> Chosen:
    """Return the settings of `given` (flag → its values, in order).

    A deprecated flag gives way to its replacement, wherever that stands.

    Raises:
        SettingsError: an invalid value, or a refused flag; the text names both and the remedy.
    """
    if given.get("response-cache-byte-size") and given.get("cache-config"):
        raise SettingsError(
            "Incompatible flags --response-cache-byte-size and --cache-config both provided. "
            "Please provide one or the other."
        )
    chosen = Chosen()
    for group in sorted(GROUPS, key=lambda name: name != DEPRECATED):
        for flag in GROUPS[group]:
            values = given.get(flag.name, ())
            if values and group == DEPRECATED:
                chosen.notes.append(f"--{flag.name} is deprecated: {flag.help}")
            for value in values:
                _apply(flag, value, chosen)
    return chosen


def _apply(flag: Flag, value: str, chosen: Chosen) -> None:
    spelt = (
        f"--{flag.name}={value}" if flag.value and flag.name not in _SECRET else f"--{flag.name}"
    )
    try:
        effect = flag.apply(value)
    except ValueError as error:
        raise SettingsError(f"{spelt}: {error}") from None
    if isinstance(effect, str):
        chosen.notes.append(f"{spelt} has no effect: {effect}")
    else:
        _set(chosen.overrides, *effect)


def _set(table: dict[str, Any], path: str, value: Any) -> None:
    """Set the setting at `path`, or append to a list unless it has the value; a tuple is a whole
    list."""
    *tables, key = path.split(".")
    for name in tables:
        table = table.setdefault(name, {})
    if isinstance(value, tuple):
        table[key] = list(value)
    elif not is_list(path):
        table[key] = value
    elif value not in table.setdefault(key, []):
        table[key].append(value)


def nearest(unknown: Sequence[str], known: Iterable[str]) -> str:
    """Return the error text for arguments that no flag takes.

    tritonserver accepts the beginning of a name for the whole; here the text suggests that name.
    """
    flag = next((each for each in unknown if each.startswith("--")), unknown[0])
    name = flag.partition("=")[0]
    names = list(known)
    begun = [each for each in names if name.startswith("--") and each.startswith(name)]
    close = begun or difflib.get_close_matches(name, names, n=1)
    return f"unknown argument {name}" + (f"; did you mean {close[0]}?" if close else "")
