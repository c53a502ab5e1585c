"""The routes of the page: its files, the token that opens it, and its WebSocket."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import time
from contextlib import suppress
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from edge_server.api.access import LOG_SETTINGS, RECORD
from edge_server.api.http.page.state import events_text, state_text
from edge_server.errors import Unavailable
from edge_server.pipeline.picture_feed import SizeName  # noqa: TC001 -- msgspec reads it

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from starlette.requests import HTTPConnection, Request
    from starlette.routing import BaseRoute
    from starlette.types import Message, Receive, Scope, Send

    from edge_server.api.http.page.state import PageSources
    from edge_server.pipeline.picture_feed import Viewer

    Serve = Callable[[PageSources, Request], Awaitable[Response]]

COOKIE = "edge_token"
log = logging.getLogger(__name__)

# Pages that may be open at once. What a page costs the encoder is bounded whatever their number is.
MOST_PAGES = 16
STATE_S = 1.0
RECENT_EVENTS = 50
# A browser that takes nothing for so long is gone.
_SEND_S = 10.0
_MOST_CAMERAS = 64
# A key that is held down chooses another camera 30 times a second.
_LOOK_S = 0.01

# RFC 6455, 7.4: 1013 is "try again later", 4000 and more are ours.
NEEDS_TOKEN, TRY_LATER, MISTAKE = 4401, 1013, 1008
_GONE = (WebSocketDisconnect, asyncio.TimeoutError, OSError)


def _may_read(sources: PageSources, token: str) -> bool:
    """Whether the owner of `token` may see the page; which pages browsers may come from is
    `BrowserRule`'s."""
    return sources.may_read is None or bool(token and sources.may_read(token))


def _is_reader(sources: PageSources, connection: HTTPConnection) -> bool:
    """Whether the request has a cookie with a token that may read."""
    return _may_read(sources, connection.cookies.get(COOKIE, ""))


class _Look(msgspec.Struct, forbid_unknown_fields=True):
    """What a page sends: the cameras that it shows, each with a size of `SIZES`."""

    look_at: Annotated[dict[str, SizeName], msgspec.Meta(max_length=_MOST_CAMERAS)]


class LivePages:
    """An ASGI application for the sockets of all pages.

    The server sends texts, `{"type": "state", …}` once a second and `{"type": "events", …}`, and
    binary pictures, see `PictureWriter`. The page sends `{"look_at": {CAMERA: SIZE}}`, and a byte
    for each picture that it has shown, before which the next one of that camera does not come. So a
    slow browser gets fewer pictures, never older ones. A page that looks elsewhere without end is
    followed 100 times a second.
    """

    def __init__(self, sources: PageSources) -> None:
        self._sources = sources
        self._rings: tuple[Callable[[], object], ...] = ()  # replaced, never changed
        self._state = ""
        self._state_at_s = 0.0
        sources.events.when_visible(self._ring_all)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = WebSocket(scope, receive, send)
        await socket.receive()  # websocket.connect
        if (refusal := self.refusal(socket)) is None:
            await self._serve(socket)
        else:
            await socket.close(*refusal)  # before it is accepted: 403

    def refusal(self, connection: HTTPConnection) -> tuple[int, str] | None:
        """Return the code and the reason with which a socket would be refused now; None if not."""
        if not _is_reader(self._sources, connection):
            return NEEDS_TOKEN, "a token is needed"
        if len(self._rings) >= MOST_PAGES:
            return TRY_LATER, f"{MOST_PAGES} pages are open already"
        return None

    async def _serve(self, socket: WebSocket) -> None:
        loop, wake = asyncio.get_running_loop(), asyncio.Event()

        def ring() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake.set)

        self._rings = (*self._rings, ring)
        viewer = self._sources.pictures.open(ring)
        tasks: set[asyncio.Task[None]] = set()
        try:
            await socket.accept()
            receiving = asyncio.create_task(_receive(socket, viewer))
            tasks = {receiving, asyncio.create_task(self._send(socket, viewer, wake, receiving))}
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._sources.pictures.close(viewer)
            self._rings = tuple(each for each in self._rings if each is not ring)
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, _GONE):
                    log.error("page: a socket ended by an error", exc_info=result)

    async def _send(
        self,
        socket: WebSocket,
        viewer: Viewer,
        wake: asyncio.Event,
        receiving: asyncio.Task[None],
    ) -> None:
        events = self._sources.events
        event_id = 0
        state_due_s = 0.0
        # Before Python 3.12, `wait_for` loses a cancellation that comes as its wait ends.
        while not receiving.done():
            now_s = time.monotonic()
            if now_s >= state_due_s:
                state_due_s = now_s + STATE_S
                if not _is_reader(self._sources, socket):  # its token is valid no more
                    await socket.close(NEEDS_TOKEN, "a token is needed")
                    return
                await _in_time(socket.send_text(self._state_of(now_s)))
            if found := events.after(event_id):
                event_id = found[-1].id
                await _in_time(socket.send_text(events_text(found[-RECENT_EVENTS:])))
            while (picture := viewer.take()) is not None:
                await _in_time(socket.send_bytes(picture))
            try:
                await asyncio.wait_for(wake.wait(), max(0.0, state_due_s - time.monotonic()))
            except asyncio.TimeoutError:
                continue
            wake.clear()

    def _state_of(self, now_s: float) -> str:
        """Return the state, made once for the pages that want it within the same moment."""
        if now_s - self._state_at_s > STATE_S / 2:
            self._state, self._state_at_s = state_text(self._sources), now_s
        return self._state

    def _ring_all(self) -> None:
        for ring in self._rings:
            ring()


