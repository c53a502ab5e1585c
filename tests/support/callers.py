"""A caller of a model that may go before its response."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Caller:
    """Cancels its requests when a test says so. One whose `cancelled` is set tells nobody."""

    def __init__(self) -> None:
        self.cancelled = False
        self._callbacks: list[Callable[[], None]] = []

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def cancel(self) -> None:
        self.cancelled = True
        for callback in self._callbacks:
            callback()
