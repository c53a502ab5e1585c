"""What is served at which address of HTTP.

A topic's module has a function that returns its routes; it is imported here when the first client
connects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.api.http.server import HttpListener

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.routing import BaseRoute

    from edge_server.api.http.page.state import PageSources
    from edge_server.api.http.rest.api import RestApi
    from edge_server.api.http.sources import Sources
    from edge_server.settings import Settings


def http_listeners(
    settings: Settings, rest: RestApi, sources: Sources, page: PageSources
) -> Sequence[HttpListener]:
    """Return the listeners of `[http]` and `[metrics]`."""
    http, metrics = settings.http, settings.metrics

    def everything() -> Sequence[BaseRoute]:
        from edge_server.api.http.metrics import metrics_routes  # noqa: PLC0415 - at first use
        from edge_server.api.http.page.routes import page_routes  # noqa: PLC0415 - likewise
        from edge_server.api.http.rest.routes import rest_routes  # noqa: PLC0415 - likewise

        return [
            *rest_routes(rest),
            *page_routes(page),
            *(metrics_routes(sources, rest.rules) if metrics.enabled else ()),
        ]

    def metrics_only() -> Sequence[BaseRoute]:
        from edge_server.api.http.metrics import metrics_alone  # noqa: PLC0415 - at first use

        return metrics_alone(sources)

    listeners = []
    if http.enabled:
        listeners.append(HttpListener("http", http.host, http.port, everything, http.tls, http))
    if metrics.enabled:
        listeners.append(HttpListener("metrics", metrics.host, metrics.port, metrics_only))
    return listeners
