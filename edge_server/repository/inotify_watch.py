"""The inotify watch: wakes the watcher early and reports models renamed into place."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from inotify_simple import INotify, flags

from edge_server.repository.scan import is_model_name

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

_ASKED = flags.MOVED_TO | flags.MOVED_FROM | flags.CREATE | flags.DELETE | flags.ONLYDIR


class InotifyWatch:
    """Waits for a change among the models of `repositories`. Not thread-safe.

    Without free inotify watches, or on a file system without events, the wait only times out.
    """

    def __init__(self, repositories: Sequence[Path]) -> None:
        self._repositories = tuple(repositories)
        self._nothing = threading.Event()
        self._inotify: INotify | None = None
        try:
            self._inotify = INotify()
        except OSError as error:
            log.warning("repository: inotify cannot be used, only polled: %s", error)

    def wait(self, seconds: float) -> Collection[str] | None:
        """Wait up to `seconds` for a change; return the models renamed into place, or None without
        a change."""
        if self._inotify is None or not self._watch(self._inotify):
            self._nothing.wait(seconds)
            return None
        # An event is only a hint, so the first batch of a burst is enough.
        events = self._inotify.read(timeout=round(1000 * seconds))
        if not events:
            return None
        arrived = flags.MOVED_TO | flags.ISDIR
        return {e.name for e in events if e.mask & arrived == arrived and is_model_name(e.name)}

    def close(self) -> None:
        if self._inotify is not None:
            self._inotify.close()

    def _watch(self, inotify: INotify) -> bool:
        """Watch the repositories that exist now; return whether any is watched."""
        watched = False
        for repository in self._repositories:
            try:
                inotify.add_watch(repository, _ASKED)
                watched = True
            except OSError:
                continue  # the repository may be mounted later; polling finds it
        return watched
