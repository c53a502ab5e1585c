"""RepositoryModelLoad and Unload: what a request asks of `ModelControl`."""

from __future__ import annotations

import posixpath
import threading
from typing import TYPE_CHECKING, Any

from edge_server.errors import InvalidRequest, Unavailable, Unsupported
from edge_server.serving.control import NO_FILES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.serving.control import ModelControl
    from edge_server.serving.snapshot import ModelEntry

# Triton's text wherever models are not loaded on request, be it polling or not.
_NOT_ALLOWED = "explicit model load / unload is not allowed if polling is enabled"
_FILE = "file:"


class BoundedControl:
    """A `ModelControl` for callers that hold a thread of a server while they wait.

    As many as `loads` may wait for a load; the next is refused at once, so that some threads are
    left to tell how the server is.
    """

    def __init__(self, control: ModelControl, loads: int) -> None:
        self._control = control
        self._loads = loads
        self._places = threading.Semaphore(loads)

    def load(
        self, name: str, *, config: str | None = None, files: Mapping[str, bytes] = NO_FILES
    ) -> None:
        """See `ModelControl.load`.

        Raises:
            Unavailable: as many loads as may be are under way.
        """
        if not self._places.acquire(blocking=False):
            raise Unavailable(
                f"{self._loads} model loads are under way already; ask for '{name}' again when "
                "one of them is done"
            )
        try:
            self._control.load(name, config=config, files=files)
        finally:
            self._places.release()

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """See `ModelControl.unload`."""
        self._control.unload(name, unload_dependents=unload_dependents)

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        """See `ModelControl.index`."""
        return self._control.index(only_ready=only_ready)


def load_model(control: ModelControl | None, request: Any) -> None:
    """Do what a `RepositoryModelLoadRequest` asks for; returns when it is done.

    Raises:
        EdgeServerError: see `ModelControl.load`, or the request makes no sense (Triton's texts).
    """
    refuse_repository_name(request)
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in request.parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if key == "config":
            config = _typed(key, value, kind, "string_param")
        elif key.startswith(_FILE):
            files[_inside(key)] = _typed(key, value, kind, "bytes_param")
        else:
            raise InvalidRequest(f"unrecognized load parameter '{key}'.")
    name = request.model_name.strip()
    if not name:
        raise InvalidRequest("Model name cannot be empty. Please enter a valid name to deploy.")
    if name == ".." or "/" in name:
        raise InvalidRequest(
            f"invalid model name '{name}', model name must not contain path traversal characters"
        )
    if control is None:
        raise Unavailable(_NOT_ALLOWED)
    if files and config is None:
        raise InvalidRequest("Load parameter 'config' must be specified for model file override")
    control.load(name, config=config, files=files)


def unload_model(control: ModelControl | None, request: Any) -> None:
    """Do what a `RepositoryModelUnloadRequest` asks for; returns at once.

    Raises:
        EdgeServerError: see `ModelControl.unload`, or the request makes no sense.
    """
    refuse_repository_name(request)
    dependents = False
    if "unload_dependents" in request.parameters:
        value = request.parameters["unload_dependents"]
        if value.WhichOneof("parameter_choice") != "bool_param":
            raise InvalidRequest(
                "invalid value type for 'unload_dependents' parameter, expected bool_param."
            )
        dependents = value.bool_param
    if control is None:
        raise Unavailable(_NOT_ALLOWED)
    control.unload(request.model_name, unload_dependents=dependents)


def refuse_repository_name(request: Any) -> None:
    """Raises: Unsupported: the request names a repository."""
    if request.repository_name:
        raise Unsupported("'repository_name' specification is not supported")


def _typed(key: str, value: Any, kind: str | None, expected: str) -> Any:
    if kind != expected:
        raise InvalidRequest(f"invalid value type for load parameter '{key}', expected {expected}.")
    return getattr(value, kind)


def _inside(key: str) -> str:
    """The path that `file:<path>` names, within the model's directory."""
    path = posixpath.normpath(key.removeprefix(_FILE))
    if path in (".", "..") or path.startswith(("../", "/")) or "\0" in path:
        raise InvalidRequest(
            f"Invalid file parameter '{key}' with normalized path '{path}' must stay within model "
            "directory."
        )
    return path
