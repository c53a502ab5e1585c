"""POLL: the repositories are looked at again and again, and what is believed is carried out."""

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

# While something is changing, it is looked at this often, so that waiting for the next poll does
# not add to the window.
_SETTLING_S = 0.5


class RepositoryWatcher:
    """Looks every `poll_s`, more often while something changes; polling is the truth.

    Args:
        beliefs: says what of what is seen is to be acted on.
        act: carries that out, and returns soon; the models that were not what was told of them.
        wait: waits so many seconds, or until something has changed; then the names of the models
            that were renamed into place, else None.
        attend: called every second or so with `time.monotonic()`; the models to be told of again,
            though they have not changed.
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
        # A disk that does not answer is no reason to end the process: what is loaded serves on.
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
        """How long ago the last look ended."""
        return now - self._looked_at

    def look(self, now: float, arrived: Collection[str] = ()) -> bool:
        """Look once and act; whether something may still be changing.

        Args:
            now: `time.monotonic()`.
            arrived: the models that were renamed into place since the last look.
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
