"""A lost source is opened after growing delays, or when it is seen again, and no more often."""

from __future__ import annotations

import errno
import socket
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from edge_server.cameras import live_source
from edge_server.cameras.live_source import Reopening, look_for_port
from edge_server.cameras.source_uri import parse_source_uri

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def known(there: bool) -> Future[bool]:
    found: Future[bool] = Future()
    found.set_result(there)
    return found


def waits(reopening: Reopening, *losses: tuple[float, float]) -> list[float]:
    found = []
    for now, ran_s in losses:
        reopening.lose(now, ran_s)
        found.append(reopening.wait_s(now))
    return found


def test_delays_grow_until_the_source_has_run_for_long() -> None:
    reopening = Reopening(0.2, 5.0, None)
    first, *_, last = waits(reopening, *((float(each), 0.1) for each in range(10)))
    assert first <= 0.2 < last <= 5.0
    assert waits(reopening, (100.0, 5.1))[0] <= 0.2


def test_a_source_that_is_seen_again_is_opened_at_once_but_not_over_and_over() -> None:
    looks = 0

    def look() -> Future[bool]:
        nonlocal looks
        looks += 1
        return known(looks % 2 == 0)

    reopening = Reopening(1000.0, 1000.0, look)
    opened = []
    reopening.lose(0.0, 0.0)
    for step in range(130):
        if reopening.is_due(step / 10):
            opened.append(step / 10)
            reopening.lose(step / 10, 0.0)
    assert opened[2] < 3.0
    assert opened[3] - opened[0] >= 10.0


def test_a_source_is_back_where_it_was_away_before() -> None:
    slow: Future[bool] = Future()
    seen = [known(True), known(False), slow, known(True), known(True)]
    reopening = Reopening(1000.0, 1000.0, lambda: seen.pop(0))
    reopening.lose(0.0, 0.0)
    assert not any(reopening.is_due(float(now)) for now in range(4))
    slow.set_result(False)
    assert [reopening.is_due(float(now)) for now in range(4, 7)] == [False, True, False]
    assert not seen
    reopening.lose(7.0, 0.0)
    reopening.end()
    assert not reopening.is_due(8.0)


def test_a_camera_whose_network_was_down_or_that_lost_its_name_is_seen_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes: list[BaseException | socket.socket] = [
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        UnicodeError("label too long"),
        socket.socket(),
    ]

    def connect(*_: object) -> socket.socket:
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def at_once(_name: str, work: Callable[[], bool]) -> Future[bool]:
        return known(work())

    monkeypatch.setattr(live_source, "start_future", at_once)
    monkeypatch.setattr(socket, "create_connection", connect)
    look = partial(look_for_port, parse_source_uri("rtsp://camera:554/live"))
    reopening = Reopening(1000.0, 1000.0, look)
    reopening.lose(0.0, 0.0)
    assert [reopening.is_due(float(now)) for now in range(4)] == [False, False, False, True]
