"""Models that get no requests: unloaded after a time, and loaded again by their next request.

The versions of an idle model stay in the registry, without their backend's model: requests find
them, are checked against their configuration, and wait for the load.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from edge_server.errors import Unavailable
from edge_server.inference.registry import IDLE, LoadedModel, Scheduler
from edge_server.inference.request_check import check_request
from edge_server.lifecycle.model_spec import LoadFailure
from edge_server.process.threads import start_future, while_wanted
from edge_server.requests import Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from edge_server.inference.registry import Lease, Snapshot
    from edge_server.lifecycle.lifecycle import ModelLifecycle
    from edge_server.lifecycle.model_spec import LoadedVersions, ModelSpec
    from edge_server.requests import InferRequest, InferResponse, Respond

log = logging.getLogger(__name__)


class IdleModels:
    """Unloads idle models and loads them again. Thread-safe, but for `unload_idle`. A model that
    cannot be loaded again stays idle, with the reason in the index, and its next request tries
    again.

    Args:
        hold: locks the models of these names against other loads.
        kept: names of models that stay in memory, with their members: those of cameras."""

    def __init__(
        self,
        lifecycle: ModelLifecycle,
        hold: Callable[[Collection[str]], AbstractContextManager[None]],
        load: Callable[[ModelSpec], LoadedVersions | LoadFailure],
        kept: Collection[str],
    ) -> None:
        self._lifecycle = lifecycle
        self._table = lifecycle.table
        self._hold = hold
        self._load = load
        self._kept = kept
        # What served at the last look, its requests until then, and since when there were no more.
        self._quiet: dict[str, tuple[LoadedVersions, int, float]] = {}
        self._lock = threading.Lock()
        self._loading: dict[str, Future[str]] = {}

    def unload_idle(self, now: float) -> None:
        """Unload what has been idle for its time; one thread calls this about every second. A model
        stays while a load or a canary of it, or of an ensemble that uses it, goes on, and while it
        stands in for a configuration that is being prepared."""
        quiet, self._quiet = self._quiet, {}
        due: list[LoadedVersions] = []
        with self._table.lock:
            servings = [
                serving
                for record in self._table
                if (serving := record.serving) and serving.model_spec.config.idle_unload_s
            ]
            busy = self._busy() if servings else ()
        for serving in servings:
            name, limit_s = serving.model_spec.name, _limit_s(serving)
            if name in busy or not limit_s or serving.idle:
                continue
            requests, before = _requests(serving), quiet.get(name)
            if before is None or before[:2] != (serving, requests) or _runs(serving):
                before = serving, requests, now
            self._quiet[name] = before
            if now - before[2] >= limit_s:
                due.append(serving)
        if due:
            self._unload(due)

    def _unload(self, due: Sequence[LoadedVersions]) -> None:
        with self._table.lock:
            busy, unloaded = self._busy(), []
            for serving in due:
                name = serving.model_spec.name
                if self._table.serving(name) is serving and name not in busy:
                    idle = tuple(self._idle(model) for model in serving.models)
                    self._table[name].serving = replace(serving, models=idle, idle=IDLE)
                    log.info("model %s: unloaded: no request for %g s", name, _limit_s(serving))
                    unloaded.append(name)
            self._table.publish(unloaded)

    def wake(self, name: str) -> str:
        """Load `name` if it is idle; return why it cannot be loaded, "" if it is loaded."""
        try:
            with self._hold([name]):
                return self.wake_held(name)
        except Unavailable as error:
            return str(error)

    def wake_held(self, name: str) -> str:
        """See `wake`; the caller holds the lock of the model."""
        idle = self._table.serving(name)
        if idle is None or not idle.idle:
            return ""
        with while_wanted(lambda: "the server ends" if self._table.over else ""):
            built = self._load(idle.model_spec)
        if not isinstance(built, LoadFailure):
            self._lifecycle.wake(idle, built)
            return ""
        log.error("model %s: idle, and cannot be loaded again: %s", name, built.reason)
        self._lifecycle.wake(
            idle, replace(idle, idle=f"{IDLE}; the last one failed: {built.reason}")
        )
        return f"model '{name}' was idle, and cannot be loaded again: {built.reason}"

    def _idle(self, model: LoadedModel) -> LoadedModel:
        scheduler = _Waking(partial(self._woken, model.name))
        return LoadedModel(model.config, model.version, scheduler, model.statistics)

    def _woken(self, name: str, request: InferRequest) -> Lease:
        """Wait until the model is loaded; return a lease on the models as they are then. Raises
        DeadlineExceeded or Cancelled of the request, while the load goes on; Unavailable where it
        fails."""
        with self._lock:
            loading = self._loading.get(name)
            if loading is None:
                loading = start_future(f"wake-{name}", partial(self._wake, name))
                if loading is None:
                    raise Unavailable(f"model '{name}' is idle: no thread is left that loads it")
                self._loading[name] = loading
        loaded: Reply[Future[str]] = Reply()
        loading.add_done_callback(lambda done: loaded(done, True))
        if why := loaded.wait(request).result():
            raise Unavailable(why)
        return self._table.registry.lease()

    def _wake(self, name: str) -> str:
        try:
            return self.wake(name)
        finally:
            with self._lock:
                del self._loading[name]

    def _busy(self) -> set[str]:
        busy = set(self._kept)
        for record in self._table:
            spec = record.spec
            stands_in = spec is not None and spec.instead_of is not None
            if record.canary is not None or record.coming is not None or stands_in:
                busy.add(record.name)
        for name in list(busy):
            for spec in self._table.get(name).specs:
                busy.update(self._table.below(spec))
        return busy


def _limit_s(serving: LoadedVersions) -> float:
    config = serving.model_spec.config
    if config.is_ensemble or not config.idle_unload_s:
        return 0.0
    # The state of a sequence is in memory until its own time is over.
    sequences = config.sequence_batching
    return max(
        config.idle_unload_s, 0.0 if sequences is None else sequences.max_sequence_idle_us / 1e6
    )


def _requests(serving: LoadedVersions) -> int:
    counts = [model.statistics.counts() for model in serving.models]
    return sum(each.success.count + each.fail.count for each in counts)


def _runs(serving: LoadedVersions) -> bool:
    return any(
        model.scheduler.pending() or model.scheduler.running_since() < inf
        for model in serving.models
    )


class _Waking(Scheduler):
    """The scheduler of an idle version: has it loaded for a request, which it passes on to the
    models as they are then."""

    def __init__(self, woken: Callable[[InferRequest], Lease]) -> None:
        self._woken = woken

    def infer(self, request: InferRequest, snapshot: Snapshot) -> InferResponse:
        del snapshot  # in which the version is idle
        with self._woken(request) as fresh:
            return _scheduler(request, fresh).infer(request, fresh)

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        """See `Scheduler.submit`; this returns once the model is loaded. Raises as `infer`."""
        del snapshot
        lease = self._woken(request)
        try:
            scheduler = _scheduler(request, lease.snapshot)
            scheduler.submit(request, lease.snapshot, Reply(lease, respond))
        except BaseException:
            lease.release()
            raise


def _scheduler(request: InferRequest, snapshot: Snapshot) -> Scheduler:
    loaded = snapshot.find(request.model_name, request.model_version)
    # A later version may have come.
    check_request(loaded.config, request)
    return loaded.scheduler
