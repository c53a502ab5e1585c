"""What the daemon and `edge-server models` exchange through a store: the outcome of each delivered
model, in the verdicts file, and notes that release a digest from quarantine."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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


class Verdict(NamedTuple):
    """The daemon's verdict on one model.

    Attributes:
        outcome: the outcome of the newest content; one of the outcomes above.
        digest: the digest of that content; empty if it could not be read.
        reason: the reason why it does not serve.
        told_ns: the time of the verdict, `time.monotonic_ns()` of the daemon's machine.
        serves: the digest of the serving content; empty if none serves.
        last_good: the digest of the content that a restart serves.
        copy: the directory of the last known good copy, relative to the store.
    """

    outcome: str = ""
    digest: str = ""
    reason: str = ""
    told_ns: int = 0
    serves: str = ""
    last_good: str = ""
    copy: str = ""


class Report(NamedTuple):
    """The verdicts of one store's daemon.

    Attributes:
        runs: True if the daemon still runs.
        repositories: the resolved paths of the repositories that the daemon watches.
        models: model name → its verdict.
    """

    runs: bool
    repositories: tuple[str, ...]
    models: Mapping[str, Verdict]


class VerdictFile:
    """Writes the verdict on each model into the store. Thread-safe.

    The verdicts need not be durable, because a restart writes them again. A failed write is logged
    once and has no other effect.

    Attributes:
        failed: the last write failed, for example on a full disk.
    """

    def __init__(self, store: Path, repositories: Sequence[Path]) -> None:
        self._path = store / _NAME
        self._repositories = [str(path.resolve()) for path in repositories]
        self._lock = threading.Lock()
        self.failed = False
        self.write(dict)

    def write(self, verdicts: Callable[[], Mapping[str, Verdict]]) -> None:
        """Write the verdicts that `verdicts` returns; the last call writes the last verdicts."""
        with self._lock:
            pid = os.getpid()
            fields = {
                "format": FORMAT,
                "pid": pid,
                "started": _started(pid),
                "repositories": self._repositories,
                "models": {name: verdict._asdict() for name, verdict in verdicts().items()},
            }
            beside = self._path.with_suffix(".tmp")
            try:
                beside.write_text(json.dumps(fields))
                beside.replace(self._path)
                self.failed = False
            except OSError as error:
                if not self.failed:
                    log.warning("model store: %s cannot be written: %s", self._path, error)
                self.failed = True


def read_report(store: Path) -> Report | None:
    """Return the report of the daemon of `store`; None if the store holds no valid report.

    Raises:
        OSError: the report cannot be read.
    """
    try:
        fields = json.loads((store / _NAME).read_text())
        models = {name: Verdict(**each) for name, each in fields["models"].items()}
        runs = bool(fields["started"]) and _started(int(fields["pid"])) == fields["started"]
        return Report(runs, tuple(fields["repositories"]), models)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
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
    """Empty files in `releases` below a store, each named by a digest.

    The process that has the store open removes each note and releases its digest; a note may also
    be left while no daemon runs. The notes are empty, so the daemon need not read a file of another
    user, such as root, and the directory belongs to the store.
    """

    def __init__(self, store: Path) -> None:
        self._directory = store / "releases"

    def make(self) -> None:
        """Create the directory of the notes.

        Raises:
            OSError: the directory cannot be created.
        """
        self._directory.mkdir(mode=0o700, exist_ok=True)

    def leave(self, digest: str) -> None:
        """Leave a note for `digest`.

        Raises:
            OSError: the note cannot be written, or the store was never opened.
        """
        (self._directory / digest).touch(mode=0o600)

    def is_left(self, digest: str) -> bool:
        """Return whether the note for `digest` is still pending."""
        return (self._directory / digest).exists()

    def take(self) -> list[str]:
        """Remove the notes and return their digests; a note that cannot be removed is left out."""
        taken = []
        try:
            for note in self._directory.iterdir():
                if _DIGEST.match(note.name):
                    note.unlink()
                    taken.append(note.name)
        except OSError as error:
            log.debug("model store: %s: %s", self._directory, error)
        return taken
