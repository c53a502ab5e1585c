"""The part of the server that a model may use: the other models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from edge_server.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.requests import InferRequest, Respond


class ModelResolver(Protocol):
    """The other loaded models, as one request may use them."""

    def submit(self, request: InferRequest, respond: Respond) -> None:
        """Submit a request to another model; `respond` is called before or after this returns.

        Raises:
            EdgeServerError: the request is refused; `respond` is not called.
        """
        ...

    def model_ready(self, name: str, version: str) -> bool:
        """Return whether that version of the model is ready.

        Raises:
            InvalidRequest: `version` is not a version number.
        """
        ...


class ServerContext(Protocol):
    """The other models, including those that a request does not pin, and the means to load them."""

    @property
    def models(self) -> ModelResolver:
        """The models as they are at the moment of each call."""
        ...

    def load(
        self, name: str, *, config: str | None, files: Mapping[str, bytes], within: str
    ) -> None:
        """Load or reload model `name`; return when the load is complete.

        Args:
            name: the model to load.
            config: a ModelConfig in protobuf's JSON form, instead of the one on disk.
            files: `file:<version>/<name>` → content, instead of the model's directory.
            within: the calling model, which may itself be loading.

        Raises:
            EdgeServerError: the load failed; the text is Triton's where Triton has one.
        """
        ...

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Stop new requests to model `name`; return at once.

        Args:
            name: the model to unload.
            unload_dependents: also unload the models that `name` depends on.

        Raises:
            EdgeServerError: the control mode does not allow unloading.
        """
        ...


class Alone:
    """A ServerContext with no other models, in which no model can be loaded."""

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
