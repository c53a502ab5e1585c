"""A lost source is opened after growing delays, or when it is seen again, and no more often."""

from __future__ import annotations

import errno
import socket
from concurrent.futures import Future
from typing import TYPE_CHECKING

from edge_server.cameras import live_source
from edge_server.cameras.live_source import PortProbe, Reopening, ReturnWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class Watch:
    """Sees the source whenever `back` is set."""

    def __init__(self) -> None:
        self.due = 0.0
        self.back = False

    def look(self, now: float) -> bool:
        return self.back


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


def test_a_source_is_back_where_it_was_away_before() -> None:
    seen: list[bool | None] = [True, False, None, None, False, True, True]
    watch = ReturnWatch(lambda: seen.pop(0))
    assert [watch.look(float(now)) for now in range(7)] == [False] * 5 + [True, False]
    assert not watch.look(watch.due - 0.01)


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
        future: Future[bool] = Future()
        future.set_result(work())
        return future

    monkeypatch.setattr(live_source, "start_future", at_once)
    monkeypatch.setattr(socket, "create_connection", connect)
    watch = ReturnWatch(PortProbe("camera", 554))
    assert [watch.look(float(now)) for now in range(4)] == [False, False, False, True]
