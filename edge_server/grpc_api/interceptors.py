"""The one place where our errors become gRPC status codes."""

from __future__ import annotations

import logging
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


# A status travels in HTTP/2 headers, which peers cap; and a text may quote what a client sent.
_LONGEST_TEXT = 4000


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

        def answer(request: bytes, context: grpc.ServicerContext) -> Any:
            try:
                return behaviour(request, context)
            except errors.EdgeServerError as error:
                context.abort(status_of(error), str(error)[:_LONGEST_TEXT])
            except Exception as error:
                log.exception("grpc %s: unforeseen error", method)
                text = f"{type(error).__name__}: {error}"
                context.abort(grpc.StatusCode.INTERNAL, text[:_LONGEST_TEXT])

        return grpc.unary_unary_rpc_method_handler(answer)
