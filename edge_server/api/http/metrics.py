"""The routes of the metrics."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING

from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from edge_server.api.http.exposition import Exposition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from edge_server.api.http.sources import Sources

log = logging.getLogger(__name__)


def metrics_routes(sources: Sources) -> Sequence[BaseRoute]:
    """Return `GET /metrics`, as Prometheus reads it."""
    exposition: Exposition | None = None
    # Shares of time since the last scrape are of one scrape at a time.
    one_at_a_time = threading.Lock()

    def write(accept: str) -> tuple[bytes, str]:
        nonlocal exposition
        with one_at_a_time:
            # Registering reads all numbers, which may fail now and not the next time.
            exposition = exposition or Exposition(sources)
            return exposition.write(accept)

    async def metrics(request: Request) -> Response:
        try:
            body, kind = await asyncio.to_thread(write, request.headers.get("accept", ""))
        except Exception:
            # A fault in the metrics must not stop the appliance.
            log.exception("metrics: cannot be collected")
            return PlainTextResponse("Internal Server Error\n", 500)
        return Response(body, headers={"content-type": kind})

    return [Route("/metrics", metrics)]


def metrics_alone(sources: Sources) -> Sequence[BaseRoute]:
    """Return `metrics_routes`, for a listener that serves nothing else."""

    async def nothing_else(_: Request) -> Response:
        return PlainTextResponse("Not Found: the metrics are at /metrics\n", 404)

    return [*metrics_routes(sources), Route("/{path:path}", nothing_else)]
