"""The registry of loaded models: immutable snapshots, leased by requests, replaced as a whole."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from edge_server.inference.snapshot import UNLOADED, ModelEntry, ModelState, Snapshot
from edge_server.process.threads import side_by_side, start_thread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.inference.snapshot import LoadedModel

    Entries = Mapping[tuple[str, int], ModelEntry]

log = logging.getLogger(__name__)

_WITH_NEWS = (ModelState.READY, ModelState.LOADING)


class ModelRegistry:
    """Publishes the current snapshot; readers lease it, one writer at a time replaces it.

    The registry closes a model that a new snapshot no longer names once, when the last lease on a
    snapshot that still names it ends: a request never loses the model it runs on. Until then the
    version is UNLOADING, afterwards UNAVAILABLE for the reason "unloaded".

    A separate thread closes models: the last lease may end on a thread of the very model to be
    closed, and closing may take long. Where the system refuses a thread, these models are closed
    together with those of the next superseded snapshot.

    Attributes:
        failed_start: no repository could be read at the start, and no model was loaded since.
    """

    def __init__(self) -> None:
        self.failed_start = False
        self._lock = threading.Lock()
        self._none_left = threading.Condition(self._lock)
        self._current = _PinnedSnapshot(Snapshot({}))
        self._superseded: list[_PinnedSnapshot] = []
        self._leaving: dict[int, ModelEntry] = {}
        self._to_close: list[LoadedModel] = []
        self._closing = 0

    @property
    def snapshot(self) -> Snapshot:
        """Return the current snapshot for reading; running a model takes a lease."""
        return self._current.snapshot

    def lease(self) -> Lease:
        """Lease the current snapshot; its models stay open until the lease is released."""
        with self._lock:
            current = self._current
            current.leases += 1
        return Lease(self, current, current.snapshot)

    def _keep(self, snapshot: Snapshot) -> Lease:
        """Add a lease on a snapshot that is already leased."""
        with self._lock:
            pinned = next(p for p in (self._current, *self._superseded) if p.snapshot is snapshot)
            pinned.leases += 1
        return Lease(self, pinned, snapshot)

    def end(self, lease: Lease) -> None:
        """End `lease` on its snapshot; further calls for the same lease have no effect."""
        with self._lock:
            pinned, lease.pinned = lease.pinned, None
            if pinned is None:
                return
            pinned.leases -= 1
            # The writer that superseded this snapshot left its closing to the last lease.
            if pinned is not self._current:
                self._release()

    def models_in_use(self) -> list[LoadedModel]:
        """Return the models of the current snapshot and of superseded, still leased snapshots."""
        with self._lock:
            models = {id(m): m for p in (self._current, *self._superseded) for m in p.models}
        return list(models.values())

    def replace(self, name: str, entries: Sequence[ModelEntry]) -> None:
        """Replace all entries of model `name` by `entries` in one step."""
        self.publish({name: entries})

    def publish(self, changes: Mapping[str, Sequence[ModelEntry]]) -> None:
        """Replace all entries of the models in `changes` in one step.

        A loaded version that `changes` no longer names becomes UNLOADING.
        """
        new = {(e.name, e.version): e for entries in changes.values() for e in entries}
        with self._lock:
            entries = {}
            for key, old in self._current.snapshot.entries.items():
                if key[0] not in changes or old.state is ModelState.UNLOADING:
                    entries[key] = old
                elif old.loaded is not None and key not in new:
                    leaving = replace(old, state=ModelState.UNLOADING, reason="", loaded=None)
                    entries[key] = self._leaving[id(old.loaded)] = leaving
            self._supersede({**entries, **new})

    def give_reason(self, name: str, reason: str) -> None:
        """Set the reason of the READY and LOADING entries of model `name`; change nothing else."""
        with self._lock:
            entries = self._current.snapshot.entries
            reasoned = {
                key: replace(entry, reason=reason)
                for key, entry in entries.items()
                if entry.name == name and entry.state in _WITH_NEWS
            }
            self._supersede({**entries, **reasoned})

    def clear(self, timeout_s: float | None = None) -> bool:
        """Remove every model; unleased models close before this returns, others with their lease.

        Returns:
            False where unleased models are still closing after `timeout_s`; they finish later.
        """
        with self._lock:
            self._leaving.clear()
            self._superseded.append(self._current)
            self._current = _PinnedSnapshot(Snapshot({}))
            released = [*self._to_close, *self._released()]
            self._to_close = []
            self._closing += 1
        closed = threading.Event()

        def close() -> None:
            self._close(released)
            closed.set()

        if not start_thread("close-models", close):
            log.warning("models are closed without a thread of their own: none is left")
            close()
        return closed.wait(timeout_s)

    def wait_closed(self, timeout_s: float | None = None) -> bool:
        """Whether the leases on earlier snapshots end, and their models close, in `timeout_s`."""
        with self._none_left:
            return self._none_left.wait_for(
                lambda: not (self._closing or self._to_close or self._superseded), timeout_s
            )

    def _supersede(self, entries: Entries) -> None:
        self._superseded.append(self._current)
        self._current = _PinnedSnapshot(Snapshot(entries, self._keep))
        self._release()

    def _release(self) -> None:
        """Close the models that only superseded snapshots without a lease name."""
        self._to_close += self._released()
        if self._to_close:
            if not start_thread("close-models", partial(self._close, self._to_close)):
                log.warning("models are closed later: no thread is left")
                return
            self._closing += 1
            self._to_close = []
        elif not self._superseded:
            self._none_left.notify_all()

    def _released(self) -> list[LoadedModel]:
        """Drop superseded snapshots without a lease and return the models only they named."""
        dead = [pinned for pinned in self._superseded if pinned.leases == 0]
        if not dead:
            return []
        self._superseded = [pinned for pinned in self._superseded if pinned.leases > 0]
        alive = {id(m) for pinned in (self._current, *self._superseded) for m in pinned.models}
        return list(
            {id(m): m for pinned in dead for m in pinned.models if id(m) not in alive}.values()
        )

    def _close(self, models: Sequence[LoadedModel]) -> None:
        side_by_side([partial(_close_one, model) for model in models], "close-model")
        with self._lock:
            entries = dict(self._current.snapshot.entries)
            for model in models:
                gone = self._leaving.pop(id(model), None)
                # The version may have been loaded anew meanwhile.
                if gone is not None and entries.get((gone.name, gone.version)) is gone:
                    log.info("model %s: version %d unloaded", gone.name, gone.version)
                    entries[gone.name, gone.version] = replace(
                        gone, state=ModelState.UNAVAILABLE, reason=UNLOADED
                    )
            self._closing -= 1
            self._supersede(entries)


def _close_one(model: LoadedModel) -> None:
    try:
        model.close()
    except Exception:
        log.exception("model %s: closing version %d failed", model.name, model.version)


class Lease(msgspec.Struct, eq=False):
    """The right to use one snapshot, from any thread, until `release` or the end of a `with`."""

    _registry: ModelRegistry
    pinned: _PinnedSnapshot | None
    snapshot: Snapshot

    def __enter__(self) -> Snapshot:
        return self.snapshot

    def __exit__(self, *_: object) -> None:
        self._registry.end(self)

    def release(self) -> None:
        """Release the snapshot; further calls have no effect on the snapshot's other leases."""
        self._registry.end(self)


class _PinnedSnapshot:
    """A snapshot and the number of its leases."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.models = [e.loaded for e in snapshot.entries.values() if e.loaded]
        self.leases = 0
