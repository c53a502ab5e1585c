"""All metrics as text. This and what it imports is loaded when somebody first asks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from edge_server.http_api.appliance_metrics import ApplianceMetrics
from edge_server.http_api.custom_metrics import CustomMetrics
from edge_server.http_api.model_metrics import ModelMetrics

if TYPE_CHECKING:
    from edge_server.http_api.sources import Sources

# prometheus_client can name a counter without `_total` only where it does not know it for one.
_UNTYPED = re.compile(rb"^(# TYPE [\w:]+) untyped$", re.MULTILINE)


class Exposition:
    """Writes the metrics as they are now, in the format that the asker prefers."""

    def __init__(self, sources: Sources) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(ModelMetrics(sources))
        self._registry.register(ApplianceMetrics(sources))
        self._registry.register(CustomMetrics(sources))
        ProcessCollector(registry=self._registry)

    def write(self, accept: str) -> tuple[bytes, str]:
        """The text and its content type, for the `Accept` header of a request."""
        encode, content_type = choose_encoder(accept)
        text = encode(self._registry)
        if content_type.startswith("text/plain"):
            text = _UNTYPED.sub(rb"\1 counter", text)
        return text, content_type
