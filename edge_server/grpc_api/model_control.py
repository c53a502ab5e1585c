"""RepositoryModelLoad and Unload: what a request asks of `ModelControl`."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any

from edge_server.errors import InvalidRequest, Unavailable, Unsupported

if TYPE_CHECKING:
    from edge_server.serving.control import ModelControl

# Triton's text wherever models are not loaded on request, be it polling or not.
_NOT_ALLOWED = "explicit model load / unload is not allowed if polling is enabled"
_FILE = "file:"


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
