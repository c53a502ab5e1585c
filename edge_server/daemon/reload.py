"""Settings are read again at SIGHUP: the cameras change to them, and the rest needs a restart."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

import msgspec

from edge_server.daemon.status import notify
from edge_server.errors import EdgeServerError
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    from edge_server.daemon.camera_set import CameraSet
    from edge_server.settings import Settings

log = logging.getLogger(__name__)

# The sections that change while the daemon runs.
_LIVE = frozenset({"cameras"})
_LOOK_S = 1.0
# An editor, or a script with another request, may still write: a file that was emptied to be
# written anew is valid, and has no cameras.
_SETTLE_S = 0.1
_NOT_RELOADED = "settings: not reloaded, everything stays as it is"


class SettingsReload:
    """Reads the settings again where `requested` is set, and applies what can change in a run.

    The file is read until it no longer changes. Settings with a fault change nothing, and the log
    says why. Those that need a restart are named in one line, and the running ones stay. Requests
    that come during a reload lead to one more reload after it, so the last file wins.

    Attributes:
        worker: waits for requests. A reload has no time limit: it waits for models and files, and
            while one of them hangs, nothing but further reloads waits for it.

    Args:
        running: the settings of this run.
        read: reads the settings again; may raise SettingsError.
        requested: set at each request, also before `worker` has started.
        cameras: are changed.
    """

    def __init__(
        self,
        running: Settings,
        read: Callable[[], Settings],
        requested: threading.Event,
        cameras: CameraSet,
    ) -> None:
        self.worker = Worker("settings", self.tick)
        self._running = running
        self._read = read
        self._cameras = cameras
        self._requested = requested
        self._stopping = False

    def stop(self, timeout_s: float) -> None:
        """Stop waiting for requests; a reload that runs gets `timeout_s` to end."""
        self._stopping = True
        self.worker.ask_to_stop()
        self._requested.set()
        self.worker.stop(timeout_s)

    def tick(self, now: float) -> None:
        """Reload once if that was requested; wait for a request otherwise."""
        del now
        if not self._requested.wait(_LOOK_S) or self._stopping:
            return
        # Before the file is read: a later change of it comes with a request of its own.
        self._requested.clear()
        # sd_notify(3): RELOADING=1 needs the time, and READY=1 ends it, whatever came of it.
        notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            with self.worker.allowing(math.inf):
                self._reload()
        finally:
            notify("READY=1")

    def _reload(self) -> None:
        try:
            settings = self._read_settled()
        except Exception as error:
            # The trace of our own errors would say nothing that they do not.
            trace = None if isinstance(error, EdgeServerError) else error
            log.error("%s: %s", _NOT_RELOADED, error, exc_info=trace)  # noqa: TRY400
            return
        try:
            changes = self._cameras.change(settings.cameras)
        except EdgeServerError as error:
            log.error("%s: %s", _NOT_RELOADED, error)  # noqa: TRY400
            return
        log.info("settings: reloaded; cameras: %s", changes or "as before")
        if names := restart_needed(self._running, settings):
            log.warning("settings: need a restart, and stay as they are: %s", ", ".join(names))

    def _read_settled(self) -> Settings:
        """Return the settings once two readings in a row agree.

        Raises:
            Exception: that of the second of two readings with the same fault.
        """
        before: Settings | str | None = None
        while True:
            try:
                settings = self._read()
            except Exception as error:
                if str(error) == before:
                    raise
                before = str(error)
            else:
                if settings == before:
                    return settings
                before = settings
            self.worker.wait(_SETTLE_S)


def restart_needed(running: Settings, wanted: Settings) -> list[str]:
    """Return the names (`grpc.port`) of the settings of `wanted` that need a restart."""
    return [
        name
        for field in running.__struct_fields__
        if field not in _LIVE
        for name in _differing(getattr(running, field), getattr(wanted, field), field)
    ]


def _differing(one: Any, other: Any, name: str) -> Iterator[str]:
    if isinstance(one, msgspec.Struct) and type(one) is type(other):
        for field in one.__struct_fields__:
            yield from _differing(getattr(one, field), getattr(other, field), f"{name}.{field}")
    elif one != other:
        yield name
