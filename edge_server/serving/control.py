"""What may be asked of the models' loading, whoever does it."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.serving.snapshot import ModelEntry

NO_FILES: Mapping[str, bytes] = MappingProxyType({})


class ModelControl(Protocol):
    """Loads and unloads models on request, where the control mode allows it."""

    def load(
        self, name: str, *, config: str | None = None, files: Mapping[str, bytes] = NO_FILES
    ) -> None:
        """Load or reload `name` and what it depends on; returns when that is done.

        Args:
            config: a ModelConfig in protobuf's JSON form, instead of the one on disk.
            files: `<version>/<name>` → content, instead of the model's directory; with `config`.

        Raises:
            Unavailable: the control mode does not allow it.
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
