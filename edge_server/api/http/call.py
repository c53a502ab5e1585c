"""A listener's application: every request of its routes is an HttpCall, with one body.

Handlers run on the event loop and never block it: what may take time goes to a thread, with
`asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from edge_server.api.access import BrowserRule
from edge_server.api.admission import COUNTED_FROM_BYTES, ByteBudget
from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from edge_server.api.http.connection import HttpConnection
    from edge_server.settings import Http

log = logging.getLogger(__name__)

# Of a body without tensors and files; `http.max_body_bytes` is never less.
QUESTION_BYTES = 64 * 1024
# A client may read its refusal before its connection is closed.
_LAST_WORDS_S = 1.0


def application(name: str, routes: Sequence[BaseRoute], limits: Http) -> ASGIApp:
    """Return the application that serves `routes`; its errors are JSON: `{"error": …}`.

    An exception of a handler is logged, and answered with 500; it ends no connection of others.

    Args:
        name: of the listener, for the log.
        limits: of bodies; `host_names`: see `BrowserRule`, which refuses requests and sockets
            before any route, and any token, is looked at.
    """
    browsers = BrowserRule(limits.host_names)
    budget = ByteBudget(
        max(limits.max_pending_bytes, 2 * limits.max_body_bytes), "http.max_pending_bytes"
    )
    starlette = Starlette(routes=routes, exception_handlers={HTTPException: _refuse})
    starlette.router.redirect_slashes = False

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        connection: HttpConnection = scope["state"]["connection"]
        refusal = browsers.refusal(scope.get("method", ""), scope["headers"])
        if scope["type"] != "http":
            connection.begin_web_socket()
            try:
                if refusal:
                    await receive()  # websocket.connect
                    await send({"type": "websocket.close"})  # before it is accepted: 403
                else:
                    await starlette(scope, receive, send)
            finally:
                connection.end()
            return
        call = HttpCall(_body_length(scope["headers"]), limits.max_body_bytes, budget)
        scope["state"]["call"] = call
        exchange = _Exchange(call, connection, receive, send)
        try:
            if refusal:
                await JSONResponse({"error": refusal}, 403)(scope, receive, exchange.send)
            else:
                await starlette(scope, exchange.receive, exchange.send)
        except RequestRefused as refused:
            answer = JSONResponse({"error": refused.text}, refused.status)
            await answer(scope, receive, exchange.send)
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


class _Exchange:
    """What the routes receive of a request, and send; its connection learns of both."""

    def __init__(
        self, call: HttpCall, connection: HttpConnection, receive: Receive, send: Send
    ) -> None:
        self._call = call
        self._connection = connection
        self._receive = receive
        self._send = send
        connection.begin(call.cancel, body_bytes=call.length)

    async def receive(self) -> Message:
        """Return the whole body; the second time, when the client is gone."""
        call = self._call
        return await (self._receive() if call.is_read else call.read(self._receive_part))

    async def send(self, message: Message) -> None:
        """Send a part of the answer. Where the body has not been read, close the connection once
        the client has sent it, or has had a moment to read the answer, which would be lost else."""
        is_last = message["type"] == "http.response.body" and not message.get("more_body")
        if not self._call.is_complete:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            elif is_last:
                await self._send({**message, "more_body": True})
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._rest(), _LAST_WORDS_S)
                message = {"type": "http.response.body"}
        await self._send(message)
        if is_last:
            self._connection.end()

    async def _receive_part(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._connection.receive(more=message["more_body"])
            self._call.is_complete = not message["more_body"]
        return message

    async def _rest(self) -> None:
        while not self._call.is_complete:
            if (await self._receive_part())["type"] != "http.request":
                return


def _body_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """Return the declared length of a body, 0 without one; None of a chunked one. The parser has
    seen to it that they are valid."""
    length = 0
    for name, value in headers:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            length = int(value)
    return length


class RequestRefused(BaseException):
    """The request is answered so, and its body not read any further.

    No `Exception`: Starlette would answer with 500 before the application does.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class HttpCall:
    """One request, and the `Cancellation` of what it requests.

    Its body is in one buffer, of its declared length, and nothing is kept of one that is too long,
    alone or together with those of other requests. Used on the server's thread; `cancelled`,
    `when_cancelled` and `count` are safe from any thread.

    Args:
        length: of the body, as declared; None is chunked.
        longest_bytes: of the body.
        budget: counts the body until `release`.

    Attributes:
        body: once it is read; while it is read, with room for what is to come.
        is_complete, is_read: the client has sent the body; `read` has returned it.
        began_ns, read_ns: when the header and then the body was complete; `time.monotonic_ns()`.
    """

    def __init__(self, length: int | None, longest_bytes: int, budget: ByteBudget) -> None:
        self.began_ns = time.monotonic_ns()
        self.read_ns = self.began_ns
        self.is_complete = length == 0
        self.is_read = False
        self.body = memoryview(b"")
        self.cancelled = False
        self.length = length
        self._longest_bytes = longest_bytes
        self._budget = budget
        self._counted_bytes = 0
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._when_answered: list[Callable[[], None]] = []
        self._is_answered = False

    @staticmethod
    def of(scope: Scope) -> HttpCall:
        return cast("HttpCall", scope["state"]["call"])

    async def read(self, receive: Receive) -> Message:
        """Return the message with the whole body; that of a client that has gone before.

        Raises:
            RequestRefused: it is too long.
        """
        used = 0
        if self.length:
            self._make_room(self.length)
        while not self.is_complete:
            message = await receive()
            if message["type"] != "http.request":
                return message
            part = message["body"]
            end = used + len(part)
            if end > len(self.body):
                self._make_room(max(end, min(2 * len(self.body), self._longest_bytes)))
            self.body[used:end] = part
            used = end
        self.body = self.body[:used]
        self.read_ns = time.monotonic_ns()
        self.is_read = True
        return {"type": "http.request", "body": self.body, "more_body": False}

    def limit(self, longest_bytes: int) -> None:
        """Refuse a body that is longer.

        Raises:
            RequestRefused: it is declared so; see `read`, too.
        """
        self._longest_bytes = min(self._longest_bytes, longest_bytes)
        if self.length and self.length > longest_bytes:
            raise self._too_long(self.length)

    def count(self, size_bytes: int) -> None:
        """Count more bytes until `release`; see `Call`.

        Raises:
            Unavailable: they do not fit.
        """
        self._budget.take(size_bytes)
        with self._lock:
            if not self._is_answered:
                self._counted_bytes += size_bytes
                return
        self._budget.give(size_bytes)

    def count_answer(self, size_bytes: int) -> None:
        """Count an answer too, as far as it is longer than what the call holds already.

        Raises:
            Unavailable: it does not fit.
        """
        more_bytes = size_bytes - self._counted_bytes
        if more_bytes >= COUNTED_FROM_BYTES:
            self.count(more_bytes)

    def give(self, size_bytes: int) -> None:
        """Count that many bytes no longer; they are given up before the call is over."""
        with self._lock:
            size_bytes = min(size_bytes, self._counted_bytes)
            self._counted_bytes -= size_bytes
        self._budget.give(size_bytes)

    def release(self) -> None:
        """Stop counting: the request is answered."""
        self.body = memoryview(b"")
        with self._lock:
            callbacks, self._when_answered = self._when_answered, []
            self._is_answered = True
            counted_bytes, self._counted_bytes = self._counted_bytes, 0
        self._budget.give(counted_bytes)
        for callback in callbacks:
            callback()

    def when_answered(self, callback: Callable[[], None]) -> bool:
        """Call `callback` when the answer is sent, or the client gone; False if that is over."""
        with self._lock:
            if not self._is_answered:
                self._when_answered.append(callback)
            return not self._is_answered

    def cancel(self) -> None:
        """The client is gone."""
        with self._lock:
            self.cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        """See `Cancellation`."""
        with self._lock:
            if not self.cancelled:
                self._callbacks.append(callback)
                return
        callback()

    def _make_room(self, size_bytes: int) -> None:
        """Give the body that length, counted.

        Raises:
            RequestRefused: it is too long, or does not fit beside what other calls hold; the body
                is empty then.
        """
        if size_bytes > self._longest_bytes:
            self.body = memoryview(b"")
            raise self._too_long(size_bytes)
        if size_bytes >= COUNTED_FROM_BYTES:
            try:
                self._budget.take(size_bytes - self._counted_bytes)
            except Unavailable as error:
                self.body = memoryview(b"")
                self.give(self._counted_bytes)
                raise RequestRefused(503, str(error)) from None
            self._counted_bytes = size_bytes
        # A bytearray would be filled with zeros, 40 ms for 60 MiB in which no other thread runs.
        grown = memoryview(np.empty(size_bytes, np.uint8))
        grown[: len(self.body)] = self.body
        self.body = grown

    def _too_long(self, size_bytes: int) -> RequestRefused:
        self.give(self._counted_bytes)
        setting = " (http.max_body_bytes)" if self._longest_bytes > QUESTION_BYTES else ""
        return RequestRefused(
            413,
            f"a body of {size_bytes} bytes is not read; it has {self._longest_bytes} at most"
            f"{setting}",
        )
