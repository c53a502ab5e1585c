"""What is loaded: an immutable snapshot, pinned by whoever uses it, replaced as a whole."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.errors import InvalidRequest, NotFound, Unavailable
from edge_server.serving.request_check import check_request

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from edge_server.model_config.config import ModelConfig
    from edge_server.serving.requests import InferRequest, InferResponse
    from edge_server.serving.scheduler import Scheduler


class ModelState(Enum):
    """Where a model version is in its life; the values are the protocol's."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """One model version that can answer."""

    config: ModelConfig
    version: int
    scheduler: Scheduler


@dataclass(frozen=True, eq=False)
class ModelEntry:
    """What the registry says of one model version.

    Attributes:
        version: 0 where the model failed before a version could be told.
        reason: why it is in this state; empty when READY.
        loaded: present when READY.
    """

    name: str
    version: int
    state: ModelState
    reason: str = ""
    loaded: LoadedModel | None = None


class Snapshot:
    """All entries at one moment. Immutable; safe to read from any thread."""

    def __init__(self, entries: Mapping[tuple[str, int], ModelEntry]) -> None:
        self.entries = MappingProxyType(dict(entries))
        by_name: dict[str, dict[int, ModelEntry]] = {}
        for (name, version), entry in sorted(self.entries.items()):
            by_name.setdefault(name, {})[version] = entry
        self._by_name = by_name

    def infer(self, request: InferRequest) -> InferResponse:
        """Find the model, check the request against it, run it.

        Raises:
            NotFound, Unavailable, InvalidRequest: as `find` and the request check say.
            InternalError: the model failed.
        """
        loaded = self.find(request.model_name, request.model_version)
        check_request(loaded.config, request)
        return loaded.scheduler.infer(request, self)

    def find(self, name: str, version: str = "") -> LoadedModel:
        """The loaded model; an empty version is the highest that is ready.

        Raises:
            NotFound: no such model or version, or none of its versions is ready.
            Unavailable: that very version exists but is not ready.
            InvalidRequest: `version` is not a version number.
        """
        versions = self._by_name.get(name)
        unknown = f"Request for unknown model: '{name}'"
        if not versions:
            raise NotFound(f"{unknown} is not found")
        if not version:
            ready = [entry.loaded for entry in versions.values() if entry.loaded]
            if not ready:
                raise NotFound(f"{unknown} has no available versions")
            return ready[-1]
        number = parse_version(version)
        entry = versions.get(number)
        if entry is None:
            raise NotFound(f"{unknown} version {number} is not found")
        if entry.loaded is None:
            raise Unavailable(f"{unknown} version {number} is not at ready state")
        return entry.loaded

    def ready_versions(self, name: str) -> list[int]:
        return [v for v, entry in self._by_name.get(name, {}).items() if entry.loaded]


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

    @contextmanager
    def lease(self) -> Iterator[Snapshot]:
        """The current snapshot, kept alive until the block ends."""
        with self._lock:
            pinned = self._current
            pinned.leases += 1
        try:
            yield pinned.snapshot
        finally:
            with self._lock:
                pinned.leases -= 1
                released = self._release()
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
        self._current = _Pinned(Snapshot(entries))
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


def parse_version(text: str) -> int:
    """A version as the protocol spells it.

    Raises:
        InvalidRequest: not an integral value > 0 (Triton's texts).
    """
    try:
        number = int(text)
    except ValueError as error:
        raise InvalidRequest(
            f"failed to get model version from specified version string '{text[:32]}' (details: "
            "stol), version should be an integral value > 0"
        ) from error
    if number <= 0:
        raise InvalidRequest(
            f"invalid model version specified '{text[:32]}' , version should be an integral "
            "value > 0"
        )
    return number


class _Pinned:
    """A snapshot and how many leases are on it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.models = [e.loaded for e in snapshot.entries.values() if e.loaded]
        self.leases = 0


def _close(models: list[LoadedModel]) -> None:
    for model in models:
        model.scheduler.close()
