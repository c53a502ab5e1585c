"""Runs work that may hang on a thread of its own, with a timeout between signs of progress."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from edge_server.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable

    GotOn = Callable[[], None]

log = logging.getLogger(__name__)

T = TypeVar("T")


class Hangs(ModelLoadError):
    """The work made no progress for too long; the resources that it holds are still in use."""


def run_with_timeout(
    name: str, work: Callable[[GotOn], T], patience_s: float, *, late: Callable[[], None]
) -> T:
    """Run `work` on a thread of its own; return its result or raise its exception.

    Args:
        name: the name of the thread.
        work: receives a function to call at each sign of progress.
        patience_s: the longest time between two signs of progress, in seconds.
        late: called on that thread if the work ends after the timeout.

    Raises:
        Hangs: the work made no progress in time. A thread cannot be ended, so the work keeps
            running with all resources that it holds.
    """
    attempt = _Attempt(work, late)
    threading.Thread(target=attempt.run, name=name, daemon=True).start()
    return attempt.wait(patience_s)


class _Attempt(Generic[T]):
    def __init__(self, work: Callable[[GotOn], T], late: Callable[[], None]) -> None:
        self._work = work
        self._late = late
        self._changed = threading.Condition()
        self._got_on_s = time.monotonic()
        self._given: list[T] = []
        self._raised: BaseException | None = None
        self._is_over = False
        self._is_left = False

    def run(self) -> None:
        try:
            self._given.append(self._work(self._get_on))
        # The waiting caller raises it, even a SystemExit of a model.
        except BaseException as error:  # noqa: BLE001
            self._raised = error
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._is_left:
            try:
                self._late()
            except Exception:
                log.exception("%s: came back late, and went wrong", threading.current_thread().name)

    def wait(self, patience_s: float) -> T:
        with self._changed:
            while not self._is_over:
                left_s = self._got_on_s + patience_s - time.monotonic()
                if left_s <= 0:
                    self._is_left = True
                    raise Hangs(f"it hangs: nothing came of it for {patience_s:g} s")
                self._changed.wait(left_s)
        if self._raised is not None:
            raise self._raised
        return self._given[0]

    def _get_on(self) -> None:
        with self._changed:
            self._got_on_s = time.monotonic()
