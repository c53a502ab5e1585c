"""The refusal of calls before they take a thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc

from edge_server.api.call_threads import CallTask
from edge_server.api.grpc.methods import status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.api.call_threads import CallThreads
    from edge_server.errors import EdgeServerError


def refusable(
    handler: grpc.RpcMethodHandler[Any, Any],
    refusal: Callable[[], EdgeServerError | None],
    threads: CallThreads,
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler like `handler`, whose calls end at once while `refusal` returns a reason.

    A call is refused without a thread and without its message, at half the processor time: at ten
    times the load that can be served, the remaining time decides the throughput.

    Args:
        handler: of a method that reads its requests itself, like those of `unary` and `streaming`.
        refusal: called on the one thread that receives all calls.
        threads: the executor of admitted calls.
    """
    if handler.stream_unary is not None:
        method = _Refusable(handler.stream_unary, refusal, threads)
        return grpc.stream_unary_rpc_method_handler(method)
    if handler.stream_stream is not None:
        method = _Refusable(handler.stream_stream, refusal, threads)
        return grpc.stream_stream_rpc_method_handler(method)
    raise TypeError("the method reads no stream")


class _Reason(threading.local):
    error: EdgeServerError | None = None


class _Refusable(ThreadPoolExecutor):
    """A method, and the executor that grpc runs it on: refused calls on the thread that receives
    them, the others on `threads`.

    Attributes:
        experimental_thread_pool: grpc runs the call on it; a grpc that does not know the attribute
            uses a thread of the server's, and then only the method itself refuses calls.
    """

    def __init__(
        self,
        method: Callable[[Iterator[bytes], Any], Any],
        refusal: Callable[[], EdgeServerError | None],
        threads: CallThreads,
    ) -> None:
        super().__init__(max_workers=1)
        self.experimental_thread_pool = self
        self._method = method
        self._refusal = refusal
        self._call_threads = threads
        self._reason = _Reason()

    def __call__(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        error = self._reason.error
        if error is not None:
            context.abort(status_of(error), str(error))
        return self._method(requests, context)

    def submit(  # type: ignore[override]  # grpc wants `add_done_callback` of a future, no more
        self, call: Callable[..., object], /, *args: Any, **kwargs: Any
    ) -> CallTask:
        error = self._refusal()
        if error is None:
            return self._call_threads.submit(call, *args, **kwargs)
        task = CallTask(call, args, kwargs)
        self._reason.error = error
        task.run()
        self._reason.error = None
        return task
