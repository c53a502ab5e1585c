"""The loaded models for the models' own code: infer, load and unload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.errors import Unavailable
from edge_server.inference.control import NOT_ALLOWED, path_in_model
from edge_server.inference.data_plane import DataPlane

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.inference.control import ModelControl
    from edge_server.inference.registry import ModelRegistry


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
        found = {path_in_model(key): content for key, content in files.items()}
        self._required().load(name, config=config, files=found, within=within)

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        """See `ServerContext.unload`."""
        self._required().unload(name, unload_dependents=unload_dependents)

    def _required(self) -> ModelControl:
        if self.control is None:
            raise Unavailable(NOT_ALLOWED)
        return self.control
