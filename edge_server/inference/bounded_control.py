"""A limit on how many callers wait for a load at once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from edge_server.errors import Unavailable
from edge_server.inference.control import NO_FILES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.inference.control import ModelControl
    from edge_server.inference.snapshot import ModelEntry
    from edge_server.requests import Cancellation


class BoundedControl:
    """A `ModelControl` for callers that hold a thread while they wait.

    At most `loads` callers wait for a load; the next is refused at once, so that threads remain
    for all other calls.
    """

    def __init__(self, control: ModelControl, loads: int) -> None:
        self._control = control
        self._loads = loads
        self._places = threading.Semaphore(loads)

    def load(
        self,
        name: str,
        *,
        config: str | None = None,
        files: Mapping[str, bytes] = NO_FILES,
        within: str = "",
        cancellation: Cancellation | None = None,
    ) -> None:
        """See `ModelControl.load`.

        Raises:
            Unavailable: the limit of concurrent loads is reached.
        """
        if not self._places.acquire(blocking=False):
            raise Unavailable(
                f"{self._loads} model loads are under way already; ask for '{name}' again when "
                "one of them is done"
            )
        try:
            self._control.load(
                name, config=config, files=files, within=within, cancellation=cancellation
            )
        finally:
            self._places.release()

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """See `ModelControl.unload`."""
        self._control.unload(name, unload_dependents=unload_dependents)

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        """See `ModelControl.index`."""
        return self._control.index(only_ready=only_ready)
