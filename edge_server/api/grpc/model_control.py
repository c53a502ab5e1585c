"""RepositoryModelLoad and Unload: maps requests to `ModelControl`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edge_server.errors import InvalidRequest, Unavailable, Unsupported
from edge_server.inference.control import NOT_ALLOWED, path_in_model

if TYPE_CHECKING:
    from edge_server.inference.control import ModelControl
    from edge_server.requests import Cancellation


def load_model(
    control: ModelControl | None, request: Any, cancellation: Cancellation | None = None
) -> None:
    """Execute a `RepositoryModelLoadRequest`; returns after the load.

    Raises:
        EdgeServerError: see `ModelControl.load`, or the request is invalid (Triton's texts).
    """
    refuse_repository_name(request)
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in request.parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if key == "config":
            config = _typed(key, value, kind, "string_param")
        else:
            path = path_in_model(key)
            files[path] = _typed(key, value, kind, "bytes_param")
    name = request.model_name.strip()
    if not name:
        raise InvalidRequest("Model name cannot be empty. Please enter a valid name to deploy.")
    if name == ".." or "/" in name:
        raise InvalidRequest(
            f"invalid model name '{name}', model name must not contain path traversal characters"
        )
    if control is None:
        raise Unavailable(NOT_ALLOWED)
    if files and config is None:
        raise InvalidRequest("Load parameter 'config' must be specified for model file override")
    control.load(name, config=config, files=files, cancellation=cancellation)


def unload_model(control: ModelControl | None, request: Any) -> None:
    """Execute a `RepositoryModelUnloadRequest`; returns at once.

    Raises:
        EdgeServerError: see `ModelControl.unload`, or the request is invalid.
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
        raise Unavailable(NOT_ALLOWED)
    control.unload(request.model_name, unload_dependents=dependents)


def refuse_repository_name(request: Any) -> None:
    """Raises: Unsupported: the request names a repository."""
    if request.repository_name:
        raise Unsupported("'repository_name' specification is not supported")


def _typed(key: str, value: Any, kind: str | None, expected: str) -> Any:
    if kind != expected:
        raise InvalidRequest(f"invalid value type for load parameter '{key}', expected {expected}.")
    return getattr(value, kind)
