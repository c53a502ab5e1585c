"""The registry of loaded models: immutable snapshots, leased by requests, replaced as a whole."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import msgspec

from edge_server.errors import EdgeServerError, NotFound, Unavailable
from edge_server.inference.request_check import check_request, parse_version
from edge_server.process.threads import side_by_side, start_thread
from edge_server.requests import Reply

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.backends.contract import MemoryKind, Model, ModelMetric
    from edge_server.inference.statistics import ModelStatistics
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import (
        InferRequest,
        InferResponse,
        Respond,
        ResponseCallback,
        RetainedSnapshot,
        Trace,
    )

    Entries = Mapping[tuple[str, int], "ModelEntry"]

log = logging.getLogger(__name__)

# The reason of an unloaded model that is UNAVAILABLE: Triton's text; readiness ignores it.
UNLOADED = "unloaded"
# With it begins the reason of an idle version, see `ModelEntry.is_idle`.
IDLE = "idle: its next request loads it"


class RefCount:
    """Counts the users of a resource, the last of which closes it; its maker is the first."""

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
    """The state of a model version; the values are the protocol's."""

    # On disk and never loaded: the protocol reports only its name.
    UNKNOWN = ""
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class Scheduler(Protocol):
    """Runs checked requests of one loaded model version."""

    def infer(self, request: InferRequest, snapshot: Snapshot) -> InferResponse:
        """Run `request` and return its only response; its lease pins `snapshot` until then. Raises
        EdgeServerError, also where none came before the request's deadline or the caller's
        cancellation."""
        ...

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        """Accept `request`; `respond` gets each of its responses, before this returns (the caller's
        thread runs the model) or after (the request is queued). The last one, marked as final,
        always arrives, and the request's lease pins `snapshot` until then. Only an InvalidRequest
        is raised instead."""
        ...

    def pending(self) -> int:
        return 0

    def running_since(self) -> float:
        """When the oldest unfinished run began (`time.monotonic()`); infinity where nothing runs.
        Equal values are the same run."""
        return inf

    def close(self) -> None:
        """Release the instances, if any; called when no request runs any more."""
        return


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """One model version that can respond to requests.

    Attributes: scheduler_uses, model_uses: reference counts; the last user closes the scheduler or
        model, and clears `holds`, which is what the model needs as long as it is open.
    """

    config: ModelConfig
    version: int
    scheduler: Scheduler
    statistics: ModelStatistics
    model: Model | None = None
    holds: list[object] = field(default_factory=list)
    load_s: float = 0.0
    scheduler_uses: RefCount = field(default_factory=RefCount)
    model_uses: RefCount = field(default_factory=RefCount)

    @property
    def name(self) -> str:
        return self.config.name

    def shared(self, config: ModelConfig) -> LoadedModel | None:
        """Another loaded model, with `config`, on the same scheduler and model, to be closed too;
        None after `close`.
        """
        if not self.scheduler_uses.more():
            return None
        # A reference on the scheduler implies one on the model.
        self.model_uses.more()
        return replace(self, config=config)

    def not_ready_reason(self) -> str:
        """Why the version cannot respond at this moment; empty where it can."""
        return "" if self.model is None else self.model.not_ready_reason()

    def degraded_reason(self) -> str:
        """What the version responds without, and why; empty where it runs as configured."""
        return "" if self.model is None else self.model.degraded_reason()

    def metrics(self) -> Sequence[ModelMetric]:
        return () if self.model is None else self.model.metrics()

    def memory_bytes(self) -> Mapping[MemoryKind, int]:
        return {} if self.model is None else self.model.memory_bytes()

    def close(self) -> None:
        """Release the resources without another user; called when no request runs any more."""
        try:
            if self.scheduler_uses.end():
                self.scheduler.close()
        finally:
            if self.model_uses.end():
                try:
                    if self.model is not None:
                        self.model.close()
                finally:
                    self.holds.clear()


@dataclass(frozen=True, eq=False)
class ServedConfiguration:
    """Which of a model's configurations serves: `file` (config.pbtxt, or configs/NAME.pbtxt) on
    `devices` (`GPU 0`, `CPU`), `why` not one that the model prefers, and in `degraded` why not the
    one that this machine should serve, and how far that is."""

    file: str
    devices: str
    why: str = ""
    degraded: str = ""

    def __str__(self) -> str:
        why = self.degraded and f"degraded: {self.degraded}"
        return f"{self.file} on {self.devices}" + (
            f": {why or self.why}" if why or self.why else ""
        )


