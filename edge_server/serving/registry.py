"""What is loaded: a snapshot, pinned by whoever uses it, replaced as a whole."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from edge_server.serving.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.serving.snapshot import LoadedModel, ModelEntry


class ModelRegistry:
    """Holds the current snapshot; readers lease it, one writer at a time replaces it.

    A model that a new snapshot no longer names is closed when the last lease on a snapshot that
    still names it ends, so a request never loses the model it runs on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current = _Pinned(Snapshot({}))
        self._superseded: list[_Pinned] = []

    @property
    def snapshot(self) -> Snapshot:
        """The current snapshot, to look at; whoever runs a model takes a lease."""
        return self._current.snapshot

    def lease(self) -> Lease:
        """The current snapshot, kept alive until the lease is released."""
        with self._lock:
            self._current.leases += 1
            return Lease(self, self._current)

    def _keep(self, snapshot: Snapshot) -> Lease:
        """One lease more on a snapshot that is leased already."""
        with self._lock:
            pinned = next(p for p in (self._current, *self._superseded) if p.snapshot is snapshot)
            pinned.leases += 1
            return Lease(self, pinned)

    def end(self, pinned: _Pinned) -> None:
        """One lease less on `pinned`."""
        with self._lock:
            pinned.leases -= 1
            # Whoever superseded it found a lease on it, and left it to the last one.
            released = self._release() if pinned is not self._current else []
        _close(released)

    def replace(self, name: str, entries: Sequence[ModelEntry]) -> None:
        """Make `entries` all that is known of model `name`, in one step."""
        with self._lock:
            others = {k: e for k, e in self._current.snapshot.entries.items() if k[0] != name}
            released = self._publish(others | {(e.name, e.version): e for e in entries})
        _close(released)

    def clear(self) -> None:
        """Forget every model; each is closed with its last lease."""
        with self._lock:
            released = self._publish({})
        _close(released)

    def _publish(self, entries: Mapping[tuple[str, int], ModelEntry]) -> list[LoadedModel]:
        self._superseded.append(self._current)
        self._current = _Pinned(Snapshot(entries, self._keep))
        return self._release()

    def _release(self) -> list[LoadedModel]:
        """Drop superseded snapshots that nobody leases; the models only they named."""
        dead = [pinned for pinned in self._superseded if pinned.leases == 0]
        if not dead:
            return []
        self._superseded = [pinned for pinned in self._superseded if pinned.leases > 0]
        alive = {id(m) for pinned in (self._current, *self._superseded) for m in pinned.models}
        return list(
            {id(m): m for pinned in dead for m in pinned.models if id(m) not in alive}.values()
        )


class Lease:
    """A right to use one snapshot, from any thread, until it is released."""

    __slots__ = ("_pinned", "_registry", "snapshot")

    def __init__(self, registry: ModelRegistry, pinned: _Pinned) -> None:
        self._registry = registry
        self._pinned = pinned
        self.snapshot = pinned.snapshot

    def release(self) -> None:
        """To be called once."""
        self._registry.end(self._pinned)


class _Pinned:
    """A snapshot and how many leases are on it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.models = [e.loaded for e in snapshot.entries.values() if e.loaded]
        self.leases = 0


def _close(models: list[LoadedModel]) -> None:
    for model in models:
        model.close()
