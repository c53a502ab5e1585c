"""Builds handlers over bytes for every method that a service describes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from edge_server.api.grpc.status import streaming, unary
from edge_server.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    import grpc

    from edge_server.api.grpc.traffic import Traffic

    Handler = grpc.RpcMethodHandler[Any, Any]

# Such requests are short; protobuf's objects can be many times larger than the parsed bytes.
LONGEST_QUESTION_BYTES = 64 * 1024


def method_handlers(
    service: Any,
    servicer: object,
    over_bytes: Collection[str] = (),
    traffic: Traffic | None = None,
) -> dict[str, Handler]:
    """Return a handler for each method of the descriptor `service` that calls `servicer`'s method.

    The handlers differ from those of the generated `add_…_to_server`: messages are parsed within
    the call, where a damaged message is the caller's error, and the methods in `over_bytes` read
    and write bytes themselves. A method that `servicer` does not define returns UNIMPLEMENTED with
    its name.

    Args:
        traffic: see `unary`.
    """

    def handler(method: Any, answer: Callable[..., Any]) -> Handler:
        # Errors become statuses here rather than in an interceptor, which would slow every call.
        if method.server_streaming:
            return streaming(answer, method.full_name, traffic)
        return unary(answer, method.full_name, traffic)

    handlers = {}
    for method in service.methods:
        answer = getattr(servicer, method.name, None)
        if method.name not in vars(type(servicer)) or answer is None:
            handlers[method.name] = handler(method, _refusing(method))
        elif method.name in over_bytes:
            handlers[method.name] = handler(method, answer)
        else:
            handlers[method.name] = handler(method, _parsing(method, answer))
    return handlers


def _parsing(method: Any, answer: Callable[..., Any]) -> Callable[..., bytes]:
    read = GetMessageClass(method.input_type).FromString

    def answer_parsed(request: bytes, context: grpc.ServicerContext) -> bytes:
        if len(request) > LONGEST_QUESTION_BYTES:
            raise InvalidRequest(
                f"a {method.input_type.name} of {len(request)} bytes is not read; it has "
                f"{LONGEST_QUESTION_BYTES} at most"
            )
        try:
            message = read(request)
        except DecodeError as error:
            raise InvalidRequest(f"the request is no {method.input_type.name}: {error}") from error
        written: bytes = answer(message, context).SerializeToString()
        return written

    return answer_parsed


def _refusing(method: Any) -> Callable[..., Any]:
    text = f"{method.name} is not offered by this server"

    def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:  # noqa: ARG001
        raise Unsupported(text)

    def refuse_stream(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:  # noqa: ARG001
        raise Unsupported(text)
        yield b""

    # On the wire a call with one request is a stream of one.
    return refuse_stream if method.server_streaming else refuse