async def _in_time(sending: Awaitable[None]) -> None:
    try:
        await asyncio.wait_for(sending, _SEND_S)
    except RuntimeError:  # a frame was none, and the protocol has closed the socket
        raise WebSocketDisconnect from None


async def _receive(socket: WebSocket, viewer: Viewer) -> None:
    """Take what the page sends, until it leaves or makes a mistake."""
    message = await socket.receive()
    while message["type"] != "websocket.disconnect":
        if not _take(message, viewer):
            with suppress(RuntimeError):  # a later frame was none, and the protocol has closed it
                await socket.close(MISTAKE, "that is no message of this page")
            return
        if message.get("text"):
            # What it sends meanwhile stays in its connection.
            await asyncio.sleep(_LOOK_S)
        message = await socket.receive()


def _take(message: Message, viewer: Viewer) -> bool:
    """Return whether `message` is one of the page's, after doing as it says."""
    if message.get("bytes"):
        return viewer.acknowledge()
    try:
        look = msgspec.json.decode(message.get("text") or "", type=_Look)
    except msgspec.MsgspecError:
        return False
    viewer.look_at(look.look_at)
    return True


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
    "/page/elements.js": "elements.js",
    "/page/lists.js": "lists.js",
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
    pages = LivePages(sources)

    def route(path: str, serve: Serve, method: str = "GET") -> Route:
        return Route(path, partial(serve, sources), methods=[method])

    def view(name: str, content: Callable[[Request], Any], method: str | None = None) -> Route:
        return route(f"/page/{name}", _for_readers(partial(_view, content, method)))

    return [
        *(Route(path, _file(name), methods=["GET"]) for path, name in _FILES.items()),
        route("/page/recordings", _for_readers(_list_recordings)),
        route("/page/recordings", _record, "POST"),
        route("/page/recordings/{name}", _for_readers(_download)),
        view("history/hour", lambda _: sources.history.shown("hour")),
        view("history/day", lambda _: sources.history.shown("day")),
        # For those who may read the settings of the log over Triton's API.
        view("log", partial(_log_lines, sources), LOG_SETTINGS),
        view("settings", lambda _: {"settings": list(sources.settings())}, LOG_SETTINGS),
        route("/page/token", _take_token, "POST"),
        Route("/page/token", partial(_tell, pages), methods=["GET"]),
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


_NO_RECORDER = "the recorder is off; set recorder.mode to events or continuous"
_BLOCK_BYTES = 1 << 18
_MOST_LISTED = 200


def _refused(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status, _HEADERS)


def _refusal(sources: PageSources, method: str, request: Request) -> str:
    """Return why the owner of the request's token may not call `method`; empty where he may."""
    headers = [("authorization", f"Bearer {request.cookies.get(COOKIE, '')}")]
    rules = sources.rules
    if rules is None:
        return ""
    return str(rules.token_refusal(method, headers) or rules.refusal(method, headers) or "")


def _for_readers(serve: Serve) -> Serve:
    async def checked(sources: PageSources, request: Request) -> Response:
        if not _is_reader(sources, request):
            return _refused(401, "a token is needed")
        return await serve(sources, request)

    return checked


async def _view(
    content: Callable[[Request], Any], method: str | None, sources: PageSources, request: Request
) -> Response:
    """Send the JSON of `content` to those who may also call `method`."""
    if method is not None and (refusal := _refusal(sources, method, request)):
        return _refused(403, refusal)
    data = msgspec.json.encode(content(request))
    return Response(data, headers=_HEADERS, media_type="application/json")


def _log_lines(sources: PageSources, request: Request) -> dict[str, Any]:
    after = request.query_params.get("after", "")
    return {"lines": sources.log.after(int(after) if re.fullmatch(r"[0-9]{1,15}", after) else 0)}


async def _list_recordings(sources: PageSources, _request: Request) -> Response:
    if (recorder := sources.parts.recorder) is None:
        return JSONResponse({"recordings": None}, headers=_HEADERS)
    try:
        found = await asyncio.to_thread(recorder.files.listed)
    except OSError as error:
        return _refused(503, f"{recorder.files.directory}: {error.strerror}")
    listed = [{"name": name, "bytes": size} for name, size in found[:_MOST_LISTED]]
    return JSONResponse({"recordings": listed}, headers=_HEADERS)


async def _download(sources: PageSources, request: Request) -> Response:
    if (recorder := sources.parts.recorder) is None:
        return _refused(404, _NO_RECORDER)
    name: str = request.path_params["name"]
    try:
        file = await asyncio.to_thread(recorder.files.open, name)
    except OSError as error:
        return _refused(404, f"no recording {name}: {error.strerror}")
    headers = {
        **_HEADERS,
        "Content-Length": str(os.fstat(file.fileno()).st_size),
        "Content-Disposition": f'attachment; filename="{name}"',
    }

    async def blocks() -> AsyncIterator[bytes]:
        with file:
            while block := await asyncio.to_thread(file.read, _BLOCK_BYTES):
                yield block

    return StreamingResponse(blocks(), headers=headers, media_type="application/octet-stream")


async def _record(sources: PageSources, request: Request) -> Response:
    """Record the seconds around now: a control call, as `Record` of the lane service."""
    if refusal := _refusal(sources, RECORD, request):
        return _refused(403, refusal)
    if (recorder := sources.parts.recorder) is None:
        return _refused(503, _NO_RECORDER)
    try:
        name = await asyncio.to_thread(recorder.request, "page")
    except Unavailable as error:
        return _refused(503, str(error))
    return JSONResponse({"name": name}, headers=_HEADERS)


async def _tell(pages: LivePages, request: Request) -> Response:
    """Tell a page why its socket would be refused; of a socket no browser does."""
    refusal = pages.refusal(request)
    if refusal is None:
        return JSONResponse({}, headers=_HEADERS)
    code, text = refusal
    return _refused(401 if code == NEEDS_TOKEN else 503, text)


async def _take_token(sources: PageSources, request: Request) -> Response:
    """Keep a token in a cookie, which no script of any page reads."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LONGEST_BODY_BYTES:
            return JSONResponse({"error": "a token is no longer than 2048 characters"}, 413)
    try:
        token = msgspec.json.decode(body, type=_TokenBody).token.strip()
    except ValueError as error:
        return JSONResponse({"error": str(error)}, 400)
    if not _may_read(sources, token):
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
