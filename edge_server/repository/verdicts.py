"""What the daemon and `edge-server models` exchange through a store: the outcome of each delivered
model, in the verdicts file, and notes that release a digest from quarantine."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edge_server.errors import InternalError, NotFound, SettingsError
from edge_server.repository.content import take_inventory
from edge_server.repository.store_state import StateFile, stores_here

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

log = logging.getLogger(__name__)

FORMAT = 1
_NAME = "verdicts.json"

# Outcomes. A model that is still being copied has no outcome.
LOADING = "loading"
ON_TRIAL = "on trial"  # the content serves, in a canary
GOOD = "good"  # the content serves, and a restart serves it again
WAITS = "waits"  # for memory, a change of another model, or room to keep it for a restart
REFUSED = "refused"
ROLLED_BACK = "rolled back"
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_LOOK_S = 0.1
# A daemon checks for releases every second, except while it copies a model.
RELEASE_TIMEOUT_S = 5.0
# The ends of a wait.
DECIDED = "decided"
NOBODY = "nobody"  # no running daemon watches that repository
ENDED = "ended"  # the daemon ended during the wait
SILENT = "silent"  # the daemon gave no final verdict in time
REPLACED = "replaced"  # the repository holds other content of that name, or none


class Verdict(NamedTuple):
    """The daemon's verdict on one model.

    Attributes:
        outcome, digest, reason: of the newest content; without a digest if it could not be read.
        told_ns: `time.monotonic_ns()` of the daemon's machine.
        serves, last_good: the digests of what serves, and of what a restart serves.
        copy: the directory of the last known good copy, relative to the store.
        candidate: what was found of the serving content as a candidate for the lanes of
            `candidate_of`, with `good`, `worse` or `watching` first; empty of other models.
    """

    outcome: str = ""
    digest: str = ""
    reason: str = ""
    told_ns: int = 0
    serves: str = ""
    last_good: str = ""
    copy: str = ""
    candidate: str = ""
    candidate_of: str = ""


class Report(NamedTuple):
    """The verdicts of one store's daemon, on the models in the resolved `repositories`."""

    runs: bool
    repositories: tuple[str, ...]
    models: Mapping[str, Verdict]


class VerdictFile:
    """Writes the verdict on each model into the store. Thread-safe. The verdicts need not be
    durable, because a restart writes them again. A failed write is logged once and has no other
    effect."""

    def __init__(self, store: Path, repositories: Sequence[Path]) -> None:
        self._path = store / _NAME
        self._repositories = [str(path.resolve()) for path in repositories]
        self._lock = threading.Lock()
        self._written: Mapping[str, Verdict] | None = None
        self._failed = False
        self.write(dict)

    def write(self, verdicts: Callable[[], Mapping[str, Verdict]]) -> None:
        """Write the verdicts that `verdicts` returns, unless they are written already; the last
        call writes the last verdicts."""
        with self._lock:
            models = dict(verdicts())
            if models == self._written:
                return
            pid = os.getpid()
            fields = {
                "format": FORMAT,
                "pid": pid,
                "started": _started(pid),
                "repositories": self._repositories,
                "models": {name: verdict._asdict() for name, verdict in models.items()},
            }
            beside = self._path.with_suffix(".tmp")
            try:
                beside.write_text(json.dumps(fields))
                beside.replace(self._path)
                self._written, self._failed = models, False
            except OSError as error:
                if not self._failed:
                    log.warning("model store: %s cannot be written: %s", self._path, error)
                self._written, self._failed = None, True


def read_report(store: Path) -> Report | None:
    """Return the report of the daemon of `store`; None if the store holds no valid report."""
    try:
        fields = json.loads((store / _NAME).read_text())
        models = {name: Verdict(**each) for name, each in fields["models"].items()}
        runs = bool(fields["started"]) and _started(int(fields["pid"])) == fields["started"]
        return Report(runs, tuple(fields["repositories"]), models)
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    except (KeyError, TypeError, AttributeError):  # of another version, or no report
        return None


def _started(pid: int) -> str:
    """Return the start time of process `pid`, which identifies it among processes of the same
    number, or "" if there is no such process."""
    try:
        # proc(5): the 22nd field; the second one may hold spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


class QuarantineReleases:
    """Empty files in `releases` below a store, each named by a digest. The process that has the
    store open removes each note and releases its digest, also of one left before it ran. The notes
    are empty, so the daemon need not read a file of another user, such as root."""

    def __init__(self, store: Path) -> None:
        self._directory = store / "releases"

    def make(self) -> None:
        self._directory.mkdir(mode=0o700, exist_ok=True)

    def leave(self, digest: str) -> None:
        (self._directory / digest).touch(mode=0o600)

    def is_left(self, digest: str) -> bool:
        return (self._directory / digest).exists()

    def pop_all(self) -> list[str]:
        """Remove the notes and return their digests; a note that cannot be removed is left out."""
        popped = []
        try:
            for note in self._directory.iterdir():
                if _DIGEST.match(note.name):
                    note.unlink()
                    popped.append(note.name)
        except OSError as error:
            log.debug("model store: %s: %s", self._directory, error)
        return popped


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
    Raises: SettingsError: no daemon was found and a store could not be read."""
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
    """Return model name → verdict of the running daemon that watches `repository`, or None."""
    there = followed(repository, store)
    return dict(there.report.models) if there is not None and there.report.runs else None


def last_good_copy(repository: Path, name: str, store: Path | None) -> tuple[Path, str]:
    """Return the last known good copy of `name` and its digest.
    Raises: NotFound: no daemon watches the repository, or it has no good copy."""
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
        since_ns: just before the placement; 0 if the content was there already.
        passed: True waits until the canary has ended, too.
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
    """Return the quarantined content without a pending release; an empty list without a store."""
    try:
        state, releases = StateFile(store).peek(), QuarantineReleases(store)
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
    """Release the quarantined content of model `name` whose digest begins with `digest`; empty is
    all of the model. Returns digest → whether a daemon has released it already; otherwise the next
    one that opens the store does. Raises NotFound where there is none; InternalError where no
    daemon of this version has opened the store."""
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
