"""What the daemon that follows a repository says of what was delivered there.

This runs on the far side of a push too: only the standard library here (`far_side.py`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edge_server.errors import SettingsError
from edge_server.repository.store_place import stores_here
from edge_server.repository.transfer.inventory import digest_of, take_inventory
from edge_server.repository.verdicts import (
    LOADING,
    ON_TRIAL,
    Report,
    Verdict,
    read_report,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_LOOK_S = 0.1

# How the waiting ended.
TOLD = "told"
NOBODY = "nobody"  # no daemon that runs follows that repository
ENDED = "ended"  # the daemon ended meanwhile
SILENT = "silent"  # it said nothing final in time
REPLACED = "replaced"  # the repository holds other content of that name, or none


class Wanted(NamedTuple):
    """The content of which a verdict is wanted.

    Attributes:
        since_ns: `time.monotonic_ns()` there before it was put in place; 0 where it was there.
        passed: wait until its probation is over too.
        store: of the daemon; the usual ones where it is empty.
    """

    name: str
    digest: str
    since_ns: int
    passed: bool
    patience_s: float
    store: str = ""


class Followed(NamedTuple):
    """The store of the daemon that follows a repository, and what it says."""

    store: Path
    report: Report


def followed(repository: Path, store: str = "") -> Followed | None:
    """The daemon that follows `repository`, be it running or not; None where none is known.

    Raises:
        SettingsError: its store may not be read, and so nobody knows.
    """
    blind: SettingsError | None = None
    found: Followed | None = None
    for place in [Path(store)] if store else stores_here():
        try:
            report = _read(place)
        except SettingsError as error:
            blind = error
            continue
        if report is not None and str(repository.resolve()) in report.repositories:
            found = found or Followed(place, report)
            if report.runs:
                return Followed(place, report)
    if found is None and blind is not None:
        raise blind
    return found


def models_told(repository: Path, store: str = "") -> dict[str, Verdict] | None:
    """What the daemon that runs and follows `repository` says, by model; None where none does.

    Raises: SettingsError: see `followed`.
    """
    there = followed(repository, store)
    return dict(there.report.models) if there is not None and there.report.runs else None


def wait_for(repository: Path, wanted: Wanted) -> tuple[str, Verdict]:
    """How the waiting ended, and what was told last.

    Raises: SettingsError: see `followed`.
    """
    verdict = Verdict()
    there = followed(repository, wanted.store)
    if there is None or not there.report.runs:
        return NOBODY, verdict
    until = time.monotonic() + wanted.patience_s
    content = _Content(repository, wanted)
    while True:
        is_there = content.is_there()
        report = _read(there.store)
        if report is None or not report.runs:
            return ENDED, verdict
        told = report.models.get(wanted.name, Verdict())
        if _is_about(told, wanted):
            verdict = told
            if _is_final(told, wanted):
                return TOLD, verdict
        if not is_there:
            return REPLACED, verdict
        if time.monotonic() > until:
            return SILENT, verdict
        time.sleep(_LOOK_S)


class _Content:
    """Whether a repository still holds what a verdict is wanted of.

    A model whose directory has not changed is not read again.
    """

    def __init__(self, repository: Path, wanted: Wanted) -> None:
        self._repository = repository
        self._wanted = wanted
        self._directory: tuple[int, int] | None = None
        self._is_there = True

    def is_there(self) -> bool:
        """Raises: ModelConfigError: the repository cannot be read."""
        try:
            status = (self._repository / self._wanted.name).lstat()
        except OSError:
            return False
        directory = status.st_ino, status.st_ctime_ns  # a rename changes the latter
        if directory != self._directory:
            inventory = take_inventory(self._repository, self._wanted.name)
            # A model that cannot be read is for the daemon to judge.
            digest = digest_of(inventory.files, inventory.empty)
            self._is_there = bool(inventory.fault) or digest == self._wanted.digest
            self._directory = directory
        return self._is_there


def _read(store: Path) -> Report | None:
    try:
        return read_report(store)
    except OSError as error:
        raise SettingsError(
            f"model store {store}: {error.strerror or error}; run this as root or the daemon's "
            "user, or name the store with --store"
        ) from error


def _is_about(told: Verdict, wanted: Wanted) -> bool:
    # What could not even be read has no digest: then the newest word is about it.
    return told.told_ns > wanted.since_ns and told.digest in ("", wanted.digest)


def _is_final(told: Verdict, wanted: Wanted) -> bool:
    if told.outcome == ON_TRIAL:
        return not wanted.passed
    return told.outcome not in ("", LOADING)


def to_json(ended: str, verdict: Verdict) -> dict[str, Any]:
    return {"ended": ended, "verdict": verdict._asdict()}


def from_json(fields: Mapping[str, Any]) -> tuple[str, Verdict]:
    """Raises: KeyError, TypeError: it is none."""
    return str(fields["ended"]), Verdict(**fields["verdict"])


def in_words(verdict: Verdict) -> str:
    """Why a model does not serve, for a person."""
    serves = f"{verdict.serves[:12]} serves" if verdict.serves else "nothing of that name serves"
    return f"{verdict.outcome}: {verdict.reason}; {serves}"
