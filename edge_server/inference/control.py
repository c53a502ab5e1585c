"""Loads and unloads of models on request: of clients, and of the models' own code."""

from __future__ import annotations

import posixpath
import threading
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from edge_server.errors import InvalidRequest, Unavailable
from edge_server.inference.data_plane import DataPlane

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.inference.registry import ModelRegistry
    from edge_server.inference.snapshot import ModelEntry
    from edge_server.requests import Cancellation

NO_FILES: Mapping[str, bytes] = MappingProxyType({})
# Triton's text for every mode without loads on request, polling or not.
NOT_ALLOWED = "explicit model load / unload is not allowed if polling is enabled"
_FILE = "file:"


class ModelControl(Protocol):
    """Loads and unloads models on request, where the control mode allows it."""

    @property
    def loads_on_request(self) -> bool:
        """Whether it does."""
        ...

    def load(
        self,
        name: str,
        *,
        config: str | None = None,
        files: Mapping[str, bytes] = NO_FILES,
        within: str = "",
        cancellation: Cancellation | None = None,
    ) -> None:
        """Load or reload `name` and its dependencies; returns when they are loaded.

        Args:
            config: a ModelConfig in protobuf's JSON form, instead of the one on disk.
            files: `<version>/<name>` → content, instead of the model's directory; with `config`.
            within: the model that makes the request; empty where a client does. That model may be
                loading itself, so a load that would wait for it is refused.
            cancellation: of the request; a load that waits for another one is given up once its
                request is cancelled, a load that has begun goes on.

        Raises:
            Cancelled: the request was cancelled before its load began.
            Unavailable: the control mode does not allow the load, or it would wait for itself.
            NotFound, ModelConfigError, InvalidRequest, InternalError: Triton's texts.
        """
        ...

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Refuse new requests for `name`; returns at once, requests in flight finish.

        Raises:
            Unavailable: the control mode does not allow the unload.
        """
        ...

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        """Return every known model version, sorted by name and version."""
        ...


class BoundedControl:
    """A `ModelControl` for callers that hold a thread while they wait.

    At most `loads` callers wait for a load; the next is refused at once, so that threads remain
    for all other calls.
    """

    def __init__(self, control: ModelControl, loads: int) -> None:
        self._control = control
        self._loads = loads
        self._places = threading.Semaphore(loads)

    @property
    def loads_on_request(self) -> bool:
        """See `ModelControl.loads_on_request`."""
        return self._control.loads_on_request

    def load(
        self,
        name: str,
        *,
        config: str | None = None,
        files: Mapping[str, bytes] = NO_FILES,
        within: str = "",
        cancellation: Cancellation | None = None,
    ) -> None:
        """See `ModelControl.load`.

        Raises:
            Unavailable: the limit of concurrent loads is reached.
        """
        if not self._places.acquire(blocking=False):
            raise Unavailable(
                f"{self._loads} model loads are under way already; request '{name}' again when "
                "one of them is done"
            )
        try:
            self._control.load(
                name, config=config, files=files, within=within, cancellation=cancellation
            )
        finally:
            self._places.release()

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """See `ModelControl.unload`."""
        self._control.unload(name, unload_dependents=unload_dependents)

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        """See `ModelControl.index`."""
        return self._control.index(only_ready=only_ready)


class LiveModels:
    """The `ServerContext` of the models in a registry.

    `[grpc] control` confines clients, not models, to the Unix socket: the operator of the server
    put a model's code into the repository, so the code may load models wherever the mode allows.

    Attributes:
        models: each request runs in the snapshot of the moment in which it is made.
        control: loads the models; set after the models have their context, and until then no load
            on request is possible.
    """

    def __init__(self, registry: ModelRegistry) -> None:
        self.models = DataPlane(registry)
        self.control: ModelControl | None = None

    def load(
        self, name: str, *, config: str | None, files: Mapping[str, bytes], within: str
    ) -> None:
        """See `ServerContext.load`."""
        contents = {path_in_model(key): content for key, content in files.items()}
        self._required().load(name, config=config, files=contents, within=within)

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        """See `ServerContext.unload`."""
        self._required().unload(name, unload_dependents=unload_dependents)

    def _required(self) -> ModelControl:
        if self.control is None:
            raise Unavailable(NOT_ALLOWED)
        return self.control


def path_in_model(key: str) -> str:
    """Return the path within a model's directory that the load parameter `file:<path>` names.

    Raises:
        InvalidRequest: `key` is no such parameter, or leaves the directory (Triton's texts).
    """
    if not key.startswith(_FILE):
        raise InvalidRequest(f"unrecognized load parameter '{key}'.")
    path = posixpath.normpath(key.removeprefix(_FILE))
    if path in (".", "..") or path.startswith(("../", "/")) or "\0" in path:
        raise InvalidRequest(
            f"Invalid file parameter '{key}' with normalized path '{path}' must stay within model "
            "directory."
        )
    return path
