"""Maps the flags of a command line to settings."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edge_server.cli.flags.flag import NoEffect, RefusedFlag, Sets
from edge_server.cli.flags.table import DEPRECATED, GROUPS
from edge_server.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from edge_server.cli.flags.flag import Flag

# Flags whose values must not appear in the journal.
_SECRET = frozenset({"grpc-restricted-protocol"})


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
    spelt = f"--{flag.name}" if not flag.value else f"--{flag.name}={value}"
    if flag.name in _SECRET:
        spelt = f"--{flag.name}"
    try:
        verdict = flag.judge(value)
    except ValueError as error:
        raise SettingsError(f"{spelt}: {error}") from None
    match verdict:
        case RefusedFlag(why):
            raise SettingsError(f"{spelt}: {why}")
        case NoEffect(why):
            chosen.notes.append(f"{spelt} has no effect: {why}")
        case Sets():
            _set(chosen.overrides, verdict)


def _set(table: dict[str, Any], choice: Sets) -> None:
    *tables, key = choice.path.split(".")
    for name in tables:
        table = table.setdefault(name, {})
    if not choice.gathers:
        table[key] = choice.value
    elif choice.value not in table.setdefault(key, []):
        table[key].append(choice.value)


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
