"""The models as they are now, for the models themselves: to ask, to load and to unload."""

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
    """The `Surroundings` of the models in a registry.

    What `[grpc] control` confines to the Unix socket is what clients may; a model's code was put
    into the repository by whoever runs the server, so it may load models wherever the mode allows.

    Attributes:
        models: each request sees the world of the moment in which it is made.
        control: what loads them; it is made after what it loads has its surroundings, and till
            then nothing can be loaded on request.
    """

    def __init__(self, registry: ModelRegistry) -> None:
        self.models = DataPlane(registry)
        self.control: ModelControl | None = None

    def load(
        self, name: str, *, config: str | None, files: Mapping[str, bytes], within: str
    ) -> None:
        """See `Surroundings.load`."""
        found = {path_in_model(key): content for key, content in files.items()}
        self._required().load(name, config=config, files=found, within=within)

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        """See `Surroundings.unload`."""
        self._required().unload(name, unload_dependents=unload_dependents)

    def _required(self) -> ModelControl:
        if self.control is None:
            raise Unavailable(NOT_ALLOWED)
        return self.control
