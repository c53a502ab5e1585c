"""What happens around every call: our errors become status codes, and an end is told politely."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import grpc

from edge_server import errors

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

STATUS = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ModelConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}


def status_of(error: errors.EdgeServerError) -> grpc.StatusCode:
    """The status that tells `error`; what has no business on the wire is INTERNAL."""
    return STATUS.get(type(error), grpc.StatusCode.INTERNAL)


class ErrorsToStatus(grpc.ServerInterceptor):
    """Wraps every unary method: our errors, and anything unforeseen, end as a clear status."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        method = handler_call_details.method
        behaviour = handler.unary_unary

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return behaviour(request, context)
            except errors.EdgeServerError as error:
                context.abort(status_of(error), str(error))
            except NotImplementedError:
                name = method.rpartition("/")[2]
                context.abort(
                    grpc.StatusCode.UNIMPLEMENTED, f"{name} is not offered by this server"
                )
            except Exception as error:
                log.exception("grpc %s: unforeseen error", method)
                context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")

        return grpc.unary_unary_rpc_method_handler(
            answer, handler.request_deserializer, handler.response_serializer
        )


class Drain(grpc.ServerInterceptor):
    """After `begin`, new inferences are refused in words, while those in flight go on.

    Without it a call that arrives as the server shuts down is cut off as CANCELLED, and its client
    cannot tell whether it ran.
    """

    _REFUSED = frozenset({"ModelInfer", "ModelStreamInfer"})

    def __init__(self) -> None:
        self._begun = threading.Event()

    def begin(self) -> None:
        self._begun.set()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        name = handler_call_details.method.rpartition("/")[2]
        if self._begun.is_set() and name in self._REFUSED:
            return grpc.unary_unary_rpc_method_handler(_refuse)
        return continuation(handler_call_details)


def _refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
    del request
    context.abort(
        grpc.StatusCode.UNAVAILABLE,
        "GRPC server is shutting down and has stopped accepting new requests.",
    )
