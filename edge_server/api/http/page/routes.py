"""The routes of the page: its files, the token that opens it, and its WebSocket."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated

import msgspec
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute

from edge_server.api.http.page.access import COOKIE, PageAccess
from edge_server.api.http.page.live import NEEDS_TOKEN, LivePages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from edge_server.api.http.page.state import PageSources

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILES = {
    "/": "index.html",
    "/page/page.css": "page.css",
    "/page/page.js": "page.js",
    "/page/birds_eye.js": "birds_eye.js",
    "/page/icon.svg": "icon.svg",
    # Where browsers look for it if they have not read the page yet.
    "/favicon.ico": "icon.svg",
}
# Nothing but what this server sends itself; no form, no frame, no other origin.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Asked for again each time, which the ETag makes cheap: an update changes all files at once.
    "Cache-Control": "no-cache",
}
_LONGEST_BODY_BYTES = 4096
_COOKIE_DAYS = 30


class _TokenBody(msgspec.Struct):
    token: Annotated[str, msgspec.Meta(max_length=2048)]


def page_routes(sources: PageSources) -> Sequence[BaseRoute]:
    """Return the routes of the page; the part of the daemon that starts `sources.pictures.worker`
    is another one's."""
    access = PageAccess(sources.may_read)
    pages = LivePages(sources, access)
    return [
        *(Route(path, _file(name), methods=["GET"]) for path, name in _FILES.items()),
        Route("/page/token", _take_token(access), methods=["POST"]),
        Route("/page/token", _tell(pages), methods=["GET"]),
        WebSocketRoute("/page/live", pages),
    ]


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Return what serves a file of the package: the page without what it shows needs no token."""
    data = (files("edge_server.api.http.page") / "static" / name).read_bytes()
    etag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
    media_type = _TYPES[name.rpartition(".")[2]]

    async def serve(request: Request) -> Response:
        headers = {**_HEADERS, "ETag": etag}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers, media_type=media_type)

    return serve


def _tell(pages: LivePages) -> Callable[[Request], Awaitable[Response]]:
    """Return what tells a page why its socket would be refused; of a socket no browser does."""

    async def tell(request: Request) -> Response:
        refusal = pages.refusal(request)
        if refusal is None:
            return JSONResponse({}, headers=_HEADERS)
        code, text = refusal
        return JSONResponse({"error": text}, 401 if code == NEEDS_TOKEN else 503, _HEADERS)

    return tell


def _take_token(access: PageAccess) -> Callable[[Request], Awaitable[Response]]:
    """Return what keeps a token in a cookie, which no script of any page reads."""

    async def take(request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _LONGEST_BODY_BYTES:
                return JSONResponse({"error": "a token is no longer than 2048 characters"}, 413)
        try:
            token = msgspec.json.decode(body, type=_TokenBody).token.strip()
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        if not access.may_read(token):
            return JSONResponse({"error": "this token does not let you read"}, 401)
        response = Response(status_code=204)
        response.set_cookie(
            COOKIE,
            token,
            max_age=_COOKIE_DAYS * 86400,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    return take
