"""One Starlette application per listener, of the routes that each topic's module returns.

Handlers run on the event loop and never block it: what may take time goes to a thread, with
`asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from edge_server.api.access import BrowserRule
from edge_server.api.http.call import HttpCall, Refusal, Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

# A client may read its refusal before its connection is closed.
_LAST_WORDS_S = 1.0


def application(
    name: str, routes: Sequence[BaseRoute], browsers: BrowserRule | None = None
) -> ASGIApp:
    """Return the application that serves `routes`; its errors are JSON: `{"error": …}`.

    An exception of a handler is logged, and answered with 500; it ends no connection of others.

    Args:
        name: of the listener, for the log.
        browsers: refuses requests and sockets before any route, and any token, is looked at.
    """
    browsers = browsers or BrowserRule()
    starlette = Starlette(routes=routes, exception_handlers={HTTPException: _refuse})
    starlette.router.redirect_slashes = False

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        refusal = browsers.refusal(scope.get("method", ""), scope["headers"])
        if scope["type"] != "http":
            if refusal:
                await receive()  # websocket.connect
                await send({"type": "websocket.close"})  # before it is accepted: 403
            else:
                await starlette(scope, receive, send)
            return
        call = HttpCall.of(scope)

        async def receive_whole() -> Message:
            """The first message is the whole body; the next one comes when the client is gone."""
            message = await receive()
            if call.refusal is not None:
                raise Refused
            return message if message["type"] != "http.request" else {**message, "body": call.body}

        try:
            if refusal:
                await JSONResponse({"error": refusal}, 403)(scope, receive_whole, send)
            elif call.refusal is None:
                await starlette(scope, receive_whole, send)
            else:
                await _refuse_body(call, receive, send)
        except Refused:
            await _refuse_body(call, receive, send)
        except ClientDisconnect:
            log.debug("%s: a client went before its request was complete", name)
        except Exception:
            # Starlette has answered it, and raises it again for the log.
            log.exception("%s: %s failed", name, scope["path"])
        finally:
            call.release()

    return run


async def _refuse(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _refuse_body(call: HttpCall, receive: Receive, send: Send) -> None:
    """Answer, and close the connection once the client has sent what it was sending, or has had a
    moment to read the answer: a connection that is closed before would lose it."""
    status, text = call.refusal or Refusal(500, "")
    body = msgspec.json.encode({"error": text})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_sent(receive), _LAST_WORDS_S)
    await send({"type": "http.response.body", "body": b""})


async def _sent(receive: Receive) -> None:
    """Return when the client has sent its request, or is gone."""
    message = await receive()
    while message["type"] == "http.request" and message["more_body"]:
        message = await receive()
