"""What the daemon that follows a repository reports through its store: verdicts and quarantine."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from edge_server.errors import InternalError, NotFound, SettingsError
from edge_server.repository.state_file import StateFile, stores_here
from edge_server.repository.transfer.inventory import take_inventory
from edge_server.repository.verdicts import (
    LOADING,
    ON_TRIAL,
    QuarantineReleases,
    Report,
    Verdict,
    read_report,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_LOOK_S = 0.1
# A daemon checks for releases every second, except while it copies a model.
RELEASE_TIMEOUT_S = 5.0

# The ends of a wait.
DECIDED = "decided"
NOBODY = "nobody"  # no running daemon watches that repository
ENDED = "ended"  # the daemon ended during the wait
SILENT = "silent"  # the daemon gave no final verdict in time
REPLACED = "replaced"  # the repository holds other content of that name, or none


class Followed(NamedTuple):
    """The store of the daemon that watches a repository, and the daemon's report."""

    store: Path
    report: Report


class Held(NamedTuple):
    """Quarantined content; the name is empty if the store has none for it."""

    digest: str
    name: str
    reason: str


def followed(repository: Path, store: Path | None = None) -> Followed | None:
    """Return the daemon that watches `repository`, a running one first; None without any.

    Args:
        repository: the directory of the repository.
        store: the store of the daemon; None searches the usual places.

    Raises:
        SettingsError: no daemon was found and a store could not be read.
    """
    unreadable: SettingsError | None = None
    found: Followed | None = None
    for place in stores_here() if store is None else [store]:
        try:
            report = _read(place)
        except SettingsError as error:
            unreadable = error
            continue
        if report is not None and str(repository.resolve()) in report.repositories:
            found = found or Followed(place, report)
            if report.runs:
                return Followed(place, report)
    if found is None and unreadable is not None:
        raise unreadable
    return found


def verdicts_on(repository: Path, store: Path | None) -> dict[str, Verdict] | None:
    """Return model name → verdict of the running daemon that watches `repository`, or None.

    Raises:
        SettingsError: see `followed`.
    """
    there = followed(repository, store)
    return dict(there.report.models) if there is not None and there.report.runs else None


def last_good_copy(repository: Path, name: str, store: Path | None) -> tuple[Path, str]:
    """Return the last known good copy of `name` and its digest.

    Raises:
        NotFound: no daemon watches the repository, or it has no good copy of the model.
        SettingsError: see `followed`.
    """
    there = followed(repository, store)
    if there is None:
        raise NotFound(
            f"{repository}: no daemon is known that follows it; name its store with --store"
        )
    verdict = there.report.models.get(name, Verdict())
    if not verdict.copy:
        raise NotFound(f"{there.store}: nothing is known to be good of model '{name}'")
    return there.store / verdict.copy, verdict.last_good


def wait_for(
    repository: Path,
    name: str,
    digest: str,
    since_ns: int = 0,
    *,
    passed: bool,
    timeout_s: float,
    store: Path | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> tuple[str, Verdict]:
    """Wait for the verdict on a model; return how the wait ended, and the last verdict.

    Args:
        repository: the directory of the repository.
        name: the model.
        digest: the digest of its content.
        since_ns: the `time.monotonic_ns()` just before the placement; 0 if the content was there
            already.
        passed: True waits until the canary has ended, too.
        timeout_s: the longest wait, in seconds.
        store: the store of the daemon; None searches the usual places.
        sleep: waits so many seconds.

    Raises:
        SettingsError: see `followed`.
        ModelConfigError: the repository cannot be read.
    """

    # A model whose directory is unchanged is not read again; a rename changes the second one.
    @lru_cache(1)
    def is_in(inode: int, ctime_ns: int) -> bool:  # noqa: ARG001
        inventory = take_inventory(repository, name)
        # The daemon reports a model that cannot be read.
        return bool(inventory.fault) or inventory.content.digest == digest

    def is_there() -> bool:
        try:
            status = (repository / name).lstat()
        except OSError:
            return False
        return is_in(status.st_ino, status.st_ctime_ns)

    verdict = Verdict()
    there = followed(repository, store)
    if there is None or not there.report.runs:
        return NOBODY, verdict
    until = time.monotonic() + timeout_s
    undecided = {"", LOADING, ON_TRIAL} if passed else {"", LOADING}
    while True:
        holds_it = is_there()
        report = _read(there.store)
        if report is None or not report.runs:
            return ENDED, verdict
        newest = report.models.get(name, Verdict())
        # A verdict on unreadable content has no digest; the newest one is then about this content.
        if newest.told_ns > since_ns and newest.digest in ("", digest):
            verdict = newest
            if verdict.outcome not in undecided:
                return DECIDED, verdict
        if not holds_it:
            return REPLACED, verdict
        if time.monotonic() > until:
            return SILENT, verdict
        sleep(_LOOK_S)


def quarantined_in(store: Path) -> list[Held]:
    """Return the quarantined content without a pending release; an empty list without a store.

    Raises:
        SettingsError: the store cannot be read.
    """
    try:
        state, releases = StateFile(store).look(), QuarantineReleases(store)
        return [
            Held(digest, state.quarantined_as.get(digest, ""), reason)
            for digest, reason in state.quarantined.items()
            if not releases.is_left(digest)
        ]
    except OSError as error:
        raise _unusable(store, error) from error


def release(
    store: Path,
    name: str,
    digest: str = "",
    *,
    timeout_s: float = RELEASE_TIMEOUT_S,
    sleep: Callable[[float], object] = time.sleep,
) -> dict[str, bool]:
    """Release the quarantined content of model `name` whose digest begins with `digest`.

    Args:
        store: the directory of the store.
        name: the model.
        digest: the beginning of the digest; empty releases all content of the model.
        timeout_s: the longest wait for a running daemon, in seconds.
        sleep: waits so many seconds.

    Returns:
        Digest → whether a daemon has released it already; otherwise the next daemon that opens the
        store does.

    Raises:
        NotFound: no such content is quarantined.
        SettingsError: the store cannot be read or written.
        InternalError: no daemon of this version has opened the store.
    """
    wanted = [
        held.digest
        for held in quarantined_in(store)
        if held.digest.startswith(digest) and (held.name == name or (digest and not held.name))
    ]
    if not wanted:
        of = f" that begins with {digest}" if digest else ""
        raise NotFound(f"{name}: nothing{of} is in quarantine in {store}")
    releases = QuarantineReleases(store)
    try:
        for each in wanted:
            releases.leave(each)
    except FileNotFoundError as error:
        raise InternalError(
            f"model store {store}: no daemon of this version has opened it; start it, then again"
        ) from error
    except OSError as error:
        raise _unusable(store, error) from error
    end = time.monotonic() + timeout_s
    while any(map(releases.is_left, wanted)) and time.monotonic() < end:
        sleep(_LOOK_S)
    return {each: not releases.is_left(each) for each in wanted}


def _read(store: Path) -> Report | None:
    try:
        return read_report(store)
    except OSError as error:
        raise _unusable(store, error) from error


def _unusable(store: Path, error: OSError) -> SettingsError:
    return SettingsError(
        f"model store {store}: {error.strerror or error}; run this as root or the daemon's user, "
        "or name the store with --store"
    )
