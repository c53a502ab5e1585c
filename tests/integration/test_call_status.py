"""Every error becomes a status that says what kind it is, and none escapes as a stack trace."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from support.waiting import TIMEOUT_S

from edge_server import errors
from edge_server.api.grpc.methods import streaming, unary

if TYPE_CHECKING:
    from collections.abc import Iterator


class Raises(grpc.GenericRpcHandler):
    """Answers `/test/<Name>` by raising what `failures` has under that name."""

    def __init__(self, failures: dict[str, Exception]) -> None:
        self._failures = failures

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        error = self._failures[handler_call_details.method.rpartition("/")[2]]

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            raise error

        def answer_stream(
            requests: Iterator[bytes], context: grpc.ServicerContext
        ) -> Iterator[bytes]:
            yield b"first"
            raise error

        if handler_call_details.method.startswith("/stream/"):
            return streaming(answer_stream, "stream.Method")
        return unary(answer, "test.Method")


@pytest.fixture
def call() -> Iterator[Any]:
    failures: dict[str, Exception] = {}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([Raises(failures)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")

    def call_and_fail(error: Exception) -> grpc.RpcError:
        failures["Method"] = error
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/test/Method")(b"", timeout=TIMEOUT_S)
        return caught.value

    def stream_and_fail(error: Exception) -> grpc.RpcError:
        failures["Method"] = error
        answers = channel.stream_stream("/stream/Method")(iter([]), timeout=TIMEOUT_S)
        assert next(answers) == b"first"
        with pytest.raises(grpc.RpcError) as caught:
            next(answers)
        return caught.value

    failing: Any = call_and_fail
    failing.stream = stream_and_fail
    yield failing
    channel.close()
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.NotFound, grpc.StatusCode.NOT_FOUND),
        (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
        (errors.Unsupported, grpc.StatusCode.UNIMPLEMENTED),
        (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
        (errors.InternalError, grpc.StatusCode.INTERNAL),
        (errors.ModelConfigError, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.SettingsError, grpc.StatusCode.INTERNAL),
        (errors.SourceError, grpc.StatusCode.INTERNAL),
        (errors.StageStuck, grpc.StatusCode.INTERNAL),
    ],
)
def test_each_of_our_errors_arrives_with_its_status_and_its_text(
    call: Any, kind: type[errors.EdgeServerError], status: grpc.StatusCode
) -> None:
    error = call(kind("what happened"))
    assert error.code() is status
    assert error.details() == "what happened"


@pytest.mark.parametrize("char", ["x", "%", "\n", "ü", "\U0001f600", "\ud800"])
def test_a_text_that_quotes_too_much_of_a_client_still_arrives(call: Any, char: str) -> None:
    error = call(errors.NotFound(char * 100_000))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert error.details().startswith(r"\ud800" if char == "\ud800" else char * 3)


def test_an_unforeseen_error_is_internal_and_names_its_kind(call: Any) -> None:
    error = call(ZeroDivisionError("division by zero"))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == "ZeroDivisionError: division by zero"


def test_an_error_in_the_middle_of_a_stream_is_a_status_too(call: Any) -> None:
    error = call.stream(errors.NotFound("what happened"))
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "what happened")
    error = call.stream(ZeroDivisionError("division by zero"))
    assert (error.code(), error.details()) == (
        grpc.StatusCode.INTERNAL,
        "ZeroDivisionError: division by zero",
    )
