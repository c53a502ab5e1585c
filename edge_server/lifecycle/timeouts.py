"""Work that may never end, waited for only as long as it gets on."""

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
    """It has not got on for too long, and what it holds is still in use."""


def run_with_timeout(
    name: str, work: Callable[[GotOn], T], patience_s: float, *, late: Callable[[], None]
) -> T:
    """What `work` gives or raises; it runs on a thread of its own, called `name`.

    Args:
        work: is given what it is to call each time it gets on.
        patience_s: how long it may take till then.
        late: called on that thread when it ends after all and nobody waits for it any more.

    Raises:
        Hangs: it did not get on. Nobody can end a thread: it is left with all that it holds.
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
        # Whoever waits hears of it, also of an exit that a model asks for.
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
