"""Immutable snapshots of the loaded models, and how a request runs in one."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from edge_server.errors import NotFound, Unavailable
from edge_server.inference.request_check import check_request, parse_version
from edge_server.inference.schedulers import TracedScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from edge_server.backends.contract import Model, ModelMetric
    from edge_server.inference.statistics import ModelStatistics
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import InferRequest, InferResponse, Respond


# The reason of an unloaded model that is UNAVAILABLE: Triton's text; readiness ignores it.
UNLOADED = "unloaded"


class RefCount:
    """Counts the users of a resource, the last of which closes it; its maker is the first.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 1

    def more(self) -> bool:
        """Add a user; False where the last user has ended and the resource must not be used."""
        with self._lock:
            if self._count == 0:
                return False
            self._count += 1
            return True

    def end(self) -> bool:
        """Remove a user, once for each; True where that was the last one."""
        with self._lock:
            if self._count == 0:
                return False
            self._count -= 1
            return self._count == 0


class ModelState(Enum):
    """The state of a model version; the values are the protocol's.

    UNKNOWN is a model on disk that was never loaded; the protocol reports only its name.
    """

    UNKNOWN = ""
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class Scheduler(Protocol):
    """Runs checked requests of one loaded model version."""

    def infer(self, request: InferRequest, snapshot: Snapshot) -> InferResponse:
        """Run `request` and return its only response.

        Args:
            snapshot: the snapshot that the request's lease pins until this returns.

        Raises:
            EdgeServerError: the request was refused, or the model responded with the error.
            DeadlineExceeded, Cancelled: no response came before the request's deadline or the
                caller's cancellation.
        """
        ...

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        """Accept `request`; `respond` gets each of its responses, the last one marked as final.

        `respond` may be called before this returns (the caller's thread runs the model) or after
        (the request is queued); the final response always arrives.

        Args:
            snapshot: the snapshot that the request's lease pins until the final response.

        Raises:
            InvalidRequest: the scheduler refuses the request; `respond` is not called.
        """
        ...

    def pending(self) -> int:
        """Return how many requests wait for an instance."""
        ...

    def running_since(self) -> float:
        """Return when the oldest unfinished run began (`time.monotonic()`); infinity where nothing
        runs. Equal values are the same run."""
        ...

    def close(self) -> None:
        """Release the instances; called when no request runs any more."""
        ...


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """One model version that can respond to requests.

    Attributes:
        model: the model of the scheduler's instances; an ensemble has none.
        after_close: called once everything the version holds is released.
        load_s: how long the load took, in s.
        scheduler_uses, model_uses: reference counts; the last user closes the scheduler or model.
    """

    config: ModelConfig
    version: int
    scheduler: Scheduler
    statistics: ModelStatistics
    model: Model | None = None
    after_close: Callable[[], None] | None = None
    load_s: float = 0.0
    scheduler_uses: RefCount = field(default_factory=RefCount)
    model_uses: RefCount = field(default_factory=RefCount)

    @property
    def name(self) -> str:
        return self.config.name

    def shared(self, config: ModelConfig) -> LoadedModel | None:
        """Return another loaded model on the same scheduler and model; None after `close`.

        The caller closes the returned model too.

        Args:
            config: the configuration of the returned model; the instances stay the same.
        """
        if not self.scheduler_uses.more():
            return None
        # A reference on the scheduler implies one on the model.
        self.model_uses.more()
        return replace(self, config=config)

    def not_ready_reason(self) -> str:
        """Return why the version cannot respond at this moment; empty where it can."""
        return "" if self.model is None else self.model.not_ready_reason()

    def metrics(self) -> Sequence[ModelMetric]:
        """Return the metrics that the model itself reports."""
        return () if self.model is None else self.model.metrics()

    def close(self) -> None:
        """Release the resources without another user; called when no request runs any more."""
        try:
            if self.scheduler_uses.end():
                self.scheduler.close()
        finally:
            if self.model_uses.end():
                self._close_model()

    def _close_model(self) -> None:
        try:
            if self.model is not None:
                self.model.close()
        finally:
            if self.after_close is not None:
                self.after_close()


