"""DataPlane: the one door to the models, for cameras and clients alike; and loads on request."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Protocol

from edge_server.backends.contract import interrupt
from edge_server.errors import InvalidRequest, Unavailable
from edge_server.inference.registry import UNLOADED, ModelState
from edge_server.requests import Reply

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.inference.registry import Lease, LoadedModel, ModelEntry, ModelRegistry
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import Cancellation, InferRequest, InferResponse, Respond

log = logging.getLogger(__name__)

# For a vehicle, a model whose run takes longer than this hangs.
MODEL_STUCK_S = 60.0
# A run that is ended has ended after this; and so long after its instance was taken it began.
ENDS_S = 5.0


@dataclass(frozen=True)
class ModelMetadata:
    config: ModelConfig
    versions: tuple[int, ...]


class DataPlane:
    """Runs requests on the models of the registry; knows no transport. With `strict_readiness` the
    server is ready only while every desired model is READY."""

    def __init__(self, registry: ModelRegistry, *, strict_readiness: bool = True) -> None:
        self._registry = registry
        self.lease = registry.lease
        self._strict_readiness = strict_readiness
        self._open = False

    def infer(self, request: InferRequest) -> InferResponse:
        with self.lease() as snapshot:
            return snapshot.infer(request)

    def submit(self, request: InferRequest, respond: Respond, lease: Lease | None = None) -> None:
        """Start one request; `respond` gets its responses, now or later (see `Snapshot.submit`).
        The request holds its lease until its last response: `lease`, which this call ends in every
        case, or one on the current snapshot."""
        lease = lease or self.lease()

        try:
            lease.snapshot.submit(request, Reply(lease, respond))
        except BaseException:
            lease.release()
            raise

    def find(self, name: str, version: str) -> LoadedModel:
        """`Snapshot.find` without a lease: the registry may close the model at any time."""
        return self._registry.snapshot.find(name, version)

    def oldest_run(self) -> tuple[str, float]:
        """The model with the oldest unfinished run, also of a replaced one, and when that began
        (`time.monotonic()`; infinity where nothing runs).
        """
        runs = [
            (loaded.scheduler.running_since(), loaded.config.name)
            for loaded in self._registry.models_in_use()
        ]
        since, name = min(runs, default=(inf, ""))
        return name, since

    def end_runs(self, since: float) -> bool:
        """End the runs that began at `since`, as `oldest_run` returns it; their requests get an
        error. False where the backend of one of them cannot do that."""
        hanging = [
            loaded
            for loaded in self._registry.models_in_use()
            if loaded.scheduler.running_since() <= since
        ]
        before = min(time.monotonic(), since + ENDS_S)
        return all(interrupt(loaded.model, before) for loaded in hanging)

    def open(self) -> None:
        self._open = True

    def shut(self) -> None:
        """Report the server as not ready from now on; requests are still accepted and run."""
        self._open = False

    def server_live(self) -> bool:
        """False where no repository could be read at the start, until a model is loaded."""
        return not self._registry.failed_start

    def server_ready(self) -> bool:
        """Whether the daemon has started, is live, and is not stopping; under strict readiness also
        that no first load is pending or failed.
        """
        is_open = self._open and self.server_live()
        if not self._strict_readiness:
            return is_open
        entries = self._registry.snapshot.entries.values()
        return is_open and not any(_keeps_waiting(entry) for entry in entries)

    def model_ready(self, name: str, version: str) -> bool:
        return self._registry.snapshot.model_ready(name, version)

    def metadata(self, name: str, version: str) -> ModelMetadata:
        snapshot = self._registry.snapshot
        loaded = snapshot.find(name, version)
        versions = (loaded.version,) if version else tuple(snapshot.ready_versions(name))
        return ModelMetadata(loaded.config, versions)

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        return self._registry.snapshot.index(only_ready=only_ready)


def _keeps_waiting(entry: ModelEntry) -> bool:
    if entry.state is ModelState.UNAVAILABLE:
        return entry.reason != UNLOADED and not entry.is_idle
    return entry.state is ModelState.LOADING


# Triton's text for every mode without loads on request, polling or not.
NOT_ALLOWED = "explicit model load / unload is not allowed if polling is enabled"
_FILE = "file:"


@dataclass(frozen=True)
class LoadOptions:
    """What a request to load a model asks for beside its name.

    Attributes:
        config: a ModelConfig in protobuf's JSON form, instead of the one on disk.
        files: `<version>/<name>` → content, instead of the model's directory; with `config`.
        within: the model that makes the request, which may itself be loading; empty of a client.
        cancellation: ends the wait for another load; a load that has begun goes on."""

    config: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    within: str = ""
    cancellation: Cancellation | None = None


PLAIN_LOAD = LoadOptions()


class ModelControl(Protocol):
    """Loads and unloads models on request, where the control mode allows it."""

    @property
    def loads_on_request(self) -> bool: ...

    def load(self, name: str, options: LoadOptions = PLAIN_LOAD) -> None:
        """Load or reload `name` and its dependencies; returns when they are loaded. Raises Triton's
        texts; Cancelled before its load began; Unavailable where the mode does not allow it, or it
        would wait for itself."""
        ...

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Refuse new requests for `name`; requests in flight finish. Raises Unavailable as
        `load`."""
        ...

    def index(self, *, only_ready: bool) -> list[ModelEntry]: ...


class BoundedControl:
    """A `ModelControl` for callers that hold a thread while they wait: at most `loads` of them, so
    that threads remain for all other calls.
    """

    def __init__(self, control: ModelControl, loads: int) -> None:
        self._control = control
        self._loads = loads
        self._places = threading.Semaphore(loads)

    @property
    def loads_on_request(self) -> bool:
        return self._control.loads_on_request

    def load(self, name: str, options: LoadOptions = PLAIN_LOAD) -> None:
        """Raises: Unavailable: the limit of concurrent loads is reached."""
        if not self._places.acquire(blocking=False):
            raise Unavailable(
                f"{self._loads} model loads are under way already; request '{name}' again when "
                "one of them is done"
            )
        try:
            self._control.load(name, options)
        finally:
            self._places.release()

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        self._control.unload(name, unload_dependents=unload_dependents)

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        return self._control.index(only_ready=only_ready)


class LiveModels:
    """The `ServerContext` of the models in a registry, whose `control` is set after they have their
    context. `[grpc] control` confines clients, not models: the operator put their code into the
    repository."""

    def __init__(self, registry: ModelRegistry) -> None:
        self.models = DataPlane(registry)
        self.control: ModelControl | None = None

    def load(
        self, name: str, *, config: str | None, files: Mapping[str, bytes], within: str
    ) -> None:
        contents = {path_in_model(key): content for key, content in files.items()}
        self._required().load(name, LoadOptions(config, contents, within))

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        self._required().unload(name, unload_dependents=unload_dependents)

    def _required(self) -> ModelControl:
        if self.control is None:
            raise Unavailable(NOT_ALLOWED)
        return self.control


def path_in_model(key: str) -> str:
    """Return the path that the load parameter `file:<path>` names, which may lead anywhere; raise
    InvalidRequest for another parameter (Triton's text).
    """
    if not key.startswith(_FILE):
        raise InvalidRequest(f"unrecognized load parameter '{key}'.")
    return key.removeprefix(_FILE)
