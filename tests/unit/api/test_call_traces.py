"""What gRPC itself does with a traced request: reading it, and sending its answer."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from edge_server.api.calls import GRPC, traced
from edge_server.inference.tracing import TraceFile, Tracer, TraceRule, TraceWriter
from edge_server.requests import InferRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


REQUEST = InferRequest("m", {})


class Call:
    """A call that ends when the test says so."""

    def __init__(self, *, is_over: bool = False) -> None:
        self._is_over = is_over
        self._callbacks: list[Callable[[], None]] = []

    def when_over(self, callback: Callable[[], None]) -> bool:
        self._callbacks.append(callback)
        return not self._is_over

    def end(self) -> None:
        for callback in self._callbacks:
            callback()


class Written:
    """Traces of every request, and what of them is in the file at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = TraceWriter(TraceFile(str(path)))
        self._writer.start()
        self._tracer = Tracer(TraceRule(timestamps=True, rate=1), self._writer)

    def request(self, call: Call | None, began_ns: int = 0) -> InferRequest:
        reading_ns = (began_ns, time.monotonic_ns())
        when_over = None if call is None else call.when_over
        return traced(self._tracer, REQUEST, GRPC, reading_ns, tuple, when_over=when_over)

    def moments(self) -> dict[str, int]:
        """Those of the one request that is there; none where it is not."""
        self._writer.stop(30.0)
        if not self._path.exists():
            return {}
        elements: list[dict[str, Any]] = json.loads(self._path.read_text())
        return {each["name"]: each["ns"] for each in elements[1]["timestamps"]}


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "trace.json")


def run(request: InferRequest) -> None:
    assert request.trace is not None
    request.trace.begin(1)
    request.trace.responded(final=True)


def test_a_response_is_sent_from_its_handover_until_the_end_of_the_call(
    written: Written,
) -> None:
    call = Call()
    request = written.request(call)
    run(request)
    assert request.trace is not None
    request.trace.mark(GRPC.send_start)
    call.end()
    assert list(written.moments()) == [
        "GRPC_WAITREAD_END",
        "REQUEST_START",
        "INFER_RESPONSE_COMPLETE",
        "REQUEST_END",
        "GRPC_SEND_START",
        "GRPC_SEND_END",
    ]


@pytest.mark.parametrize("is_over", [False, True])
def test_nothing_is_sent_to_a_caller_that_has_gone(written: Written, is_over: bool) -> None:
    call = Call(is_over=is_over)
    request = written.request(call)
    if not is_over:
        call.end()
    run(request)
    moments = written.moments()
    assert "REQUEST_END" in moments
    assert not [name for name in moments if name.startswith("GRPC_SEND")]


def test_a_streams_request_lasts_until_its_last_response(written: Written) -> None:
    began_ns = time.monotonic_ns()
    run(written.request(None, began_ns))
    moments = written.moments()
    assert moments["GRPC_WAITREAD_START"] == began_ns <= moments["GRPC_WAITREAD_END"]


def test_a_request_that_is_not_selected_has_no_trace() -> None:
    tracer = Tracer(TraceRule(timestamps=True, rate=1))
    assert traced(tracer, REQUEST, GRPC, (0, 0), tuple) is REQUEST