@dataclass(frozen=True, eq=False)
class ModelEntry:
    """The registry's record of one model version.

    Attributes:
        version: 0 where the model failed before its version was known.
        reason: why the version is in this state, or the progress of its load; for a READY version,
            why its reload failed or the progress of its successor's load.
        loaded: present when READY.
        may_pass: for an UNAVAILABLE version: its files are not known to be at fault, so the next
            attempt may succeed.
    """

    name: str
    version: int
    state: ModelState
    reason: str = ""
    loaded: LoadedModel | None = None
    may_pass: bool = False


class RetainedSnapshot(Protocol):
    """The right to use the models of a snapshot until `release`."""

    def release(self) -> None:
        """Release the snapshot; to be called once."""
        ...


class Snapshot:
    """All model entries at one moment. Immutable; safe to read from any thread.

    Args:
        keep: takes another lease on this snapshot; None where its models are never closed.
    """

    def __init__(
        self,
        entries: Mapping[tuple[str, int], ModelEntry],
        keep: Callable[[Snapshot], RetainedSnapshot] | None = None,
    ) -> None:
        self._keep = keep
        self.entries = MappingProxyType(dict(entries))
        by_name: dict[str, dict[int, ModelEntry]] = {}
        for (name, version), entry in sorted(self.entries.items()):
            by_name.setdefault(name, {})[version] = entry
        self._by_name = by_name
        # The highest READY version by name.
        self._latest = {e.name: e.loaded for _, e in sorted(self.entries.items()) if e.loaded}

    def infer(self, request: InferRequest) -> InferResponse:
        """Find the model, check the request against it, run it and return its only response.

        Raises:
            NotFound, Unavailable, InvalidRequest: from `find` and the request check.
            EdgeServerError: see `Scheduler.infer`.
        """
        loaded = self.find(request.model_name, request.model_version)
        check_request(loaded.config, request)
        return self.run(loaded, request)

    def run(self, loaded: LoadedModel, request: InferRequest) -> InferResponse:
        """Run a request that was checked against `loaded`, and return its only response.

        Raises:
            EdgeServerError: see `Scheduler.infer`.
        """
        if request.trace is None:
            return loaded.scheduler.infer(request, self)
        return TracedScheduler(loaded, request.trace).infer(request, self)

    def submit(self, request: InferRequest, respond: Respond) -> None:
        """Find the model, check the request against it and pass it to the model's scheduler.

        Raises:
            NotFound, Unavailable, InvalidRequest: from `find` and the request check; `respond` is
                not called.
        """
        loaded = self.find(request.model_name, request.model_version)
        check_request(loaded.config, request)
        trace = request.trace
        scheduler = loaded.scheduler if trace is None else TracedScheduler(loaded, trace)
        scheduler.submit(request, self, respond)

    def retain(self) -> RetainedSnapshot | None:
        """Keep the models open beyond the caller's own lease."""
        return None if self._keep is None else self._keep(self)

    def find(self, name: str, version: str = "") -> LoadedModel:
        """Return the loaded model; an empty version means the highest READY one.

        Raises:
            NotFound: no such model or version, or none of its versions is READY.
            Unavailable: the given version exists but is not READY.
            InvalidRequest: `version` is not a version number.
        """
        latest = self._latest.get(name)
        if latest is not None and not version:
            return latest
        versions = self._by_name.get(name)
        unknown = f"Request for unknown model: '{name}'"
        if not versions:
            raise NotFound(f"{unknown} is not found")
        if not version:
            raise NotFound(f"{unknown} has no available versions")
        number = parse_version(version)
        entry = versions.get(number)
        if entry is None:
            raise NotFound(f"{unknown} version {number} is not found")
        if entry.loaded is None:
            raise Unavailable(f"{unknown} version {number} is not at ready state")
        return entry.loaded

    def model_ready(self, name: str, version: str) -> bool:
        """Whether the model can respond; an unknown model is not ready, and no error.

        Raises:
            InvalidRequest: `version` is not a version number.
        """
        try:
            return not self.find(name, version).not_ready_reason()
        except (NotFound, Unavailable):
            return False

    def ready_versions(self, name: str) -> list[int]:
        return [v for v, entry in self._by_name.get(name, {}).items() if entry.loaded]
