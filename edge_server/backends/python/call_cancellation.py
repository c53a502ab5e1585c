"""Cancellation of a call to another model."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.backends.contract import ExecuteRequest


class NestedCallCancellation:
    """Cancelled by the calling model, or when the calling model's own client is gone."""

    def __init__(self, caller: ExecuteRequest) -> None:
        self._caller = caller.request
        self._lock = threading.Lock()
        self._cancelled = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        return self._cancelled or self._caller.cancelled

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        if self._caller.cancellation is not None:
            self._caller.cancellation.when_cancelled(callback)
        with self._lock:
            if not self._cancelled:
                self._callbacks.append(callback)
                return
        callback()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
