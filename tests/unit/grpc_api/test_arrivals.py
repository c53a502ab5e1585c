"""A message that does not come ends its call, and messages on their way do not fill the memory."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import grpc
import pytest

from edge_server.grpc_api.arrivals import Arrivals
from edge_server.grpc_api.byte_budget import MIB, ByteBudget
from edge_server.grpc_api.call_threads import CallThreads
from edge_server.grpc_api.status import unary

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 20.0


class Call:
    """A call whose message never comes, until it is cancelled."""

    def __init__(self, arrivals: Arrivals, waiting: int = 0) -> None:
        self.cancelled = threading.Event()
        reading = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(arrivals, waiting, reading))
        self._thread.start()
        assert reading.wait(PATIENCE_S)

    def _read(self, arrivals: Arrivals, waiting: int, reading: threading.Event) -> None:
        def requests() -> Iterator[bytes]:
            reading.set()
            assert self.cancelled.wait(PATIENCE_S)
            yield b"too late"

        arrivals.read(requests(), self, lambda: waiting)  # type: ignore[arg-type]

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        self.cancel()
        self._thread.join()


class Memory:
    """Of a process; the test says how much."""

    def __init__(self) -> None:
        self.bytes = 1000 * MIB

    def __call__(self) -> int:
        return self.bytes


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def arrivals(memory: Memory) -> Arrivals:
    """With room for two of the longest messages; it looks when it is told to."""
    return Arrivals(ByteBudget(8 * MIB), 3.0, 4 * MIB, memory)


def test_a_message_that_does_not_come_in_time_ends_its_call(arrivals: Arrivals) -> None:
    call = Call(arrivals)
    now = time.monotonic()
    arrivals.tick(now + 1)
    assert not call.cancelled.is_set()
    arrivals.tick(now + 3.1)
    assert call.cancelled.is_set()
    call.close()
    arrivals.tick(now + 100)  # nothing is left of it


def test_it_has_less_time_while_calls_wait_for_its_thread(arrivals: Arrivals) -> None:
    calls = [Call(arrivals), Call(arrivals, waiting=1)]
    arrivals.tick(time.monotonic() + 1)
    assert [call.cancelled.is_set() for call in calls] == [False, True]
    for call in calls:
        call.close()


def test_the_youngest_go_when_more_are_on_their_way_than_there_is_memory_for(
    arrivals: Arrivals, memory: Memory
) -> None:
    calls = [Call(arrivals) for _ in range(5)]
    now = time.monotonic() + 0.1
    arrivals.tick(now - 0.1)  # none of them is long yet
    memory.bytes += 7 * MIB
    arrivals.tick(now)
    assert not any(call.cancelled.is_set() for call in calls)
    memory.bytes += 2 * MIB
    arrivals.tick(now)
    assert [call.cancelled.is_set() for call in calls] == [False, False, True, True, True]
    for call in calls:
        call.close()


def test_what_else_fills_the_memory_ends_no_call(arrivals: Arrivals, memory: Memory) -> None:
    calls = [Call(arrivals) for _ in range(2)]
    for _ in range(5):
        memory.bytes += 1000 * MIB
        arrivals.tick(time.monotonic() + 1)
    assert not any(call.cancelled.is_set() for call in calls)
    for call in calls:
        call.close()


def test_many_calls_are_told_in_one_line(
    arrivals: Arrivals, caplog: pytest.LogCaptureFixture
) -> None:
    now = time.monotonic()
    for seconds in (10, 20):
        calls = [Call(arrivals) for _ in range(3)]
        arrivals.tick(now + seconds)
        for call in calls:
            call.close()
    assert [record.message for record in caplog.records] == [
        "grpc: 3 calls were cut off, their messages did not come"
    ]


def test_half_sent_calls_give_their_threads_back() -> None:
    """The real server with two threads, and clients who hold both."""
    threads = CallThreads(2, "grpc")
    arrivals = Arrivals(ByteBudget(), 0.2, MIB)
    server = grpc.server(threads)  # type: ignore[arg-type]
    handler = unary(
        lambda request, _: request, "s.m", lambda r, c: arrivals.read(r, c, threads.waiting)
    )
    server.add_registered_method_handlers("s", {"m": handler})
    port = server.add_insecure_port("127.0.0.1:0")
    done = threading.Event()
    arrivals.start()
    server.start()

    def nothing() -> Iterator[bytes]:
        done.wait(PATIENCE_S)
        yield b""

    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            held = [
                channel.stream_unary("/s/m").future(nothing(), timeout=PATIENCE_S) for _ in range(6)
            ]
            assert channel.unary_unary("/s/m")(b"one", timeout=PATIENCE_S) == b"one"
            assert {call.code() for call in held} == {grpc.StatusCode.CANCELLED}
            with pytest.raises(grpc.RpcError) as caught:
                channel.stream_unary("/s/m")(iter(()), timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            done.set()
    finally:
        done.set()
        arrivals.close()
        server.stop(None).wait()
        threads.shutdown()
