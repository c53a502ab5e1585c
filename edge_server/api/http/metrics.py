"""The routes of the metrics."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from edge_server.api.access import METRICS
from edge_server.api.http.exposition import Exposition
from edge_server.api.statuses import http_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from edge_server.api.access import AccessRules
    from edge_server.api.http.sources import Sources

log = logging.getLogger(__name__)


def metrics_routes(sources: Sources, rules: AccessRules | None = None) -> Sequence[BaseRoute]:
    """Return `GET /metrics`, as Prometheus reads it.

    Args:
        rules: whose token the reader needs to read; None needs none.
    """
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
        refusal = rules and rules.token_refusal(METRICS, request.headers.items())
        if refusal:
            status = http_status(refusal)
            headers = {"www-authenticate": "Bearer"} if status == 401 else None
            return JSONResponse({"error": str(refusal)}, status, headers)
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
