"""The input of all checks, gathered before the first check runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edge_server.board.doctor.probe_process import ProbeResult

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from edge_server.board.board import BoardFacts
    from edge_server.board.disk import Disk
    from edge_server.settings import Settings

_UNASKED = ProbeResult(trouble="not asked")


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
        answers: results of the probes, by name.
        python: the running Python version.
        version: the edge-server version.
    """

    board: BoardFacts
    configuration: Configuration
    disk: Disk | None
    answers: Mapping[str, ProbeResult] = field(default_factory=dict)
    python: str = ""
    version: str = ""

    def answer(self, probe: str) -> ProbeResult:
        return self.answers.get(probe, _UNASKED)

    @property
    def driver_works(self) -> bool:
        return self.answer("driver").says.get("init") == 0

    @property
    def driver_tried_by_account(self) -> bool:
        """Return whether the probe of the driver ran as the daemon's user; only root can run it
        as another user."""
        uid = self.answer("driver").says.get("uid")
        return uid is None or uid == self.board.account.uid
