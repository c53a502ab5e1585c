"""Reads and waits for the verdict of the daemon that watches a repository.

The remote agent runs this module, too, so it uses only the standard library (see
`remote_agent.py`).
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

# The ends of a wait.
TOLD = "told"
NOBODY = "nobody"  # no running daemon watches that repository
ENDED = "ended"  # the daemon ended during the wait
SILENT = "silent"  # the daemon gave no final verdict in time
REPLACED = "replaced"  # the repository holds other content of that name, or none


class Wanted(NamedTuple):
    """The content to wait for a verdict on.

    Attributes:
        name: the model.
        digest: the digest of the content.
        since_ns: the daemon machine's `time.monotonic_ns()` just before the placement; 0 if the
            content was there already.
        passed: True waits until the canary has ended, too.
        patience_s: the longest wait, in seconds.
        store: the store of the daemon; empty searches the usual places.
    """

    name: str
    digest: str
    since_ns: int
    passed: bool
    patience_s: float
    store: str = ""


class Followed(NamedTuple):
    """The store of the daemon that watches a repository, and the daemon's report."""

    store: Path
    report: Report


def followed(repository: Path, store: str = "") -> Followed | None:
    """Return the daemon that watches `repository`, a running one first; None without any.

    Args:
        repository: the directory of the repository.
        store: the store of the daemon; empty searches the usual places.

    Raises:
        SettingsError: no daemon was found and a store could not be read.
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
    """Return model name → verdict of the running daemon that watches `repository`, or None.

    Raises:
        SettingsError: see `followed`.
    """
    there = followed(repository, store)
    return dict(there.report.models) if there is not None and there.report.runs else None


def wait_for(repository: Path, wanted: Wanted) -> tuple[str, Verdict]:
    """Wait for the verdict on `wanted`; return how the wait ended, and the last verdict.

    Raises:
        SettingsError: see `followed`.
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
    """Checks whether a repository still holds the wanted content.

    A model whose directory is unchanged is not read again.
    """

    def __init__(self, repository: Path, wanted: Wanted) -> None:
        self._repository = repository
        self._wanted = wanted
        self._directory: tuple[int, int] | None = None
        self._is_there = True

    def is_there(self) -> bool:
        """Return whether the repository still holds the wanted content.

        Raises:
            ModelConfigError: the repository cannot be read.
        """
        try:
            status = (self._repository / self._wanted.name).lstat()
        except OSError:
            return False
        directory = status.st_ino, status.st_ctime_ns  # a rename changes the latter
        if directory != self._directory:
            inventory = take_inventory(self._repository, self._wanted.name)
            # The daemon reports a model that cannot be read.
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
    # A verdict on unreadable content has no digest; the newest one is then about this content.
    return told.told_ns > wanted.since_ns and told.digest in ("", wanted.digest)


def _is_final(told: Verdict, wanted: Wanted) -> bool:
    if told.outcome == ON_TRIAL:
        return not wanted.passed
    return told.outcome not in ("", LOADING)


def to_json(ended: str, verdict: Verdict) -> dict[str, Any]:
    return {"ended": ended, "verdict": verdict._asdict()}


def from_json(fields: Mapping[str, Any]) -> tuple[str, Verdict]:
    """Return the end of a wait and its verdict, from the fields of `to_json`.

    Raises:
        KeyError, TypeError: the fields are invalid.
    """
    return str(fields["ended"]), Verdict(**fields["verdict"])


def in_words(verdict: Verdict) -> str:
    """Return a text with the reason why a model does not serve."""
    serves = f"{verdict.serves[:12]} serves" if verdict.serves else "nothing of that name serves"
    return f"{verdict.outcome}: {verdict.reason}; {serves}"
