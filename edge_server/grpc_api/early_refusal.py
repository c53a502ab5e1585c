"""Calls that cannot be let in are refused before anything of them is read."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from edge_server.errors import Unavailable
from edge_server.grpc_api.status import status_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.errors import EdgeServerError

    Refusal = Callable[[], EdgeServerError | None]


class RefusableHandler(grpc.RpcMethodHandler):  # type: ignore[type-arg]
    """A unary method whose calls end at once wherever `refusal` gives a reason.

    They are refused without a thread and without their message, at half the processor time: at ten
    times the load that can be served, what is left decides how much is served.

    grpc asks a handler at each call which kind it is. To the wire a call with one request is a
    stream of one, and a stream need not be read.

    Args:
        handler: of the method.
        refusal: called on the one thread that hears of all calls.
    """

    request_deserializer = None
    response_serializer = None
    response_streaming = False
    unary_stream = None
    stream_stream = None

    def __init__(self, handler: grpc.RpcMethodHandler[Any, Any], refusal: Refusal) -> None:
        self.unary_unary = handler.unary_unary
        self.stream_unary = _Refuse(refusal)
        self._refusal = refusal

    @property
    def request_streaming(self) -> bool:  # type: ignore[override]
        return self._refusal() is not None


class _Refuse:
    """Ends a call for the reason that there is at this moment.

    Attributes:
        experimental_thread_pool: where grpc runs it; a grpc that does not know of this takes a
            thread of the server's, which costs more and does no harm.
    """

    def __init__(self, refusal: Refusal) -> None:
        self._refusal = refusal
        self.experimental_thread_pool = _AtOnce(max_workers=1)

    def __call__(self, _requests: object, context: grpc.ServicerContext) -> NoReturn:
        error = self._refusal() or Unavailable("Exceeds maximum queue size")
        context.abort(status_of(error), str(error))


class _AtOnce(ThreadPoolExecutor):
    """Runs what it is given on the thread that brings it; only for what never waits."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future
