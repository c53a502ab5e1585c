"""What may be asked of the models' loading, whoever does it."""

from __future__ import annotations

import posixpath
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from edge_server.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.inference.snapshot import ModelEntry
    from edge_server.requests import Cancellation

NO_FILES: Mapping[str, bytes] = MappingProxyType({})
# Triton's text wherever models are not loaded on request, be it polling or not.
NOT_ALLOWED = "explicit model load / unload is not allowed if polling is enabled"
_FILE = "file:"
# Of a file's path in a model's directory, which is `<version>/<name>`; a file system takes 255
# bytes of each name.
_LONGEST_PATH_BYTES = 255


class ModelControl(Protocol):
    """Loads and unloads models on request, where the control mode allows it."""

    def load(
        self,
        name: str,
        *,
        config: str | None = None,
        files: Mapping[str, bytes] = NO_FILES,
        within: str = "",
        cancellation: Cancellation | None = None,
    ) -> None:
        """Load or reload `name` and what it depends on; returns when that is done.

        Args:
            config: a ModelConfig in protobuf's JSON form, instead of the one on disk.
            files: `<version>/<name>` → content, instead of the model's directory; with `config`.
            within: the model that asks. It may be loading itself, so what would wait for that is
                refused; empty where no model asks.
            cancellation: of the request; a load that waits for another one is given up once its
                request is cancelled, one that has begun goes on.

        Raises:
            Cancelled: the request was cancelled before its load began.
            Unavailable: the control mode does not allow it, or it would wait for itself.
            NotFound, ModelConfigError, InvalidRequest, InternalError: Triton's texts.
        """
        ...

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Let nobody new use `name`; returns at once, requests in flight finish.

        Raises:
            Unavailable: the control mode does not allow it.
        """
        ...

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        """Every model version that is known, sorted by name and version."""
        ...


def path_in_model(key: str) -> str:
    """The path within a model's directory that the load parameter `file:<path>` names.

    Raises:
        InvalidRequest: it is no such parameter, or leaves the directory (Triton's texts).
    """
    if not key.startswith(_FILE):
        raise InvalidRequest(f"unrecognized load parameter '{key}'.")
    path = posixpath.normpath(key.removeprefix(_FILE))
    if path in (".", "..") or path.startswith(("../", "/")) or "\0" in path:
        raise InvalidRequest(
            f"Invalid file parameter '{key}' with normalized path '{path}' must stay within model "
            "directory."
        )
    if len(path.encode()) > _LONGEST_PATH_BYTES:
        raise InvalidRequest(
            f"Invalid file parameter '{key[:64]}...': the path has {len(path.encode())} bytes, "
            f"{_LONGEST_PATH_BYTES} at most"
        )
    return path
