"""The finding of one check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How bad it is.

    A warning works, but not as well as it could; a fault is something asked for, or that this
    board should have, which does not work.
    """

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True)
class Finding:
    """`found` is for a person; `remedy` says what to do, and is empty where nothing is."""

    level: Level
    found: str
    remedy: str = ""


def ok(found: str) -> Finding:
    return Finding(Level.OK, found)


def warning(found: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, found, remedy)


def fault(found: str, remedy: str) -> Finding:
    return Finding(Level.FAULT, found, remedy)
