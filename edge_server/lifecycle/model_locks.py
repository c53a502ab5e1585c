"""Who works on a model waits for whoever works on it already, and for nobody else."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edge_server.errors import Cancelled, Unavailable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from edge_server.requests import Cancellation


class _Hold:
    """What somebody holds, or waits for.

    Attributes:
        within: what cannot end before this has ended.
    """

    def __init__(self, names: Collection[str], within: _Hold | None) -> None:
        self.names = frozenset(names)
        self.within = within


class ModelLocks:
    """Locks by name, several of them taken in one step, so that no two can wait for each other.

    Somebody may ask for more while names are held, on their behalf: what a model asks for that is
    loaded. That is refused where it would wait for itself.
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
        """Wait until all of `names` are free; they are the caller's inside.

        Args:
            within: on whose behalf; whoever holds that waits for the caller.
            cancellation: of the request for the load; once cancelled, it waits no more.

        Raises:
            Cancelled: the request was cancelled before the names were free.
            Unavailable: `end` was called meanwhile, or it would wait for itself.
        """
        with self._changed:
            hold = _Hold(names, self._held.get(within))
            if hold.within is not None and self._wait_for(hold.names, hold.within):
                raise Unavailable(
                    f"model '{within}' asks for {', '.join(sorted(names))}, which would wait for "
                    f"the load of '{within}' that is under way: ask again when that is done"
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
        """Let nobody in any more; whether all who were in have gone in that time."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._held, timeout_s)

    def _wait_for(self, names: Collection[str], end: _Hold) -> bool:
        """Whether `names` become free only when `end` has ended."""
        todo = list(names)
        for name in todo:  # grows while it is walked
            holder = self._held.get(name)
            if holder is end:
                return True
            for hold in self._all:
                if holder is not None and hold.within is holder:
                    todo += [each for each in hold.names if each not in todo]
        return False
