"""All that the checks may look at, gathered before the first of them runs."""

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
    """The settings of the daemon; `settings` is None where `error` says why.

    Attributes:
        path: the file; None where there is none, and the defaults count.
    """

    path: Path | None
    settings: Settings | None
    error: str = ""


@dataclass(frozen=True)
class Evidence:
    """The input of every check.

    Attributes:
        board: the facts from its files.
        configuration: the daemon's.
        disk: of the model store, or where it would be; None where it cannot be read.
        answers: of the probes, by their names.
        python: the version that runs here.
        version: our own.
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
        """Whether it was the daemon's user that tried to start it; only root can try as another."""
        uid = self.answer("driver").says.get("uid")
        return uid is None or uid == self.board.account.uid
