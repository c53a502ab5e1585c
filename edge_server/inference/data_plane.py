"""DataPlane: the one door to the models, for cameras and clients alike."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.inference.response_future import ResponseFuture
from edge_server.inference.snapshot import UNLOADED, ModelState

if TYPE_CHECKING:
    from edge_server.inference.registry import ModelRegistry
    from edge_server.inference.snapshot import LoadedModel, ModelEntry
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import InferRequest, InferResponse, Respond, ResponseCallback

log = logging.getLogger(__name__)

# A model that computes for longer than this hangs, as far as a vehicle is concerned.
MODEL_STUCK_S = 60.0


@dataclass(frozen=True)
class ModelMetadata:
    """The metadata of a model for clients; `versions` are those that are ready."""

    config: ModelConfig
    versions: tuple[int, ...]


class DataPlane:
    """Answers requests from the registry; knows no transport.

    Args:
        strict_readiness: the server is ready only with every model that was asked for.
    """

    def __init__(self, registry: ModelRegistry, *, strict_readiness: bool = True) -> None:
        self._registry = registry
        self._strict_readiness = strict_readiness
        self._open = False

    def infer(self, request: InferRequest) -> InferResponse:
        """Run one request in one world and wait for its one answer.

        Raises:
            EdgeServerError: as `submit` says, or that was the answer.
            DeadlineExceeded, Cancelled: nobody waits for it any more.
        """
        pending = ResponseFuture()
        self.submit(request, pending)
        return pending.wait(request)

    def submit(self, request: InferRequest, respond: Respond) -> None:
        """Start one request; `respond` hears its answers, now or later (see `Scheduler.submit`).

        The snapshot leased here serves it to its end. What `respond` raises is logged and goes no
        further: it is not the model's, nor that of other callers.

        Raises:
            NotFound, Unavailable, InvalidRequest: see `Snapshot.submit`; `respond` hears nothing.
        """
        lease = self._registry.lease()

        def pass_on(answer: ResponseCallback, final: bool) -> None:
            if final:
                lease.release()
            try:
                respond(answer, final)
            except Exception:
                log.exception("model %s: a response could not be given", request.model_name)

        try:
            lease.snapshot.submit(request, pass_on)
        except BaseException:
            lease.release()
            raise

    def find(self, name: str, version: str) -> LoadedModel:
        """The model as it is loaded now, to look at; it may be gone in the next moment.

        Raises:
            NotFound, Unavailable, InvalidRequest: see `Snapshot.find`.
        """
        return self._registry.snapshot.find(name, version)

    def longest_run(self, now: float) -> tuple[str, float]:
        """The model whose oldest run has not ended, and how long it takes by `now`, in s.

        Models that were replaced while something runs on them are among them.
        """
        runs = [
            (loaded.scheduler.longest_run_s(now), loaded.name)
            for loaded in self._registry.models_in_use()
        ]
        longest_s, name = max(runs, default=(0.0, ""))
        return name, longest_s

    def open(self) -> None:
        """From now on the server may call itself ready."""
        self._open = True

    def shut(self) -> None:
        """Not ready from now on; who still asks is still answered."""
        self._open = False

    def server_ready(self) -> bool:
        """Started, not stopping, and no model loads for the first time or failed to.

        What was unloaded, or is being, is nobody's wish any more.
        """
        if not self._strict_readiness:
            return self._open
        entries = self._registry.snapshot.entries.values()
        return self._open and not any(_keeps_waiting(entry) for entry in entries)

    def model_ready(self, name: str, version: str) -> bool:
        """See `Snapshot.model_ready`."""
        return self._registry.snapshot.model_ready(name, version)

    def metadata(self, name: str, version: str) -> ModelMetadata:
        """Raises: NotFound, Unavailable, InvalidRequest: see `Snapshot.find`."""
        snapshot = self._registry.snapshot
        loaded = snapshot.find(name, version)
        versions = (loaded.version,) if version else tuple(snapshot.ready_versions(name))
        return ModelMetadata(loaded.config, versions)

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        """Every model version that the registry knows, sorted by name and version."""
        entries = self._registry.snapshot.entries
        return [
            entry
            for _, entry in sorted(entries.items())
            if entry.state is ModelState.READY or not only_ready
        ]


def _keeps_waiting(entry: ModelEntry) -> bool:
    if entry.state is ModelState.UNAVAILABLE:
        return entry.reason != UNLOADED
    return entry.state is ModelState.LOADING
