"""Messages arrive whole and in order, however the socket cuts them; a dead peer is an error."""

from __future__ import annotations

import socket
import threading
from operator import mul
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.backends.python.messages import (
    ChildRequest,
    Execute,
    FromChild,
    FromDaemon,
    LogLine,
    Ready,
)
from edge_server.process.child import Channel, ChannelClosed, MessageTooLong, NotUnderstood

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    yield here, there
    here.close()
    there.close()


@settings(deadline=None)
@given(
    # Longer than what a socket holds, now and then.
    st.lists(st.builds(mul, st.text(max_size=20), st.sampled_from([1, 20_000])), max_size=5),
    st.integers(1, 5000),
)
def test_messages_arrive_whole_and_in_order(texts: list[str], seed: int) -> None:
    here, there = socket.socketpair()
    with here, there:
        sender: Channel[FromChild] = Channel(here, FromChild)
        receiver: Channel[FromChild] = Channel(there, FromChild)

        def send() -> None:
            for text in texts:
                sender.send(LogLine(seed, text))
            sender.send(Ready(True))

        thread = threading.Thread(target=send)
        thread.start()
        received: list[FromChild] = []
        while not received or not isinstance(received[-1], Ready):
            received += receiver.receive()
        thread.join()
    assert received[:-1] == [LogLine(seed, text) for text in texts]


def test_every_number_that_a_client_may_send_reaches_the_model(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    """One that did not would end the model's process, and with it all requests that it runs."""
    daemon: Channel[FromChild] = Channel(sockets[0], FromChild)
    child: Channel[FromDaemon] = Channel(sockets[1], FromDaemon)
    parameters = {"int64": -(1 << 63), "uint64": (1 << 64) - 1, "double": 1e308, "bool": True}
    sent = Execute(1, [ChildRequest(1, "", [], [], (1 << 64) - 1, parameters=parameters)])
    daemon.send(sent)
    assert child.receive() == [sent]


def test_the_end_of_the_peer_is_an_error(sockets: tuple[socket.socket, socket.socket]) -> None:
    here, there = sockets
    channel: Channel[FromChild] = Channel(here, FromChild)
    there.close()
    with pytest.raises(ChannelClosed):
        channel.receive()
    with pytest.raises(ChannelClosed):
        channel.send(Ready(True))


def test_a_peer_that_does_not_read_is_waited_for_only_so_long(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    channel: Channel[FromChild] = Channel(sockets[0], FromChild, timeout_s=0.01)
    with pytest.raises(ChannelClosed, match="does not read"):
        channel.send(LogLine(0, "x" * 10_000_000))


def test_a_peer_that_sends_nothing_is_not_gone(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    channel: Channel[FromChild] = Channel(sockets[0], FromChild, timeout_s=0.01)
    assert channel.receive() == []


@pytest.mark.parametrize("data", [b"\x03\x00\x00\x00abc", b"\xff\xff\xff\xff", b"\x00\x00\x00\x00"])
def test_other_bytes_are_no_message(
    sockets: tuple[socket.socket, socket.socket], data: bytes
) -> None:
    here, there = sockets
    channel: Channel[FromChild] = Channel(here, FromChild)
    there.sendall(data)
    with pytest.raises(ChannelClosed, match="a message"):
        channel.receive()


def test_a_message_that_is_too_long_is_neither_sent_nor_received(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    here, there = sockets
    careful: Channel[FromChild] = Channel(here, FromChild, longest_sent_bytes=1000)
    receiver: Channel[FromChild] = Channel(there, FromChild, longest_received_bytes=1000)
    with pytest.raises(MessageTooLong, match=r"of 10.. bytes at once; at most 1000 are taken"):
        careful.send(LogLine(20, "x" * 1000))
    careful.send(LogLine(20, "fits"))
    assert receiver.receive() == [LogLine(20, "fits")]
    liar: Channel[FromChild] = Channel(here, FromChild)
    liar.send(LogLine(20, "x" * 1000))
    with pytest.raises(NotUnderstood, match=r"a message of 10.. bytes; at most 1000 are taken"):
        receiver.receive()
