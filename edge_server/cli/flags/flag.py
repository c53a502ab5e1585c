"""Flag: one flag and its effect: it sets a value, has no effect, or is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge_server.cli.flags.texts import boolean

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Sets:
    """The flag sets `path` (`table.key`) to `value`, or appends `value` if it `gathers`."""

    path: str
    value: Any
    gathers: bool = False


@dataclass(frozen=True)
class NoEffect:
    """The flag is accepted, since its effect is dispensable, and logged with the reason."""

    why: str


@dataclass(frozen=True)
class RefusedFlag:
    """The flag is refused, since a user may rely on its effect; the reason names the remedy."""

    why: str


Verdict = Sets | NoEffect | RefusedFlag


@dataclass(frozen=True)
class Flag:
    """One flag of the command line.

    Attributes:
        name: without the dashes.
        value: the name of the value in the help; empty for a flag without a value.
        help: the help text.
        judge: maps the value's text to the flag's effect. Raises ValueError: an invalid value.
        path: of the setting that is its default, `table.key`; empty without a default.
        sets_nothing: the flag only exists so that a command line of tritonserver's keeps working,
            or gets an explanation why it cannot.
    """

    name: str
    value: str
    help: str
    judge: Callable[[str], Verdict]
    path: str = ""
    sets_nothing: bool = False


def sets(name: str, value: str, path: str, read: Callable[[str], Any], text: str = "") -> Flag:
    """Return a flag for one setting; if it is repeated, the last value counts."""

    def judge(given: str) -> Verdict:
        return Sets(path, read(given))

    return Flag(name, value, text or f"sets {path}", judge, path if value else "")


def gathers(name: str, value: str, path: str, read: Callable[[str], Any], text: str) -> Flag:
    """Return a flag that may be repeated, and appends to a setting each time."""

    def judge(given: str) -> Verdict:
        return Sets(path, read(given), gathers=True)

    return Flag(name, value, f"{text}; repeatable", judge, path)


def ignored(name: str, value: str, read: Callable[[str], Any], why: str) -> Flag:
    """Return a flag that tunes a feature absent here."""

    def judge(given: str) -> Verdict:
        read(given)
        return NoEffect(why)

    return Flag(name, value, f"no effect: {why}", judge, sets_nothing=True)


def refused(name: str, value: str, why: str) -> Flag:
    """Return a flag that requires a feature absent here."""
    return Flag(name, value, f"refused: {why}", lambda _: RefusedFlag(why), sets_nothing=True)


def refused_if_on(name: str, why: str) -> Flag:
    """Return a switch for a feature absent here: off is accepted, on is refused."""
    return Flag(
        name,
        "BOOL",
        f"only false: {why}",
        lambda given: RefusedFlag(why) if boolean(given) else NoEffect("it is off in any case"),
        sets_nothing=True,
    )