@dataclass(frozen=True)
class ModelEntry:
    """The registry's record of one model version.

    Attributes:
        version: 0 where the model failed before its version was known.
        reason: why the version is in this state, or the progress of its load; for a READY version,
            why its reload failed, the progress of its successor's load, or why it is degraded.
        loaded: present when READY; of an idle version, what loads it for a request.
        may_pass: of an UNAVAILABLE version whose files are not known to be at fault.
        configuration: of a READY version that is no ensemble."""

    name: str
    version: int
    state: ModelState
    reason: str = ""
    loaded: LoadedModel | None = None
    may_pass: bool = False
    configuration: ServedConfiguration | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the version is out of memory until its next request, which it can respond to."""
        return self.state is ModelState.UNAVAILABLE and self.loaded is not None


class Snapshot:
    """All model entries at one moment. Immutable but for `leases`; safe to read from any thread.

    Attributes:
        models: the loaded ones.
        leases: how many there are on it, which its `registry` counts.
    """

    def __init__(
        self,
        entries: Mapping[tuple[str, int], ModelEntry],
        registry: ModelRegistry | None = None,
    ) -> None:
        self._registry = registry
        self.leases = 0
        self.entries = MappingProxyType(dict(sorted(entries.items())))
        by_name: dict[str, dict[int, ModelEntry]] = {}
        for (name, version), entry in self.entries.items():
            by_name.setdefault(name, {})[version] = entry
        self._by_name = by_name
        self.models = [e.loaded for e in self.entries.values() if e.loaded]
        # The highest READY version by name.
        self._latest = {e.name: e.loaded for e in self.entries.values() if e.loaded}

    def infer(self, request: InferRequest) -> InferResponse:
        """Run a request on its model; raise as `find`, `check_request` and `Scheduler.infer`."""
        loaded = None if request.model_version else self._latest.get(request.model_name)
        if loaded is None:
            loaded = self.find(request.model_name, request.model_version)
        check_request(loaded.config, request)
        if request.trace is None:
            return loaded.scheduler.infer(request, self)
        return self.run(loaded, request)

    def run(self, loaded: LoadedModel, request: InferRequest) -> InferResponse:
        """Run a request that was checked against `loaded`, as `infer`."""
        if request.trace is None:
            return loaded.scheduler.infer(request, self)
        return TracedScheduler(loaded, request.trace).infer(request, self)

    def submit(self, request: InferRequest, respond: Respond) -> None:
        """Submit a request to its model; raise as `find`, `check_request` and `Scheduler.submit`,
        and then `respond` is not called.
        """
        loaded = self.find(request.model_name, request.model_version)
        check_request(loaded.config, request)
        trace = request.trace
        scheduler = loaded.scheduler if trace is None else TracedScheduler(loaded, trace)
        scheduler.submit(request, self, respond)

    def retain(self) -> RetainedSnapshot | None:
        """Keep the models open beyond the caller's own lease; None where they are never closed."""
        return None if self._registry is None else self._registry.lease(self)

    def find(self, name: str, version: str = "") -> LoadedModel:
        """Return the loaded model; an empty version means the highest READY one. Raises NotFound,
        Unavailable where the given version is not READY, InvalidRequest where it is no number."""
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

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        """Return every known model version, sorted by name and version."""
        entries = self.entries.values()
        return [e for e in entries if e.state is ModelState.READY or not only_ready]

    def model_ready(self, name: str, version: str) -> bool:
        """Whether the model can respond; an unknown model is not ready. Raises InvalidRequest as
        `find`.
        """
        try:
            return not self.find(name, version).not_ready_reason()
        except (NotFound, Unavailable):
            return False

    def ready_versions(self, name: str) -> list[int]:
        return [v for v, entry in self._by_name.get(name, {}).items() if entry.loaded]


class Submits(Scheduler):
    """A scheduler whose `infer` submits the request and waits for its response."""

    def infer(self, request: InferRequest, snapshot: Snapshot) -> InferResponse:
        """See `Scheduler.infer`. A caller that leaves early leaves the request in the queue, or
        running: the snapshot stays leased until the final response."""
        reply: Reply[InferResponse] = Reply(snapshot.retain())
        try:
            self.submit(request, snapshot, reply)
        except BaseException:
            reply(None, True)
            raise
        return reply.wait(request)


class SchedulerWrapper(Submits):
    """A scheduler that does something before or after the one `beneath` it, which it closes."""

    def __init__(self, beneath: Scheduler) -> None:
        self.beneath = beneath

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        self.beneath.submit(request, snapshot, respond)

    def pending(self) -> int:
        return self.beneath.pending()

    def running_since(self) -> float:
        return self.beneath.running_since()

    def close(self) -> None:
        self.beneath.close()


class TracedScheduler(SchedulerWrapper):
    """Records one request and its responses in the request's trace, which ends with the last one,
    also where the caller has left before it.
    """

    def __init__(self, loaded: LoadedModel, trace: Trace) -> None:
        super().__init__(loaded.scheduler)
        self._trace = trace
        self._version = loaded.version

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        trace = self._trace

        def pass_on(response: ResponseCallback, final: bool) -> None:
            # Before `respond`, which may mark later timestamps itself.
            error = str(response) if isinstance(response, EdgeServerError) else ""
            trace.responded(final=final, error=error)
            respond(response, final)

        trace.begin(self._version)
        try:
            self.beneath.submit(request, snapshot, pass_on)
        except BaseException as error:
            # Refused: there is no response.
            trace.end(str(error))
            raise


def innermost(scheduler: Scheduler) -> Scheduler:
    while isinstance(scheduler, SchedulerWrapper):
        scheduler = scheduler.beneath
    return scheduler


