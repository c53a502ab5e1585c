"""What became of each model that was delivered: told by the daemon, heard by who delivers.

Who delivers reads it on the far side of ssh too: only the standard library here (`far_side.py`).
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)

FORMAT = 1
_NAME = "verdicts.json"

# Outcomes. Nothing is said of what is still being copied.
LOADING = "loading"
ON_TRIAL = "on trial"  # it serves, and is watched beside what served before
GOOD = "good"  # it serves, and is what a restart serves
WAITS = "waits"  # for memory, or for another model to change
REFUSED = "refused"
ROLLED_BACK = "rolled back"


class Verdict(NamedTuple):
    """What a daemon says of one model.

    Attributes:
        outcome: of the newest content; one of those above.
        digest: of that content; empty where it could not be read.
        reason: why it does not serve.
        told_ns: when, `time.monotonic_ns()` of that machine.
        serves: the digest of what serves; empty where nothing does.
        last_good: the digest of what a restart serves.
        copy: the directory of that, below the store.
    """

    outcome: str = ""
    digest: str = ""
    reason: str = ""
    told_ns: int = 0
    serves: str = ""
    last_good: str = ""
    copy: str = ""


class Report(NamedTuple):
    """All that the daemon of one store says.

    Attributes:
        runs: it still does.
        repositories: which it follows, as resolved paths.
    """

    runs: bool
    repositories: tuple[str, ...]
    models: Mapping[str, Verdict]


class Verdicts:
    """Writes what became of each model into the store; any thread may call.

    A restart says it anew: nothing here need outlive a power cut. A verdict that
    cannot be written is kept for `write_again`, and changes nothing else.
    """

    def __init__(self, store: Path, repositories: Sequence[Path]) -> None:
        self._path = store / _NAME
        self._store = store
        self._repositories = [str(path.resolve()) for path in repositories]
        self._lock = threading.Lock()
        self._models: dict[str, Verdict] = {}
        self._failed = False
        with self._lock:
            self._write()

    def tell(self, name: str, outcome: str, digest: str = "", reason: str = "") -> None:
        """The newest content of `name` has come to that."""
        self._change(name, outcome=outcome, digest=digest, reason=reason)

    def serves(self, name: str, digest: str, *, on_trial: bool) -> None:
        outcome = ON_TRIAL if on_trial else GOOD
        self._change(name, outcome=outcome, digest=digest, reason="", serves=digest)

    def is_good(self, name: str, digest: str, directory: Path) -> None:
        """A restart serves what has this digest; `directory` is its copy in the store."""
        copy = str(directory.relative_to(self._store))
        self._change(
            name,
            outcome=GOOD,
            digest=digest,
            reason="",
            serves=digest,
            last_good=digest,
            copy=copy,
        )

    def rolled_back(self, name: str, digest: str, reason: str, serves: str) -> None:
        """`serves` is the digest of what serves again."""
        self._change(name, outcome=ROLLED_BACK, digest=digest, reason=reason, serves=serves)

    def gone(self, name: str) -> None:
        with self._lock:
            self._models.pop(name, None)
            self._write()

    def write_again(self) -> None:
        """Write what could not be written, as while the disk was full."""
        with self._lock:
            if self._failed:
                self._write()

    def _change(self, name: str, **fields: str) -> None:
        with self._lock:
            before = self._models.get(name, Verdict())
            self._models[name] = before._replace(told_ns=time.monotonic_ns(), **fields)
            self._write()

    def _write(self) -> None:
        """The caller has the lock."""
        pid = os.getpid()
        fields = {
            "format": FORMAT,
            "pid": pid,
            "started": _started(pid),
            "repositories": self._repositories,
            "models": {name: verdict._asdict() for name, verdict in self._models.items()},
        }
        beside = self._path.with_suffix(".tmp")
        try:
            beside.write_text(json.dumps(fields))
            beside.replace(self._path)
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("model store: %s cannot be written: %s", self._path, error)
            self._failed = True


def read_report(store: Path) -> Report | None:
    """What the daemon of `store` says; None where none that tells ever opened it.

    Raises:
        OSError: it may not be read.
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
    """When that process was started, which tells it from a later one of its number; or nothing."""
    try:
        # proc(5): the 22nd field; the second one may hold spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
