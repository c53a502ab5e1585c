"""Refuses calls without a free place before their message is read."""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc

from edge_server.api.grpc.status import status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.errors import EdgeServerError

    Refusal = Callable[[], EdgeServerError | None]


def refusable(
    handler: grpc.RpcMethodHandler[Any, Any], refusal: Refusal, threads: Executor
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler like `handler`, whose calls end at once while `refusal` returns a reason.

    A call is refused without a thread and without its message, at half the processor time: at ten
    times the load that can be served, the remaining time decides the throughput.

    Args:
        handler: of a method that reads its one request itself, like those of `unary`.
        refusal: called on the one thread that receives all calls.
        threads: the executor of admitted calls.
    """
    if handler.stream_unary is None:
        raise TypeError("the method reads no stream")
    return grpc.stream_unary_rpc_method_handler(_Refusable(handler.stream_unary, refusal, threads))


class _Refusable:
    """Runs a call, or ends it with the reason that held when it arrived.

    Attributes:
        experimental_thread_pool: grpc runs the call on it; a grpc that does not know the attribute
            uses a thread of the server's, and then only the method itself refuses calls.
    """

    def __init__(
        self, answer: Callable[[Iterator[bytes], Any], Any], refusal: Refusal, threads: Executor
    ) -> None:
        self._answer = answer
        self.experimental_thread_pool = _Door(refusal, threads)

    def __call__(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        error = self.experimental_thread_pool.reason.error
        if error is not None:
            context.abort(status_of(error), str(error))
        return self._answer(requests, context)


class _Reason(threading.local):
    error: EdgeServerError | None = None


class _Door(ThreadPoolExecutor):
    """Runs refused calls on the thread that receives them, and the others on `threads`."""

    def __init__(self, refusal: Refusal, threads: Executor) -> None:
        super().__init__(max_workers=1)
        self._refusal = refusal
        self._call_threads = threads
        self.reason = _Reason()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        error = self._refusal()
        if error is None:
            return self._call_threads.submit(fn, *args, **kwargs)
        future: Future[Any] = Future()
        self.reason.error = error
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as raised:  # noqa: BLE001 - as an executor does
            future.set_exception(raised)
        finally:
            self.reason.error = None
        return future
