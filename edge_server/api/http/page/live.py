"""The page's WebSocket: state, events and pictures, at the pace of the browser that reads them."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from edge_server.api.http.page.state import events_text, state_text
from edge_server.pipeline.picture_feed import SizeName  # noqa: TC001 -- msgspec reads it

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import HTTPConnection
    from starlette.types import Message, Receive, Scope, Send

    from edge_server.api.http.page.access import PageAccess
    from edge_server.api.http.page.state import PageSources
    from edge_server.pipeline.picture_feed import Viewer

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

    Args:
        sources: what is shown.
        access: who may see it.
        most: number of pages.
    """

    def __init__(self, sources: PageSources, access: PageAccess, *, most: int = MOST_PAGES) -> None:
        self._sources = sources
        self._access = access
        self._most = most
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
        if not self._access.is_open_to(connection):
            return NEEDS_TOKEN, "a token is needed"
        if len(self._rings) >= self._most:
            return TRY_LATER, f"{self._most} pages are open already"
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
                if not self._access.is_open_to(socket):  # its token is valid no more
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
    await asyncio.wait_for(sending, _SEND_S)


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
