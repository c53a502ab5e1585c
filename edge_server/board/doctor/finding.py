"""The finding of one check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """The severity of a finding.

    A warning works, but not as well as it could; a fault is a required feature that does not work.
    """

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True)
class Finding:
    """`found` describes the finding for a person; `remedy` is the command or action that fixes
    it, or empty."""

    level: Level
    found: str
    remedy: str = ""


def ok(found: str) -> Finding:
    return Finding(Level.OK, found)


def warning(found: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, found, remedy)


def fault(found: str, remedy: str) -> Finding:
    return Finding(Level.FAULT, found, remedy)