_WITH_NEWS = (ModelState.READY, ModelState.LOADING)


class ModelRegistry:
    """Publishes the current snapshot; readers lease it, one writer at a time replaces it.

    The registry closes a model that a new snapshot no longer names once, when the last lease on a
    snapshot that still names it ends: a request never loses the model it runs on. Until then the
    version is UNLOADING, afterwards UNAVAILABLE for the reason "unloaded". A separate thread closes
    models: the last lease may end on a thread of the very model, and closing may take long. Where
    the system refuses a thread, they are closed with those of the next superseded snapshot.

    Attributes: failed_start: no repository could be read at the start, and no model was loaded
        since."""

    def __init__(self) -> None:
        self.failed_start = False
        self.lock = threading.Lock()
        self._none_left = threading.Condition(self.lock)
        self.snapshot = Snapshot({}, self)
        self._superseded: list[Snapshot] = []
        self._leaving: dict[int, ModelEntry] = {}
        self._to_close: list[LoadedModel] = []
        self._closing = 0

    def lease(self, snapshot: Snapshot | None = None) -> Lease:
        """Lease the current snapshot, or once more one that is leased."""
        with self.lock:
            leased = snapshot or self.snapshot
            leased.leases += 1
        return Lease(self, leased)

    def release(self) -> None:
        """Close the models that only superseded snapshots without a lease name; under the lock."""
        self._to_close += self._released()
        if self._to_close:
            if not start_thread("close-models", partial(self._close, self._to_close)):
                log.warning("models are closed later: no thread is left")
                return
            self._closing += 1
            self._to_close = []
        elif not self._superseded:
            self._none_left.notify_all()

    def models_in_use(self) -> list[LoadedModel]:
        """The models of the current snapshot and of superseded, still leased ones."""
        with self.lock:
            models = {id(m): m for s in (self.snapshot, *self._superseded) for m in s.models}
        return list(models.values())

    def replace(self, name: str, entries: Sequence[ModelEntry]) -> None:
        self.publish({name: entries})

    def publish(self, changes: Mapping[str, Sequence[ModelEntry]]) -> None:
        """Replace all entries of the models in `changes` in one step; a loaded version that
        `changes` no longer names becomes UNLOADING.
        """
        new = {(e.name, e.version): e for entries in changes.values() for e in entries}
        with self.lock:
            entries = {}
            for key, old in self.snapshot.entries.items():
                if key[0] not in changes or old.state is ModelState.UNLOADING:
                    entries[key] = old
                elif old.loaded is not None and key not in new:
                    leaving = replace(old, state=ModelState.UNLOADING, reason="", loaded=None)
                    entries[key] = self._leaving[id(old.loaded)] = leaving
            self._supersede({**entries, **new})

    def give_reason(self, name: str, reason: str) -> None:
        """Set the reason of the READY and LOADING entries of model `name`; change nothing else."""
        with self.lock:
            entries = self.snapshot.entries
            reasoned = {
                key: replace(entry, reason=reason)
                for key, entry in entries.items()
                if entry.name == name and entry.state in _WITH_NEWS
            }
            self._supersede({**entries, **reasoned})

    def clear(self, timeout_s: float | None = None) -> bool:
        """Remove every model; unleased models close before this returns, others with their lease.
        False where they are still closing after `timeout_s`.
        """
        with self.lock:
            self._leaving.clear()
            self._superseded.append(self.snapshot)
            self.snapshot = Snapshot({}, self)
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
        self._superseded.append(self.snapshot)
        self.snapshot = Snapshot(entries, self)
        self.release()

    def _released(self) -> list[LoadedModel]:
        """Drop superseded snapshots without a lease and return the models only they named."""
        dead = [each for each in self._superseded if each.leases == 0]
        if not dead:
            return []
        self._superseded = [each for each in self._superseded if each.leases > 0]
        alive = {id(m) for each in (self.snapshot, *self._superseded) for m in each.models}
        return list({id(m): m for each in dead for m in each.models if id(m) not in alive}.values())

    def _close(self, models: Sequence[LoadedModel]) -> None:
        side_by_side([partial(close_model, model) for model in models], "close-model")
        with self.lock:
            entries = dict(self.snapshot.entries)
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


def close_model(model: LoadedModel) -> None:
    """Close `model`; log what its backend raises."""
    try:
        model.close()
    except Exception:
        log.exception("model %s: closing version %d failed", model.name, model.version)


class Lease(msgspec.Struct, eq=False):
    """The right to use one snapshot, from any thread, until `release` or the end of a `with`."""

    registry: ModelRegistry
    snapshot: Snapshot
    over: bool = False

    def __enter__(self) -> Snapshot:
        return self.snapshot

    def release(self, *_: object) -> None:
        """End the lease; further calls have no effect."""
        with self.registry.lock:
            if self.over:
                return
            self.over = True
            self.snapshot.leases -= 1
            # The writer that superseded this snapshot left its closing to the last lease.
            if self.snapshot is not self.registry.snapshot:
                self.registry.release()

    __exit__ = release
