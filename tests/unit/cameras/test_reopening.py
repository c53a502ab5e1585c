"""A lost source is opened after growing delays, or when it is seen again, and no more often."""

from __future__ import annotations

import errno
import socket
from concurrent.futures import Future
from typing import TYPE_CHECKING

from edge_server.cameras import reopening
from edge_server.cameras.reopening import PortWatch, Reopening

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class Watch:
    """Sees the source whenever `back` is set."""

    def __init__(self) -> None:
        self.due = 0.0
        self.back = False
        self.closed = 0

    def look(self, now: float) -> bool:
        return self.back

    def close(self) -> None:
        self.closed += 1


def waits(reopening: Reopening, *losses: tuple[float, float]) -> list[float]:
    found = []
    for now, ran_s in losses:
        reopening.lose(now, ran_s)
        found.append(reopening.wait_s(now))
    return found


def test_delays_grow_until_the_source_has_run_for_long() -> None:
    reopening = Reopening(0.2, 5.0, lambda: None)
    first, *_, last = waits(reopening, *((float(each), 0.1) for each in range(10)))
    assert first <= 0.2 < last <= 5.0
    assert waits(reopening, (100.0, 5.1))[0] <= 0.2


def test_a_source_that_is_seen_again_is_opened_at_once_but_not_over_and_over() -> None:
    watch = Watch()
    reopening = Reopening(5.0, 5.0, lambda: watch)
    reopening.lose(0.0, 0.0)
    assert not reopening.is_due(0.1)
    watch.back = True
    opened = 0
    for step in range(90):
        opened += reopening.is_due(step / 10)
        reopening.lose(step / 10, 0.0)
    assert opened == 3
    assert reopening.is_due(11.0)


def test_each_watch_is_closed_once() -> None:
    made: list[Watch] = []

    def new() -> Watch:
        made.append(Watch())
        return made[-1]

    reopening = Reopening(0.2, 5.0, new)
    waits(reopening, (0.0, 0.0), (1.0, 0.0))
    reopening.end()
    reopening.end()
    assert [watch.closed for watch in made] == [1, 1]


def refuse(monkeypatch: pytest.MonkeyPatch, outcomes: list[int]) -> None:
    """Have each connection begin with the next of `outcomes`, and be open where that is no error;
    names are looked up at once."""

    class Socket(socket.socket):
        def connect_ex(self, _address: object) -> int:
            return outcomes.pop(0)

    def at_once(_name: str, work: Callable[[], object]) -> Future[object]:
        future: Future[object] = Future()
        future.set_result(work())
        return future

    monkeypatch.setattr(reopening, "start_future", at_once)
    monkeypatch.setattr(reopening.socket, "socket", Socket)


def test_a_camera_whose_network_was_down_is_seen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, [errno.ENETUNREACH, 0])
    watch = PortWatch("192.0.2.1", 554)
    # An unconnected socket has no error either, as one that is connected.
    assert [watch.look(0.0), watch.look(1.0)] == [False, True]
    watch.close()


def test_a_camera_at_one_of_its_addresses_alone_is_not_back_at_each_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = errno.ECONNREFUSED
    refuse(monkeypatch, [refused, 0, 0, refused, refused, 0])
    address = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", 554))
    monkeypatch.setattr(reopening.socket, "getaddrinfo", lambda *_, **__: [address, address])
    watch = PortWatch("camera", 554)
    assert [watch.look(float(now)) for now in range(6)] == [False] * 5 + [True]
    watch.close()
