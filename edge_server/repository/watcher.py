"""The repository watcher of mode POLL: scans periodically and applies the confirmed changes."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

from edge_server.process.worker import Worker
from edge_server.repository.tree import read_repositories

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from edge_server.repository.change_detector import Change, ChangeDetector

log = logging.getLogger(__name__)

# The scan interval while a model is changing, so that the wait for the next poll does not add to
# the settling time.
_SETTLING_S = 0.5


class RepositoryWatcher:
    """Scans every `poll_s` seconds, more often while a model is changing.

    Polling finds every change; inotify only makes a scan start earlier.

    Args:
        repositories: the directories to scan.
        change_detector: decides which changes are complete.
        act: starts the updates for the changes and returns soon, with the names of the models
            whose files changed again in the meantime.
        poll_s: the time between two scans, in seconds.
        wait: waits up to a number of seconds for a change in the repositories; returns the names
            of the models that were renamed into place, or None without a change.
        attend: called about every second with `time.monotonic()`; returns the names of unchanged
            models to report once more.
    """

    def __init__(
        self,
        repositories: Sequence[Path],
        change_detector: ChangeDetector,
        act: Callable[[Sequence[Change]], Collection[str]],
        *,
        poll_s: float,
        wait: Callable[[float], Collection[str] | None],
        attend: Callable[[float], Collection[str]] = lambda _: (),
    ) -> None:
        # No deadline: a disk that hangs must not end the process, as the loaded models still serve.
        self.worker = Worker("repository", self._tick, deadline_s=math.inf)
        self._repositories = tuple(repositories)
        self._change_detector = change_detector
        self._act = act
        self._poll_s = poll_s
        self._wait = wait
        self._attend = attend
        self._blind: dict[Path, str] = {}
        self._looked_at = time.monotonic()
        self._next_at = 0.0
        self._arrived: set[str] = set()

    def age_s(self, now: float) -> float:
        """Return the seconds since the last scan ended."""
        return now - self._looked_at

    def look(self, now: float, arrived: Collection[str] = ()) -> bool:
        """Scan once and apply the changes; return whether a model may still be changing.

        Args:
            now: `time.monotonic()`.
            arrived: the models that were renamed into place since the last scan.
        """
        seen = read_repositories(self._repositories)
        for repository, why in seen.blind.items():
            if self._blind.get(repository) != why:
                log.warning("repository %s: %s; what is loaded of it serves on", repository, why)
        for repository in self._blind.keys() - seen.blind.keys():
            log.info("repository %s: can be read again", repository)
        self._blind = dict(seen.blind)
        changes = self._change_detector.look(seen, now, arrived)
        if changes:
            for name in self._act(changes):
                self._change_detector.doubt(name)
        self._looked_at = time.monotonic()
        return bool(self._change_detector.settling)

    def _tick(self, now: float) -> None:
        for name in self._attend(now):
            self._change_detector.tell_again(name)
            self._next_at = 0.0
        if now >= self._next_at:
            changing = self.look(now, self._arrived)
            self._arrived = set()
            self._next_at = now + min(self._poll_s, _SETTLING_S if changing else self._poll_s)
        arrived = self._wait(max(0.0, min(1.0, self._next_at - time.monotonic())))
        if arrived is not None:
            self._arrived.update(arrived)
            self._next_at = 0.0
