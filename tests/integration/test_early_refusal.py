"""What cannot be let in is refused without its message, and without a thread of the server's."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import grpc
import pytest
from support.waiting import TIMEOUT_S

from edge_server.api.access import AccessRules
from edge_server.api.calls import CallThreads
from edge_server.api.grpc.methods import Doorkeeper, unary
from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.api.grpc.methods import UnaryCall


class Door:
    """A server of one method, `/s/m`, one thread and a gate."""

    def __init__(self) -> None:
        self.refusal: Unavailable | None = None
        self.answering = threading.Semaphore(0)
        self.go_on = threading.Event()
        threads = CallThreads(1, "grpc")
        refuses = Doorkeeper(threads, {"/s/m": lambda: self.refusal}, AccessRules("", {}))
        self._server = grpc.server(threads, interceptors=[refuses])
        handlers = {"m": unary(self._answer, "s.m")}
        self._server.add_registered_method_handlers("s", handlers)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self.ask = self._channel.unary_unary("/s/m")
        self.ask_without_a_message = self._channel.stream_unary("/s/m")

    def _answer(self, request: bytes, _call: UnaryCall) -> bytes:
        self.answering.release()
        assert self.go_on.wait(TIMEOUT_S)
        return request

    def close(self) -> None:
        self.go_on.set()
        self._channel.close()
        self._server.stop(None).wait()


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.close()


def test_an_admitted_call_runs_the_method(door: Door) -> None:
    door.go_on.set()
    assert door.ask(b"one", timeout=TIMEOUT_S) == b"one"


@pytest.mark.parametrize("size", [3, 3_000_000])
def test_a_refusal_comes_while_every_thread_is_taken(door: Door, size: int) -> None:
    taken = door.ask.future(b"taken", timeout=TIMEOUT_S)
    assert door.answering.acquire(timeout=TIMEOUT_S)
    door.refusal = Unavailable("Exceeds maximum queue size")
    for _ in range(20):
        refused = door.ask.future(bytes(size), timeout=TIMEOUT_S)
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        assert refused.details() == "Exceeds maximum queue size"
    door.refusal = None
    door.go_on.set()
    assert taken.result() == b"taken"
    assert door.ask(b"again", timeout=TIMEOUT_S) == b"again"


def test_a_refusal_needs_no_message(door: Door) -> None:
    door.refusal = Unavailable("full")
    say_no_more = threading.Event()

    def nothing() -> Iterator[bytes]:
        say_no_more.wait(TIMEOUT_S)
        yield b""

    call = door.ask_without_a_message.future(nothing(), timeout=TIMEOUT_S)
    assert call.code() is grpc.StatusCode.UNAVAILABLE
    say_no_more.set()
