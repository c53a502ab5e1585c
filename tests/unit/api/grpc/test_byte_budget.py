"""Requests that do not fit together wait outside, and memory goes back once they have gone."""

from __future__ import annotations

import threading
import time

import pytest

from edge_server.api.grpc.byte_budget import MIB, ByteBudget
from edge_server.errors import Unavailable

PATIENCE_S = 20.0


def test_what_does_not_fit_is_turned_away_by_name_and_may_come_again() -> None:
    budget = ByteBudget(3 * MIB)
    with budget.hold(2 * MIB):
        with (
            pytest.raises(Unavailable, match=r"of 3145728 at most \(grpc.max_pending_bytes\)"),
            budget.hold(2 * MIB),
        ):
            raise AssertionError("it is let in")
        with budget.hold(MIB):
            pass
    with budget.hold(2 * MIB):
        pass


def test_one_request_alone_is_always_taken() -> None:
    with ByteBudget(MIB).hold(2 * MIB):
        pass


def test_small_requests_are_not_counted() -> None:
    budget = ByteBudget(MIB)
    with budget.hold(MIB), budget.hold(1000):
        pass


def test_who_may_not_be_turned_away_waits() -> None:
    budget = ByteBudget(MIB)
    budget.take(MIB)
    assert not budget.take_when_it_fits(1, lambda: True)
    taken = threading.Event()

    def wait() -> None:
        assert budget.take_when_it_fits(1, lambda: False)
        taken.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not taken.is_set()
    budget.give(MIB)
    assert taken.wait(PATIENCE_S)
    waiting.join()


def test_memory_is_due_once_when_it_has_been_quiet_after_many_bytes() -> None:
    budget, now = ByteBudget(), time.monotonic()
    asked = []
    budget.when_many = lambda: asked.append(True)
    with budget.hold(MIB):
        pass
    assert not asked
    assert not budget.memory_is_due(now + 100)
    with budget.hold(10 * MIB):
        assert not budget.memory_is_due(now + 3)
    assert asked == [True]
    assert budget.waits_for_quiet
    assert not budget.memory_is_due(now + 4)
    assert budget.memory_is_due(now + 6)
    assert not budget.memory_is_due(now + 100)
    assert not budget.waits_for_quiet


def test_memory_is_due_now_and_then_where_it_never_becomes_quiet() -> None:
    budget, now = ByteBudget(), time.monotonic()
    with budget.hold(10 * MIB):
        due = [budget.memory_is_due(now + second) for second in range(23)]
    assert due == ([False] * 11 + [True]) + ([False] * 10 + [True])
    # What lay in use then lies free only now.
    due = [budget.memory_is_due(now + second) for second in range(23, 40)]
    assert due == [False, False, True] + [False] * 14


def test_memory_is_due_after_a_request_that_was_refused() -> None:
    budget, now = ByteBudget(8 * MIB), time.monotonic()
    with budget.hold(MIB), pytest.raises(Unavailable), budget.hold(30 * MIB):
        pass
    assert budget.memory_is_due(now + 3)
