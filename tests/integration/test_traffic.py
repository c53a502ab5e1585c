"""Calls whose messages stall end, with a real server: their threads and their bytes are free."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import grpc
import pytest
from support.waiting import TIMEOUT_S, wait_until

from edge_server.api.admission import MIB
from edge_server.api.calls import CallThreads
from edge_server.api.grpc import traffic as traffic_module
from edge_server.api.grpc.methods import streaming, unary
from edge_server.api.grpc.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_a_stream_whose_client_does_not_read_ends_and_gives_its_bytes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traffic_module, "SLOW_READER_S", 0.2)
    traffic = Traffic(within_s=0.2)
    ended = threading.Event()

    def answer(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            yield next(requests) * 64
        finally:
            ended.set()

    server = grpc.server(CallThreads(2, "grpc"))
    server.add_registered_method_handlers("s", {"m": streaming(answer, "s.m", traffic)})
    port = server.add_insecure_port("127.0.0.1:0")
    traffic.start()
    server.start()
    try:
        unlimited = [("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", unlimited) as channel:
            # 64 MiB are more than gRPC's client takes while nobody reads.
            call = channel.stream_stream("/s/m")(iter([bytes(MIB)]), timeout=TIMEOUT_S)
            assert ended.wait(TIMEOUT_S)
            wait_until(lambda: traffic.budget.room_bytes == traffic.budget.limit_bytes)
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code() is grpc.StatusCode.CANCELLED
    finally:
        server.stop(None).wait()
        traffic.close()


def test_half_sent_calls_give_their_threads_back() -> None:
    """The real server with two threads, and clients who hold both."""
    threads = CallThreads(2, "grpc")
    traffic = Traffic(within_s=0.2, waiting=lambda: len(threads.waiting))
    server = grpc.server(threads)
    handler = unary(lambda request, _: request, "s.m", traffic)
    server.add_registered_method_handlers("s", {"m": handler})
    port = server.add_insecure_port("127.0.0.1:0")
    done = threading.Event()
    traffic.start()
    server.start()

    def nothing() -> Iterator[bytes]:
        done.wait(TIMEOUT_S)
        yield b""

    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            held = [
                channel.stream_unary("/s/m").future(nothing(), timeout=TIMEOUT_S) for _ in range(6)
            ]
            assert channel.unary_unary("/s/m")(b"one", timeout=TIMEOUT_S) == b"one"
            assert {call.code() for call in held} == {grpc.StatusCode.CANCELLED}
            with pytest.raises(grpc.RpcError) as caught:
                channel.stream_unary("/s/m")(iter(()), timeout=TIMEOUT_S)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            done.set()
    finally:
        done.set()
        traffic.close()
        server.stop(None).wait()
        threads.shutdown()
