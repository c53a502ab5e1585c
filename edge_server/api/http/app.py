"""One Starlette application per listener, of the routes that each topic's module returns.

Handlers run on the event loop and never block it: what may take time goes to a thread, with
`asyncio.to_thread`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)


def application(name: str, routes: Sequence[BaseRoute]) -> ASGIApp:
    """Return the application that serves `routes`; its errors are JSON: `{"error": …}`.

    An exception of a handler is logged, and answered with 500; it ends no connection of others.

    Args:
        name: of the listener, for the log.
    """
    starlette = Starlette(routes=routes, exception_handlers={HTTPException: _refuse})
    starlette.router.redirect_slashes = False

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await starlette(scope, receive, send)
        except Exception:
            # Starlette has answered it, and raises it again for the log.
            log.exception("%s: %s failed", name, scope.get("path", ""))

    return run


async def _refuse(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)
