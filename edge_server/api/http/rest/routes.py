"""The routes of KServe v2 over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from edge_server.inference.data_plane import DataPlane


def rest_routes(data_plane: DataPlane) -> Sequence[BaseRoute]:
    """Return every path of the protocol."""

    async def live(_: Request) -> Response:
        return Response()

    async def ready(_: Request) -> Response:
        return Response(status_code=200 if data_plane.server_ready() else 400)

    return [Route("/v2/health/live", live), Route("/v2/health/ready", ready)]
