"""Instances are lent one caller at a time, urgent callers first, and never past a deadline."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from edge_server.errors import DeadlineExceeded
from edge_server.serving.instance_pool import InstancePool

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 10.0


class Nothing:
    def __init__(self) -> None:
        self.closed = False

    def execute(self, requests: object) -> None: ...

    def close(self) -> None:
        self.closed = True


@contextmanager
def lent(pool: InstancePool, *, urgent: bool, deadline: float | None) -> Iterator[None]:
    instance = pool.take(urgent=urgent, deadline=deadline)
    try:
        yield
    finally:
        pool.give_back(instance)


def test_nobody_waits_past_a_deadline() -> None:
    pool = InstancePool([Nothing()])
    with lent(pool, urgent=False, deadline=None), pytest.raises(DeadlineExceeded):
        pool.take(urgent=False, deadline=time.monotonic() + 0.01)
    with lent(pool, urgent=False, deadline=time.monotonic() + PATIENCE_S):
        pass


def test_dead_work_is_not_begun() -> None:
    pool = InstancePool([Nothing()])
    with pytest.raises(DeadlineExceeded):
        pool.take(urgent=False, deadline=time.monotonic() - 1)
    with lent(pool, urgent=True, deadline=None):
        pass


def test_urgent_callers_go_before_those_who_came_first() -> None:
    pool = InstancePool([Nothing()])
    served: list[str] = []

    def ask(name: str, *, urgent: bool) -> threading.Thread:
        def run() -> None:
            with lent(pool, urgent=urgent, deadline=None):
                served.append(name)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    with lent(pool, urgent=False, deadline=None):
        threads = [ask(f"client {n}", urgent=False) for n in range(3)]
        threads.append(ask("camera", urgent=True))
        while pool._urgent_waiting == 0:
            assert threads[-1].is_alive()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert served[0] == "camera"
    assert sorted(served[1:]) == ["client 0", "client 1", "client 2"]


def test_under_a_crowd_every_caller_is_served_and_none_is_forgotten() -> None:
    pool = InstancePool([Nothing(), Nothing()])
    served = [0]
    counting = threading.Lock()

    def ask(urgent: bool) -> None:
        for _ in range(200):
            with lent(pool, urgent=urgent, deadline=None):
                pass
            with counting:
                served[0] += 1

    threads = [threading.Thread(target=ask, args=(n % 3 == 0,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert served == [1600]


def test_the_longest_run_is_the_oldest_that_has_not_ended() -> None:
    pool = InstancePool([Nothing(), Nothing()])
    assert pool.longest_run_s(time.monotonic()) == 0.0
    with lent(pool, urgent=False, deadline=None):
        now = time.monotonic()
        assert 5.0 <= pool.longest_run_s(now + 5.0) < 6.0
    assert pool.longest_run_s(time.monotonic()) == 0.0


def test_closing_closes_every_instance() -> None:
    instances = [Nothing(), Nothing()]
    InstancePool(instances).close()
    assert all(instance.closed for instance in instances)
