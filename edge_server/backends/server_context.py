"""What a model may use of the server that it is in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from edge_server.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.backends.contract import ModelResolver
    from edge_server.requests import InferRequest, Respond


class ServerContext(Protocol):
    """The other models, beyond those that a request sees, and what loads them."""

    @property
    def models(self) -> ModelResolver:
        """The models as they are at each moment."""
        ...

    def load(
        self, name: str, *, config: str | None, files: Mapping[str, bytes], within: str
    ) -> None:
        """Load or reload model `name`; returns when that is done.

        Args:
            config: a ModelConfig in protobuf's JSON form, instead of the one on disk.
            files: `file:<version>/<name>` → content, instead of the model's directory.
            within: the model that asks; it may be loading itself.

        Raises:
            EdgeServerError: it is not loaded; the texts are Triton's where it has one.
        """
        ...

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Let nobody new use model `name`; returns at once.

        Raises:
            EdgeServerError: the control mode does not allow it.
        """
        ...


class Alone:
    """ServerContext without another model, in which none can be loaded."""

    @property
    def models(self) -> Alone:
        return self

    def submit(self, request: InferRequest, respond: Respond) -> None:
        del respond
        raise NotFound(f"Request for unknown model: '{request.model_name}' is not found")

    def model_ready(self, name: str, version: str) -> bool:
        del name, version
        return False

    def load(
        self, name: str, *, config: str | None, files: Mapping[str, bytes], within: str
    ) -> None:
        del config, files, within
        raise Unavailable(f"model '{name}': there is no server here that could load it")

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        del unload_dependents
        raise Unavailable(f"model '{name}': there is no server here that could unload it")


STANDALONE = Alone()
