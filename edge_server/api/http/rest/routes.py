"""What Starlette serves of `table`: each request waits for its function on a thread."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from edge_server.api.access import UPDATES
from edge_server.api.calls import http_status
from edge_server.api.http.call import QUESTION_BYTES, HttpCall
from edge_server.api.http.rest.api import JSON, Answer, RestCall
from edge_server.api.http.rest.infer import NOT_ONE, GeneratedResponses, error_answer, start
from edge_server.api.http.rest.table import PATHS, document
from edge_server.errors import EdgeServerError, Unavailable, forget_frames
from edge_server.process.text import as_utf8

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.requests import Request
    from starlette.routing import BaseRoute
    from starlette.types import Receive, Scope, Send

    from edge_server.api.http.rest.api import RestApi
    from edge_server.api.http.rest.table import Path

log = logging.getLogger(__name__)

_LONGEST_TEXT = 4000
# Interval at which an idle stream looks whether its token is still valid.
_LOOK_S = 1.0


class _Version(StringConvertor):
    """A number of any length: Python's `int` refuses long ones by an error."""

    regex = "[0-9]+"

    def convert(self, value: str) -> str:
        return value.lstrip("0") or "0"


register_url_convertor("version", _Version())


def rest_routes(api: RestApi) -> Sequence[BaseRoute]:
    """Return every path of the protocol, and its description at `/openapi.json`."""
    described = document(api.calls.name, api.calls.version)

    async def openapi(_: Request) -> Response:
        return Response(described, media_type="application/json")

    routes: list[BaseRoute] = [Route("/openapi.json", openapi, methods=["GET"])]
    paths: dict[str, dict[str, Path]] = {}
    for each in PATHS:
        paths.setdefault(each.path, {})[each.method] = each
    for path, by_method in paths.items():
        routes.append(
            Route(
                path.replace("{version}", "{version:version}"),
                _endpoint(api, by_method),
                methods=list(by_method),
            )
        )
    return routes


def _endpoint(api: RestApi, by_method: dict[str, Path]) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        path = by_method["GET" if request.method == "HEAD" else request.method]
        # Not dict(request.headers), which reads all of them once for each.
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in request.headers.raw[::-1]}
        if (refused := _refusal(api, path, headers)) is not None:
            return refused
        connection = HttpCall.of(request.scope)
        if path.is_question:
            connection.limit(QUESTION_BYTES)
        message = await request.receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        call = RestCall(
            request.method,
            {k: str(v) for k, v in request.path_params.items()},
            headers,
            message["body"],
            connection,
        )
        try:
            if path.function is not None:
                return _AsIs(await _on_thread(api, path.function, api, call))
            return await _generate(api, call, path)
        except Exception as error:  # noqa: BLE001 - every exception becomes a status
            answer = _answer_of(error, request)
            forget_frames(error)
            if path.runs_model:
                api.calls.requests.failed("http", str(answer.status))
            return _AsIs(answer)

    return serve


def _refusal(api: RestApi, path: Path, headers: dict[str, str]) -> Response | None:
    """Return the answer to a call that the rules, or the control mode, refuse; its body is not
    looked at."""
    rules = api.rules
    name, updates = path.method_name, path.method == "POST" and path.method_name in UPDATES
    if (token := rules.token_refusal(name, headers.items(), updates=updates)) is not None:
        status = http_status(token)
        more = (("www-authenticate", "Bearer"),) if status == 401 else ()
        return _AsIs(error_answer(status, str(token)), more)
    if refusal := rules.refusal(name, headers.items(), updates=updates):
        return _AsIs(error_answer(403, refusal))
    if path.operation in ("RepositoryModelLoad", "RepositoryModelUnload"):
        try:
            api.calls.loading()
        except Unavailable as error:
            return _AsIs(error_answer(http_status(error), str(error)))
    return None


async def _generate(api: RestApi, call: RestCall, path: Path) -> Response:
    responses = GeneratedResponses(asyncio.get_running_loop(), call.connection)
    responses.begin(_on_thread(api, start, api, call, responses))
    first = await responses.next()
    if path.streams:

        def revoked() -> EdgeServerError | None:
            return api.rules.token_refusal(path.method_name, call.headers.items())

        return _Events(first, responses, revoked if api.rules.tokens is not None else None)
    if first is None or await responses.next() is not None:
        responses.end()
        raise NOT_ONE
    status, text = first
    return _AsIs(Answer(status, JSON, (text,)))


def _answer_of(error: Exception, request: Request) -> Answer:
    if isinstance(error, EdgeServerError):
        return error_answer(http_status(error), as_utf8(str(error))[:_LONGEST_TEXT])
    log.error("http %s: unforeseen error", request.url.path, exc_info=error)
    return error_answer(500, as_utf8(f"{type(error).__name__}: {error}")[:_LONGEST_TEXT])


async def _on_thread(api: RestApi, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `function` returns on one of the server's threads, or raise what it raises."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def work() -> None:
        give: Callable[[], None]
        try:
            give = partial(future.set_result, function(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised again where the answer is awaited
            give = partial(future.set_exception, error)
        with suppress(RuntimeError):  # the server has stopped, and nobody waits any more
            loop.call_soon_threadsafe(_settle, future, give)

    api.threads.submit(work)
    return await future


def _settle(future: asyncio.Future[Any], give: Callable[[], None]) -> None:
    if not future.done():  # else nobody waits any more
        give()


class _AsIs(Response):
    """An answer whose parts are sent as they are, without a copy."""

    def __init__(self, answer: Answer, more: Sequence[tuple[str, str]] = ()) -> None:
        self._answer = answer
        self._more = more

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        answer = self._answer
        length = sum(len(part) for part in answer.parts)
        headers = (*answer.headers, ("content-length", str(length)), *self._more)
        await send(
            {
                "type": "http.response.start",
                "status": answer.status,
                "headers": [(name.encode(), value.encode()) for name, value in headers],
            }
        )
        if scope["method"] != "HEAD":
            for part in answer.parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class _Events(Response):
    """Server-sent events, one for each response of a model, as they come.

    Args:
        revoked: returns why the client may receive no more; None where no client needs a token.
    """

    def __init__(
        self,
        first: tuple[int, bytes] | None,
        responses: GeneratedResponses,
        revoked: Callable[[], EdgeServerError | None] | None = None,
    ) -> None:
        self._first = first
        self._responses = responses
        self._revoked = revoked
        self._is_over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        response = self._first
        await send(
            {
                "type": "http.response.start",
                "status": 200 if response is None else response[0],
                "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
            }
        )
        try:
            while response is not None:
                event = b"data: " + response[1] + b"\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": True})
                response = await self._next()
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._responses.end()

    async def _next(self) -> tuple[int, bytes] | None:
        """Return the next response; the last one is an error where the token has been revoked."""
        if self._is_over:
            return None
        if self._revoked is None:
            return await self._responses.next()
        coming = asyncio.ensure_future(self._responses.next())
        try:
            while (error := self._revoked()) is None:
                if (await asyncio.wait({coming}, timeout=_LOOK_S))[0]:
                    return coming.result()
        finally:
            coming.cancel()
        self._is_over = True
        answer = error_answer(http_status(error), str(error))
        return answer.status, bytes(answer.parts[0])
