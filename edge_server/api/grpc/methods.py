"""Handlers over bytes for every method that a service describes; every error becomes a status.

And what a method may know of its call: its deadline, and whether its caller is still connected.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from edge_server import errors
from edge_server.api import statuses
from edge_server.api.access import TRITON, UPDATES
from edge_server.api.grpc.traffic import COMPRESSED, Traffic
from edge_server.process.utf8 import as_utf8

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from edge_server.api.access import AccessRules
    from edge_server.api.admission import ByteBudget

    Handler = grpc.RpcMethodHandler[Any, Any]

log = logging.getLogger(__name__)

STATUS = {error: grpc.StatusCode[status.grpc] for error, status in statuses.STATUS.items()}

# Such requests are short; protobuf's objects can be many times larger than the parsed bytes.
_LONGEST_QUESTION_BYTES = 64 * 1024
# A status travels in HTTP/2 headers, which peers cap; and a text may quote what a client sent.
_LONGEST_TEXT_BYTES = 4000


def method_handlers(
    service: Any,
    servicer: object,
    over_bytes: Collection[str] = (),
    traffic: Traffic | None = None,
    rules: AccessRules | None = None,
) -> dict[str, Handler]:
    """Return a handler for each method of the descriptor `service` that calls `servicer`'s method.

    The handlers differ from those of the generated `add_…_to_server`: messages are parsed within
    the call, where a damaged message is the caller's error, and the methods in `over_bytes` read
    and write bytes themselves. A method that `servicer` does not define returns UNIMPLEMENTED with
    its name.

    Args:
        traffic, rules: see `unary`.
    """
    handlers = {}
    for method in service.methods:
        path = f"/{service.full_name}/{method.name}"
        behaviour = getattr(servicer, method.name, None)
        if method.name not in vars(type(servicer)) or behaviour is None:
            behaviour = _refusing(method.name)
        elif method.name not in over_bytes:
            behaviour = _parsing(method, behaviour, path, rules)
        # Errors become statuses here rather than in an interceptor, which would slow every call.
        make = streaming if method.server_streaming else unary
        handlers[method.name] = make(behaviour, path, traffic, rules)
    return handlers


def unary(
    behaviour: Callable[[bytes, grpc.ServicerContext], bytes],
    path: str,
    traffic: Traffic | None = None,
    rules: AccessRules | None = None,
) -> Handler:
    """Return a handler that runs `behaviour` and maps every exception to a status.

    On the wire a call with one request is a stream of one. As such a stream the call reads its
    request itself, so that `traffic` can limit how long the request takes.

    Args:
        path: of the method, as on the wire.
        traffic: reads the request and watches that the client reads the response; None only reads.
        rules: refuse calls before their request is read; None allows all.
    """
    traffic = traffic or Traffic()

    def respond(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        request = traffic.read(requests, context)
        try:
            if request.startswith(COMPRESSED):
                with UnaryCall(context, traffic.budget) as call:
                    request = traffic.decompressed(request, call)
            with traffic.budget.hold(len(request)):
                response = behaviour(request, context)
                return traffic.send(response, context, len(request))
        except Exception as error:  # noqa: BLE001 - every exception becomes a status
            _abort(context, path, error)

    return grpc.stream_unary_rpc_method_handler(_allowed(respond, path, rules))


def streaming(
    behaviour: Callable[..., Iterator[bytes]],
    path: str,
    traffic: Traffic | None = None,
    rules: AccessRules | None = None,
) -> Handler:
    """Return a handler like `unary`'s, for a behaviour that takes and returns streams."""
    traffic = traffic or Traffic()

    def respond(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            for response in behaviour(requests, context):
                with traffic.sending(response, context):
                    yield response
                del response
        except grpc.RpcError:
            # Its requests raise it where the client is gone: nobody waits for a status.
            return
        except Exception as error:  # noqa: BLE001 - every exception becomes a status
            _abort(context, path, error)
        finally:
            # Half of a large request may have arrived, which nothing has counted.
            traffic.note_many()

    return grpc.stream_stream_rpc_method_handler(_allowed(respond, path, rules, traffic))


def _allowed(
    respond: Callable[..., Any],
    path: str,
    rules: AccessRules | None,
    streams: Traffic | None = None,
) -> Callable[..., Any]:
    """Return `respond` behind the rules.

    Args:
        streams: ends a stream whose token is no longer valid; None of a method without streams.
    """
    if rules is None or not rules.refuse_any:
        return respond

    def respond_if_allowed(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        metadata = context.invocation_metadata()
        if (token := rules.token_refusal(path, metadata)) is not None:
            context.abort(status_of(token), str(token))
        refusal = rules.refusal(path, metadata)
        if refusal:
            # Triton's own status, and in our services the one that says what it is.
            triton = path.startswith((TRITON, "/grpc."))
            code = grpc.StatusCode.UNAVAILABLE if triton else grpc.StatusCode.PERMISSION_DENIED
            context.abort(code, refusal)
        if streams is not None and rules.tokens is not None:

            def revoked() -> tuple[grpc.StatusCode, str] | None:
                error = rules.token_refusal(path, metadata)
                return None if error is None else (status_of(error), str(error))

            streams.end_once(context, revoked)
        return respond(requests, context)

    return respond_if_allowed


def _parsing(
    method: Any, behaviour: Callable[..., Any], path: str, rules: AccessRules | None
) -> Callable[..., Any]:
    """Return a behaviour over bytes; `rules` may refuse a request with settings to change."""
    is_update = rules is not None and path in UPDATES
    parse: Callable[[bytes], Any] = GetMessageClass(method.input_type).FromString
    name = method.input_type.name

    def respond(request: bytes, context: grpc.ServicerContext) -> bytes:
        if len(request) > _LONGEST_QUESTION_BYTES:
            raise errors.InvalidRequest(
                f"a {name} of {len(request)} bytes is not read; it has {_LONGEST_QUESTION_BYTES} "
                "at most"
            )
        try:
            message = parse(request)
        except DecodeError as error:
            raise errors.InvalidRequest(f"the request is no {name}: {error}") from error
        if is_update and rules is not None and message.settings:
            metadata = context.invocation_metadata()
            if (token := rules.token_refusal(path, metadata, updates=True)) is not None:
                raise token
            if update_refusal := rules.update_refusal(path):
                raise errors.Unavailable(update_refusal)
        written: bytes = behaviour(message, context).SerializeToString()
        return written

    return respond


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(request: object, context: object) -> Any:  # noqa: ARG001 - grpc passes both
        raise errors.Unsupported(f"{name} is not offered by this server")

    return refuse


def status_of(error: errors.EdgeServerError) -> grpc.StatusCode:
    """Return the status code of `error`; an error without a mapping is INTERNAL."""
    return STATUS.get(type(error), grpc.StatusCode.INTERNAL)


def _abort(context: grpc.ServicerContext, path: str, error: Exception) -> NoReturn:
    code, text = grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"
    if isinstance(error, errors.EdgeServerError):
        code, text = status_of(error), str(error)
    else:
        log.error("grpc %s: unforeseen error", path, exc_info=error)
    errors.forget_frames(error)
    context.abort(code, header_text(text))


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
            return text[:place]
    return text


class UnaryCall:
    """A unary call: its request is cancelled once the call is over; see `Call`."""

    __slots__ = ("_budget", "_context", "_counted_bytes")

    def __init__(self, context: grpc.ServicerContext, budget: ByteBudget) -> None:
        self._context = context
        self._budget = budget
        self._counted_bytes = 0

    def count(self, size_bytes: int) -> None:
        """Count more bytes until `release`; see `Call`."""
        self._budget.take(size_bytes)
        self._counted_bytes += size_bytes

    def __enter__(self) -> UnaryCall:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Count nothing more: what was made of the request is no longer needed."""
        if self._counted_bytes:
            self._budget.give(self._counted_bytes)
            self._counted_bytes = 0

    @property
    def cancelled(self) -> bool:
        return not self._context.is_active()

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        if not self._context.add_callback(callback):
            callback()


def timeout_s(context: grpc.ServicerContext) -> float | None:
    """Seconds until the caller's deadline; grpc reports "never" as some hundred billion years."""
    left_s = context.time_remaining()
    return None if left_s is None or left_s > threading.TIMEOUT_MAX else left_s
