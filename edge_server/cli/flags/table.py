"""The flags of `flags.txt` and their effects."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from edge_server.cli.flags import values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edge_server.cli.flags.values import Effect

DEPRECATED = "Deprecated"


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
    def sets_nothing(self) -> bool:
        """The flag only exists so that a command line of tritonserver's keeps working, or gets an
        explanation why it cannot."""
        return self.effect.startswith(("ignored", "refused")) or self.text.startswith("no effect")

    @property
    def help(self) -> str:
        """The text for the help."""
        if self.effect.startswith("ignored"):
            return f"no effect: {self.text}"
        if self.effect.startswith("refused"):
            return f"{'refused' if self.effect == 'refused' else 'only false'}: {self.text}"
        return self.text or f"sets {self.path}"

    def apply(self, given: str) -> Effect:
        """Return the effect of the flag with the value `given`.

        Raises:
            ValueError: the value is invalid, or the flag is refused.
        """
        kind, _, form = self.effect.partition(" ")
        if kind == "refused":
            if not form or values.boolean(given):
                raise ValueError(self.text)
            return "it is off in any case"
        read = getattr(values, form) if form else _form_of(self.path)
        if kind == "ignored":
            read(given)
            return self.text
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
