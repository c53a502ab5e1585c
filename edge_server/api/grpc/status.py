"""Maps our errors to gRPC status codes, in one place."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from edge_server import errors
from edge_server.api.grpc.traffic import Traffic
from edge_server.process.paths import as_utf8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
log = logging.getLogger(__name__)

STATUS = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ModelConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ModelLoadError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}


# A status travels in HTTP/2 headers, which peers cap; and a text may quote what a client sent.
_LONGEST_TEXT_BYTES = 4000


def status_of(error: errors.EdgeServerError) -> grpc.StatusCode:
    """Return the status code of `error`; an error without a mapping is INTERNAL."""
    return STATUS.get(type(error), grpc.StatusCode.INTERNAL)


def unary(
    behaviour: Callable[[bytes, grpc.ServicerContext], bytes],
    method: str,
    traffic: Traffic | None = None,
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler that runs `behaviour` and maps every exception to a status.

    On the wire a call with one request is a stream of one. As such a stream the call reads its
    request itself, so that `traffic` can limit how long the request takes.

    Args:
        traffic: reads the request and watches that the client reads the response; None only reads.
    """
    traffic = traffic or Traffic()

    def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        request = traffic.read(requests, context)
        try:
            with traffic.budget.hold(len(request)):
                answered = behaviour(request, context)
        except Exception as error:  # noqa: BLE001 - every exception becomes a status
            _abort(context, method, error)
        return traffic.send(answered, context)

    return grpc.stream_unary_rpc_method_handler(answer)


def streaming(
    behaviour: Callable[..., Iterator[bytes]], method: str, traffic: Traffic | None = None
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler like `unary`'s, for a behaviour that takes and returns streams."""
    traffic = traffic or Traffic()

    def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            for response in behaviour(requests, context):
                with traffic.sending(response, context):
                    yield response
                del response
        except Exception as error:  # noqa: BLE001 - every exception becomes a status
            _abort(context, method, error)
        finally:
            # Half of a large request may have arrived, which the budget has not counted.
            traffic.budget.note_many()

    return grpc.stream_stream_rpc_method_handler(answer)


def _abort(context: grpc.ServicerContext, method: str, error: Exception) -> NoReturn:
    if isinstance(error, errors.EdgeServerError):
        context.abort(status_of(error), header_text(str(error)))
    log.error("grpc %s: unforeseen error", method, exc_info=error)
    text = f"{type(error).__name__}: {error}"
    context.abort(grpc.StatusCode.INTERNAL, header_text(text))


def header_text(text: str) -> str:
    """Return the part of `text` that fits into a header; invalid Unicode is escaped.

    gRPC writes each byte that is not printable ASCII as three.
    """
    text = as_utf8(text)
    size_bytes = 0
    for place, char in enumerate(text):
        plain = " " <= char <= "~" and char != "%"
        size_bytes += 1 if plain else 3 * len(char.encode())
        if size_bytes > _LONGEST_TEXT_BYTES:
            text = text[:place]
            break
    return text
