"""Which loads run at once: one after another for one model, and one updated model at a time."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edge_server.errors import Cancelled, Unavailable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from edge_server.requests import Cancellation

log = logging.getLogger(__name__)


class _Hold:
    """The names that one caller holds or waits for.

    Attributes:
        names: the model names.
        within: the hold that cannot end before this hold has ended.
    """

    def __init__(self, names: Collection[str], within: _Hold | None) -> None:
        self.names = frozenset(names)
        self.within = within


class ModelLocks:
    """Locks by name; several names are locked in one step, so that two callers cannot deadlock.

    A model may request a load during its own load, within the names that are held for it. A request
    that would wait for that load itself is refused.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[str, _Hold] = {}
        self._all: set[_Hold] = set()
        self._over = False

    @contextmanager
    def hold(
        self,
        names: Collection[str],
        within: str = "",
        cancellation: Cancellation | None = None,
    ) -> Iterator[None]:
        """Wait until all of `names` are free, and hold them inside the block.

        Args:
            names: the models to lock.
            within: the model that requests the load; the holder of its lock waits for the caller.
            cancellation: the cancellation of the request, which ends the wait.

        Raises:
            Cancelled: the request was cancelled before the names were free.
            Unavailable: `end` was called during the wait, or the wait would be a deadlock.
        """
        with self._changed:
            hold = _Hold(names, self._held.get(within))
            if hold.within is not None and self._wait_for(hold.names, hold.within):
                raise Unavailable(
                    f"model '{within}' requests {', '.join(sorted(names))}, which would wait for "
                    f"the load of '{within}' that is under way: request it again when that is done"
                )
            self._all.add(hold)
            if cancellation is not None:
                cancellation.when_cancelled(self._look_again)
            while not (self._over or self._held.keys().isdisjoint(names)):
                if cancellation is not None and cancellation.cancelled:
                    self._all.discard(hold)
                    raise Cancelled(
                        f"the load of {', '.join(sorted(names))} was cancelled before it began"
                    )
                self._changed.wait()
            if self._over:
                raise Unavailable("Server exiting")
            self._held.update(dict.fromkeys(hold.names, hold))
        try:
            yield
        finally:
            with self._changed:
                for name in hold.names:
                    del self._held[name]
                self._all.discard(hold)
                self._changed.notify_all()

    def _look_again(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def end(self, timeout_s: float) -> bool:
        """Refuse every further hold; return whether all holds ended within `timeout_s`."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._held, timeout_s)

    def _wait_for(self, names: Collection[str], end: _Hold) -> bool:
        """Return whether `names` become free only after the hold `end` has ended."""
        todo = list(names)
        for name in todo:  # grows while it is walked
            holder = self._held.get(name)
            if holder is end:
                return True
            for hold in self._all:
                if holder is not None and hold.within is holder:
                    todo += [each for each in hold.names if each not in todo]
        return False


class LoadSlot:
    """Allows one load at a time; a load longer than `timeout_s` no longer blocks the next."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._holder: str | None = None
        self._since = 0.0

    @contextmanager
    def take(self, name: str) -> Iterator[None]:
        """Wait for the slot and hold it inside the block, at most until `timeout_s` is over."""
        with self._changed:
            while self._holder is not None:
                left_s = self._since + self._timeout_s - time.monotonic()
                if left_s <= 0:
                    log.warning("model %s: still loads; others load beside it", self._holder)
                    break
                self._changed.wait(left_s)
            self._holder, self._since = name, time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                if self._holder == name:
                    self._holder = None
                    self._changed.notify_all()
