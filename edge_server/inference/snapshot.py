"""One immutable world of models: what is loaded at a moment, and how a request runs in it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from edge_server.errors import InvalidRequest, NotFound, Unavailable
from edge_server.inference.ref_count import RefCount
from edge_server.inference.request_check import check_request
from edge_server.inference.response_future import ResponseFuture

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from edge_server.backends.contract import Model, ModelMetric
    from edge_server.inference.statistics import ModelStatistics
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import InferRequest, InferResponse, Respond


_VERSION = re.compile(r"-?[0-9]{1,18}\Z")

# Why a model is UNAVAILABLE that was unloaded: Triton's word, which no readiness counts.
UNLOADED = "unloaded"


class ModelState(Enum):
    """Where a model version is in its life; the values are the protocol's.

    UNKNOWN is a model on disk that was never loaded: of it the protocol tells the name only.
    """

    UNKNOWN = ""
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class Scheduler(Protocol):
    """Answers checked requests of one loaded model version."""

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        """Take `request`; `respond` hears each of its answers, the last one marked as such.

        It may hear them before this returns (the caller's thread runs the model) or after (the
        request waits in a queue); in either case it hears the last one.

        Args:
            snapshot: the world that the request's lease pinned.
        """
        ...

    def pending(self) -> int:
        """How many requests wait for an instance."""
        ...

    def longest_run_s(self, now: float) -> float:
        """How long the oldest run that has not ended takes by `now` (`time.monotonic()`)."""
        ...

    def close(self) -> None:
        """Release the instances; nothing is running any more."""
        ...


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """One model version that can answer.

    Attributes:
        model: what the scheduler's instances are of; an ensemble has none.
        after_close: called once all that it holds is released.
        load_s: how long it took until it could answer.
        scheduler_uses, model_uses: of those that share them; the last one closes.
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
        """Another of the same scheduler and model, to be closed too; None where this is closed.

        Args:
            config: what is said of it; the instances are those that there are.
        """
        if not self.scheduler_uses.more():
            return None
        # Whoever has the scheduler has the model.
        self.model_uses.more()
        return replace(self, config=config)

    def not_ready_reason(self) -> str:
        """Why it cannot answer at this moment; empty where it can."""
        return "" if self.model is None else self.model.not_ready_reason()

    def metrics(self) -> Sequence[ModelMetric]:
        """What the model measures of its own accord."""
        return () if self.model is None else self.model.metrics()

    def close(self) -> None:
        """Release what it holds and nobody else uses; nothing of it is running any more."""
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
    """What the registry says of one model version.

    Attributes:
        version: 0 where the model failed before a version could be told.
        reason: why it is in this state, or what its load is at; of a READY one, why it could not
            be loaded anew, or what the load of its successor is at.
        loaded: present when READY.
        may_pass: of an UNAVAILABLE one: its files are not known to be at fault, so that the next
            try may succeed.
    """

    name: str
    version: int
    state: ModelState
    reason: str = ""
    loaded: LoadedModel | None = None
    may_pass: bool = False


class RetainedSnapshot(Protocol):
    """A right to go on using the models of a snapshot."""

    def release(self) -> None:
        """To be called once."""
        ...


class Snapshot:
    """All entries at one moment. Immutable; safe to read from any thread.

    Args:
        keep: takes a lease of its own on this snapshot; None where nobody closes its models.
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
        # The highest version that is ready, by name.
        self._latest = {e.name: e.loaded for _, e in sorted(self.entries.items()) if e.loaded}

    def submit(self, request: InferRequest, respond: Respond) -> None:
        """Find the model, check the request against it, give it to its scheduler.

        Raises:
            NotFound, Unavailable, InvalidRequest: as `find` and the request check say; then
                `respond` hears nothing.
        """
        loaded = self.find(request.model_name, request.model_version)
        check_request(loaded.config, request)
        trace = request.trace
        if trace is None:
            loaded.scheduler.submit(request, self, respond)
            return
        try:
            loaded.scheduler.submit(request, self, trace.begin(loaded.version, respond))
        except BaseException:
            trace.end()
            raise

    def infer(self, request: InferRequest) -> InferResponse:
        """`submit`, and wait for the one answer.

        Raises:
            EdgeServerError: as `submit` says, or that was the answer.
        """
        pending = ResponseFuture()
        self.submit(request, pending)
        return pending.wait(request)

    def retain(self) -> RetainedSnapshot | None:
        """Keep its models open beyond the lease that the caller runs under."""
        return None if self._keep is None else self._keep(self)

    def find(self, name: str, version: str = "") -> LoadedModel:
        """The loaded model; an empty version is the highest that is ready.

        Raises:
            NotFound: no such model or version, or none of its versions is ready.
            Unavailable: that very version exists but is not ready.
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
        """Whether that model can answer; an unknown one is not ready, which is no error.

        Raises:
            InvalidRequest: `version` is not a version number.
        """
        try:
            return not self.find(name, version).not_ready_reason()
        except (NotFound, Unavailable):
            return False

    def ready_versions(self, name: str) -> list[int]:
        return [v for v, entry in self._by_name.get(name, {}).items() if entry.loaded]


def parse_version(text: str) -> int:
    """A version as the protocol spells it: decimal digits, no more than fit 64 bits.

    Raises:
        InvalidRequest: not an integral value > 0 (Triton's texts).
    """
    if not _VERSION.match(text):
        raise InvalidRequest(
            f"failed to get model version from specified version string '{text[:32]}' (details: "
            "stol), version should be an integral value > 0"
        )
    if text.startswith(("-", "0")):
        raise InvalidRequest(
            f"invalid model version specified '{text}' , version should be an integral value > 0"
        )
    return int(text)
