"""The verdicts file: the daemon reports the outcome of each delivered model to `models push`.

The remote agent reads the file over ssh, too, so this module uses only the standard library (see
`remote_agent.py`).
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

# Outcomes. A model that is still being copied has no outcome.
LOADING = "loading"
ON_TRIAL = "on trial"  # the content serves, in a canary
GOOD = "good"  # the content serves, and a restart serves it again
WAITS = "waits"  # the load waits for memory, or for a change of another model
REFUSED = "refused"
ROLLED_BACK = "rolled back"


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


class Verdicts:
    """Writes the verdict on each model into the store. Thread-safe.

    The verdicts need not be durable, because a restart writes them again. A verdict that cannot be
    written is kept for `write_again` and has no other effect.
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
        """Report `outcome` for the newest content of `name`."""
        self._change(name, outcome=outcome, digest=digest, reason=reason)

    def serves(self, name: str, digest: str, *, on_trial: bool) -> None:
        outcome = ON_TRIAL if on_trial else GOOD
        self._change(name, outcome=outcome, digest=digest, reason="", serves=digest)

    def is_good(self, name: str, digest: str, directory: Path) -> None:
        """Report content `digest` as last known good; `directory` is its copy in the store."""
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
        """Report the rollback of content `digest`; `serves` is the digest that serves again."""
        self._change(name, outcome=ROLLED_BACK, digest=digest, reason=reason, serves=serves)

    def gone(self, name: str) -> None:
        with self._lock:
            self._models.pop(name, None)
            self._write()

    def write_again(self) -> None:
        """Write the verdicts again if the last write failed, for example on a full disk."""
        with self._lock:
            if self._failed:
                self._write()

    def _change(self, name: str, **fields: str) -> None:
        with self._lock:
            before = self._models.get(name, Verdict())
            self._models[name] = before._replace(told_ns=time.monotonic_ns(), **fields)
            self._write()

    def _write(self) -> None:
        """Write all verdicts; the caller holds the lock."""
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
