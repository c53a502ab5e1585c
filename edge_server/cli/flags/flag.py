"""A flag and what becomes of it: it sets something, has no effect, or is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge_server.cli.flags.texts import boolean

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Sets:
    """The setting at `path` (`table.key`) gets `value`, or has it appended where it `gathers`."""

    path: str
    value: Any
    gathers: bool = False


@dataclass(frozen=True)
class NoEffect:
    """Accepted, since nobody would miss it, and logged with the reason."""

    why: str


@dataclass(frozen=True)
class RefusedFlag:
    """Not accepted, since somebody would rely on it; the reason names the remedy."""

    why: str


Verdict = Sets | NoEffect | RefusedFlag


@dataclass(frozen=True)
class Flag:
    """One flag of the command line.

    Attributes:
        name: without the dashes.
        value: what the help calls its value; empty for a flag that stands alone.
        help: for people.
        judge: the value's text → what becomes of it. Raises ValueError: no such value.
        path: of the setting that is its default, `table.key`; empty where there is none to tell.
        sets_nothing: it is known so that a line of tritonserver's goes on working, or is told why
            it cannot.
    """

    name: str
    value: str
    help: str
    judge: Callable[[str], Verdict]
    path: str = ""
    sets_nothing: bool = False


def sets(name: str, value: str, path: str, read: Callable[[str], Any], text: str = "") -> Flag:
    """A flag that is a setting; given again, the last one counts."""

    def judge(given: str) -> Verdict:
        return Sets(path, read(given))

    return Flag(name, value, text or f"sets {path}", judge, path if value else "")


def gathers(name: str, value: str, path: str, read: Callable[[str], Any], text: str) -> Flag:
    """A flag that may be given again, and adds to a setting each time."""

    def judge(given: str) -> Verdict:
        return Sets(path, read(given), gathers=True)

    return Flag(name, value, f"{text}; repeatable", judge, path)


def ignored(name: str, value: str, read: Callable[[str], Any], why: str) -> Flag:
    """A flag that tunes something that is not here."""

    def judge(given: str) -> Verdict:
        read(given)
        return NoEffect(why)

    return Flag(name, value, f"no effect: {why}", judge, sets_nothing=True)


def refused(name: str, value: str, why: str) -> Flag:
    """A flag that asks for something that is not here."""
    return Flag(name, value, f"refused: {why}", lambda _: RefusedFlag(why), sets_nothing=True)


def refused_if_on(name: str, why: str) -> Flag:
    """A switch for something that is not here: off is how it is."""
    return Flag(
        name,
        "BOOL",
        f"only false: {why}",
        lambda given: RefusedFlag(why) if boolean(given) else NoEffect("it is off in any case"),
        sets_nothing=True,
    )
