"""Handlers over bytes for every method that a service describes; every error becomes a status.

And what a method may know of its call, and the doorkeeper that refuses calls before their method.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import msgspec
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from edge_server import errors
from edge_server.api.access import TRITON, UPDATES
from edge_server.api.admission import COUNTED_FROM_BYTES
from edge_server.api.calls import STATUS as STATUS_NAMES
from edge_server.api.calls import RequestMetrics
from edge_server.api.grpc.traffic import COMPRESSED, WATCHED_FROM_BYTES, Traffic
from edge_server.process.text import as_utf8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from edge_server.api.access import AccessRules
    from edge_server.api.admission import ByteBudget
    from edge_server.api.calls import CallThreads

    Handler = grpc.RpcMethodHandler[Any, Any]
    # Returns the reason to refuse a call now; None admits it.
    Refuses = Callable[[], errors.EdgeServerError | None]

log = logging.getLogger(__name__)

STATUS = {error: grpc.StatusCode[status.grpc] for error, status in STATUS_NAMES.items()}
INFER = f"{TRITON}ModelInfer"

# Such requests are short; protobuf's objects can be many times larger than the parsed bytes.
_LONGEST_QUESTION_BYTES = 64 * 1024
# A status travels in HTTP/2 headers, which peers cap; and a text may quote what a client sent.
_LONGEST_TEXT_BYTES = 4000


def method_handlers(
    service: Any,
    servicer: object,
    *,
    over_bytes: object = None,
    traffic: Traffic | None = None,
    rules: AccessRules | None = None,
) -> dict[str, Handler]:
    """Return a handler for each method of the descriptor `service` that calls `servicer`'s method.

    The handlers differ from those of the generated `add_…_to_server`: messages are parsed within
    the call, where a damaged message is the caller's error. Streams read and write bytes, and get
    the context. A method that `servicer` does not define returns UNIMPLEMENTED with its name.

    Args:
        over_bytes: whose methods go before those of `servicer`, and read and write bytes; those
            with one request get a `UnaryCall`.
        traffic: see `unary`.
        rules: may refuse a request with settings to change, and end streams; None allows all.
    """
    handlers = {}
    for method in service.methods:
        path = f"/{service.full_name}/{method.name}"
        behaviour: Any = getattr(over_bytes, method.name, None)
        if behaviour is None:
            behaviour = getattr(servicer, method.name, _refusing(method.name))
            if not method.server_streaming:
                behaviour = _parsing(method, behaviour, path, rules)
        # Errors become statuses here rather than in an interceptor, which would slow every call.
        if method.server_streaming:
            handlers[method.name] = streaming(behaviour, path, traffic, rules)
        else:
            handlers[method.name] = unary(behaviour, path, traffic)
    return handlers


def unary(
    behaviour: Callable[[bytes, UnaryCall], bytes], path: str, traffic: Traffic | None = None
) -> Handler:
    """Return a handler that runs `behaviour` and maps every exception to a status.

    On the wire a call with one request is a stream of one. As such a stream the call reads its
    request itself, so that `traffic` can limit how long the request takes.
    """
    traffic = traffic or Traffic()
    budget = traffic.budget

    def respond(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        request = traffic.read(requests, context)
        if request is None:
            context.abort(
                grpc.StatusCode.UNIMPLEMENTED, "this method requires exactly one request message."
            )
        call = UnaryCall(context, budget)
        try:
            if len(request) >= COUNTED_FROM_BYTES:
                budget.take(len(request))
                call.counted_bytes = len(request)
            if request.startswith(COMPRESSED):
                request = traffic.decompressed(request, call)
            response = behaviour(request, call)
            if len(response) >= WATCHED_FROM_BYTES:
                traffic.send(response, call)
            elif call.counted_bytes:
                call.release()
        except Exception as error:  # noqa: BLE001 - every exception becomes a status
            call.release()
            _abort(context, path, error)
        return response

    return grpc.stream_unary_rpc_method_handler(respond)


def streaming(
    behaviour: Callable[..., Iterator[bytes]],
    path: str,
    traffic: Traffic | None = None,
    rules: AccessRules | None = None,
) -> Handler:
    """Return a handler like `unary`'s, for a behaviour that takes and returns streams; `rules` end
    it once its token is no longer valid."""
    traffic = traffic or Traffic()

    def respond(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        if rules is not None and rules.tokens is not None:
            metadata = context.invocation_metadata()
            traffic.end_once(context, lambda: rules.token_refusal(path, metadata))
        try:
            for response in behaviour(requests, context):
                with traffic.sending(response, context):
                    yield response
                del response
        except grpc.RpcError:
            # Its requests raise it where the client is gone: no status reaches it.
            return
        except Exception as error:  # noqa: BLE001 - every exception becomes a status
            _abort(context, path, error)

    return grpc.stream_stream_rpc_method_handler(respond)


def _parsing(
    method: Any, behaviour: Callable[..., Any], path: str, rules: AccessRules | None
) -> Callable[..., Any]:
    """Return a behaviour over bytes; `rules` may refuse a request with settings to change."""
    is_update = rules is not None and path in UPDATES
    parse = parsing(GetMessageClass(method.input_type))

    def respond(request: bytes, call: UnaryCall) -> bytes:
        message = parse(request)
        if is_update and rules is not None and message.settings:
            metadata = call.context.invocation_metadata()
            if (token := rules.token_refusal(path, metadata, updates=True)) is not None:
                raise token
            if text := rules.refusal(path, metadata, updates=True):
                raise errors.Unavailable(text)
        written: bytes = behaviour(message).SerializeToString()
        return written

    return respond


def parsing(kind: Any) -> Callable[[bytes], Any]:
    """Return a function that parses a short message of that type, or raises InvalidRequest."""
    name = kind.DESCRIPTOR.name

    def parse(request: bytes) -> Any:
        if len(request) > _LONGEST_QUESTION_BYTES:
            raise errors.InvalidRequest(
                f"a {name} of {len(request)} bytes is not read; it has {_LONGEST_QUESTION_BYTES} "
                "at most"
            )
        try:
            return kind.FromString(request)
        except DecodeError as error:
            raise errors.InvalidRequest(f"the request is no {name}: {error}") from error

    return parse


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*_: object) -> Any:
        raise errors.Unsupported(f"{name} is not offered by this server")

    return refuse


def status_of(error: errors.EdgeServerError) -> grpc.StatusCode:
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
    """Return the part of `text` that fits into a header, where gRPC writes each byte that is not
    printable ASCII as three; invalid Unicode is escaped.
    """
    text = as_utf8(text)
    size_bytes = 0
    for place, char in enumerate(text):
        plain = " " <= char <= "~" and char != "%"
        size_bytes += 1 if plain else 3 * len(char.encode())
        if size_bytes > _LONGEST_TEXT_BYTES:
            return text[:place]
    return text


class UnaryCall(msgspec.Struct, eq=False):
    """A unary call: its request is cancelled once the call is over; see `Call`."""

    context: grpc.ServicerContext
    budget: ByteBudget
    counted_bytes: int = 0

    def count(self, size_bytes: int) -> None:
        self.budget.take(size_bytes)
        self.counted_bytes += size_bytes

    def release(self) -> None:
        counted_bytes, self.counted_bytes = self.counted_bytes, 0
        self.budget.give(counted_bytes)

    @property
    def cancelled(self) -> bool:
        return not self.context.is_active()

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        if not self.context.add_callback(callback):
            callback()


class Doorkeeper(grpc.ServerInterceptor):
    """Refuses calls that are not allowed, or for which there is no room.

    gRPC asks it on the one thread that receives all calls. A refused call ends right there, without
    its message and without another thread: at ten times the load that can be served, the remaining
    processor time decides the throughput.
    """

    def __init__(
        self,
        threads: CallThreads,
        refusals: Mapping[str, Refuses],
        rules: AccessRules,
        requests: RequestMetrics | None = None,
    ) -> None:
        self._threads = threads
        self._refusals = refusals
        self._rules = rules if rules.refuse_any else None
        self._requests = requests or RequestMetrics()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        call: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = continuation(call)
        method: str = call.method
        if handler is None:
            return None
        if self._rules is not None:
            metadata = call.invocation_metadata
            if (token := self._rules.token_refusal(method, metadata)) is not None:
                return self._refusing(status_of(token), str(token))
            if text := self._rules.refusal(method, metadata):
                # Triton's own status, and in our services the one that says what it is.
                triton = method.startswith((TRITON, "/grpc."))
                codes = grpc.StatusCode
                return self._refusing(
                    codes.UNAVAILABLE if triton else codes.PERMISSION_DENIED, text
                )
        refusal = self._refusals.get(method)
        error = None if refusal is None else refusal()
        if method == INFER:
            if error is None and self._threads.waiting:
                error = errors.Unavailable(
                    "Exceeds maximum queue size: every thread of the server is taken"
                )
            if error is not None:
                self._requests.failed("grpc", status_of(error).name)
        return handler if error is None else self._refusing(status_of(error), str(error))

    def _refusing(self, code: grpc.StatusCode, text: str) -> Handler:
        def refuse(_: Iterator[bytes], context: grpc.ServicerContext) -> NoReturn:
            context.abort(code, text)

        self._threads.run_next_here()
        return grpc.stream_unary_rpc_method_handler(refuse)
