"""The input of all checks, gathered before the first check runs, and a check's finding."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from edge_server.board.board import Board
    from edge_server.board.resources import Disk
    from edge_server.settings import Settings


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


@dataclass(frozen=True)
class ProbeResult:
    """What a probe found, or in `failure` the reason why that is missing."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""

    @property
    def problem(self) -> str:
        """Why the probe gave no facts, or the error among them; empty where all is well."""
        return self.failure or str(self.facts.get("error", ""))


_NOT_RUN = ProbeResult(failure="not run")


@dataclass(frozen=True)
class Configuration:
    """The daemon's settings; `settings` is None when `error` gives the reason.

    Attributes:
        path: the file; None where no file exists, and the defaults apply.
    """

    path: Path | None
    settings: Settings | None
    error: str = ""


@dataclass(frozen=True)
class Evidence:
    """The input of every check.

    Attributes:
        board: the facts from the board's files.
        configuration: the daemon's.
        disk: of the model store or its future place; None where it cannot be read.
        results: of the probes, by name.
        python: the running Python version.
        version: the edge-server version.
    """

    board: Board
    configuration: Configuration
    disk: Disk | None
    results: Mapping[str, ProbeResult] = field(default_factory=dict)
    python: str = ""
    version: str = ""

    def result(self, probe: str) -> ProbeResult:
        return self.results.get(probe, _NOT_RUN)

    @property
    def driver_works(self) -> bool:
        return self.result("driver").facts.get("init") == 0

    @property
    def driver_tried_by_account(self) -> bool:
        """Return whether the probe of the driver ran as the daemon's user; only root can run it
        as another user."""
        uid = self.result("driver").facts.get("uid")
        return uid is None or uid == self.board.account.uid
