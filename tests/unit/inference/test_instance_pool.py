"""Instances are lent one caller at a time, urgent callers first, and never past a deadline."""

from __future__ import annotations

import math
import queue
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from support.model_configs import config_of
from support.waiting import TIMEOUT_S, wait_until

from edge_server.backends.contract import TensorInstance, TensorModel
from edge_server.errors import Cancelled, DeadlineExceeded, InternalError
from edge_server.inference.direct import InstancePool
from edge_server.inference.line import RateLimiter, ResourceLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.model_config.config import ModelConfig, Placement


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


def test_no_caller_waits_past_a_deadline() -> None:
    pool = InstancePool([Nothing()])
    with lent(pool, urgent=False, deadline=None), pytest.raises(DeadlineExceeded):
        pool.take(urgent=False, deadline=time.monotonic() + 0.01)
    with lent(pool, urgent=False, deadline=time.monotonic() + TIMEOUT_S):
        pass


def test_dead_work_is_not_begun() -> None:
    pool = InstancePool([Nothing()])
    with pytest.raises(DeadlineExceeded):
        pool.take(urgent=False, deadline=time.monotonic() - 1)
    with lent(pool, urgent=True, deadline=None):
        pass


class Caller:
    """A caller that may cancel, and notes the callbacks for that."""

    def __init__(self) -> None:
        self.cancelled = False
        self.callbacks: queue.Queue[Callable[[], None]] = queue.Queue()

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        self.callbacks.put(callback)

    def go(self) -> None:
        self.cancelled = True
        self.callbacks.get(timeout=TIMEOUT_S)()


def test_a_caller_that_goes_leaves_the_queue_at_once_and_takes_no_other_along() -> None:
    pool = InstancePool([Nothing()])
    left: queue.Queue[str] = queue.Queue()
    callers = {name: Caller() for name in ("stays", "goes")}

    def take(name: str) -> None:
        try:
            pool.give_back(pool.take(urgent=False, deadline=None, cancellation=callers[name]))
        except Cancelled:
            left.put(f"{name} unserved")
        else:
            left.put(f"{name} served")

    threads = [threading.Thread(target=take, args=(name,)) for name in callers]
    with lent(pool, urgent=False, deadline=None):
        for thread in threads:
            thread.start()
        callers["goes"].go()
        assert left.get(timeout=TIMEOUT_S) == "goes unserved"
    assert left.get(timeout=TIMEOUT_S) == "stays served"
    callers["stays"].go()  # as every call does when it is over
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert pool.waiting() == 0


def test_urgent_callers_go_before_those_callers_that_came_first() -> None:
    pool = InstancePool([Nothing()])
    served: list[str] = []

    def take(name: str, *, urgent: bool) -> threading.Thread:
        def run() -> None:
            with lent(pool, urgent=urgent, deadline=None):
                served.append(name)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    with lent(pool, urgent=False, deadline=None):
        threads = [take(f"client {n}", urgent=False) for n in range(3)]
        threads.append(take("camera", urgent=True))
        wait_until(lambda: pool.waiting() == len(threads))
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert served[0] == "camera"
    assert sorted(served[1:]) == ["client 0", "client 1", "client 2"]


def test_callers_who_wait_beside_urgent_ones_get_every_fourth_run() -> None:
    pool = InstancePool([Nothing()])
    served: list[str] = []

    def run(name: str, *, urgent: bool) -> None:
        with lent(pool, urgent=urgent, deadline=None):
            served.append(name)

    with lent(pool, urgent=False, deadline=None):
        threads = [
            threading.Thread(target=run, args=(kind,), kwargs={"urgent": kind == "camera"})
            for kind in ["client"] * 2 + ["camera"] * 9
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: pool.waiting() == len(threads))
    for thread in threads:
        thread.join(TIMEOUT_S)
    camera, client = ["camera"], ["client"]
    assert served == camera * 3 + client + camera * 3 + client + camera * 3


def test_under_a_crowd_every_caller_is_served_and_none_is_forgotten() -> None:
    pool = InstancePool([Nothing(), Nothing()])
    served = [0]
    counting = threading.Lock()

    def take(urgent: bool) -> None:
        for _ in range(200):
            with lent(pool, urgent=urgent, deadline=None):
                pass
            with counting:
                served[0] += 1

    threads = [threading.Thread(target=take, args=(n % 3 == 0,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert served == [1600]


def test_the_oldest_run_is_known_until_it_ends() -> None:
    pool = InstancePool([Nothing(), Nothing()])
    assert (pool.running_since(), pool.running_s(0.0)) == (math.inf, 0.0)
    with lent(pool, urgent=False, deadline=None):
        since = pool.running_since()
        with lent(pool, urgent=False, deadline=None):
            assert pool.running_since() == since <= time.monotonic()
            assert pool.running_s(since + 5.0) == 5.0
        assert (pool.running_since(), pool.running_s(since + 5.0)) == (since, 0.0)
    assert pool.running_since() == math.inf


def test_closing_closes_every_instance() -> None:
    instances = [Nothing(), Nothing()]
    InstancePool(instances).close()
    assert all(instance.closed for instance in instances)


def config(*groups: str) -> ModelConfig:
    text = " ".join(
        f'instance_group {{ name: "g{number}" {group} }}' for number, group in enumerate(groups)
    )
    return config_of(f'name: "m" {text}')


class Making(TensorModel):
    """Notes the instances that it makes; `fails` is one that it cannot make."""

    def __init__(self, fails: str = "") -> None:
        super().__init__(lambda inputs, outputs: {})
        self.made: dict[str, Closable] = {}
        self._fails = fails

    def make_instance(self, name: str, placement: Placement) -> TensorInstance:
        if name == self._fails:
            raise InternalError("no memory")
        self.made[name] = Closable()
        return self.made[name]


class Closable(TensorInstance):
    def __init__(self) -> None:
        super().__init__(lambda inputs, outputs: {})
        self.closed = False

    def close(self) -> None:
        self.closed = True


def need(count: int) -> str:
    return f'rate_limiter {{ resources {{ name: "R" global: true count: {count} }} }}'


def test_passive_instances_are_made_and_closed_and_never_lent() -> None:
    model = Making()
    pool = InstancePool.of(config("count: 1", "count: 2 passive: true"), model)
    assert list(model.made) == ["g0_0", "g1_0", "g1_1"]
    assert len(pool) == 1
    assert pool.take(urgent=False, deadline=None) is model.made["g0_0"]
    with pytest.raises(DeadlineExceeded):
        pool.take(urgent=False, deadline=time.monotonic() + 0.01)
    pool.close()
    assert all(instance.closed for instance in model.made.values())


def test_without_a_limiter_resources_change_nothing() -> None:
    pool = InstancePool.of(config(f"count: 2 {need(1)}"), Making())
    assert pool.take(urgent=False, deadline=None) is not pool.take(urgent=False, deadline=None)


def test_the_limiter_chooses_an_instance_whose_resources_are_free() -> None:
    limiter = RateLimiter([ResourceLimit("R", 3)])
    model = Making()
    pool = InstancePool.of(config(f"count: 2 {need(2)}", f"count: 1 {need(1)}"), model, limiter)
    taken = [pool.take(urgent=False, deadline=time.monotonic() + TIMEOUT_S) for _ in range(2)]
    assert {id(each) for each in taken} == {id(model.made["g0_0"]), id(model.made["g1_0"])}
    with pytest.raises(DeadlineExceeded):
        pool.take(urgent=False, deadline=time.monotonic() + 0.01)
    assert pool.waiting() == 0
    assert len(pool._started_at) == 2
    for each in taken:
        pool.give_back(each)
    pool.give_back(pool.take(urgent=True, deadline=None))


def test_a_caller_that_waits_for_an_instance_or_its_resources_is_counted() -> None:
    limiter = RateLimiter([ResourceLimit("R", 1)])
    pool = InstancePool.of(config(f"count: 2 {need(1)}"), Making(), limiter)

    def take() -> None:
        with lent(pool, urgent=False, deadline=None):
            pass

    with lent(pool, urgent=False, deadline=None):
        threads = [threading.Thread(target=take) for _ in range(3)]
        for thread in threads:
            thread.start()
        # One for the resource, two for an instance.
        wait_until(lambda: pool.waiting() == 3)
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert pool.waiting() == 0


def test_closing_and_failing_to_open_leave_nothing_reserved() -> None:
    limiter = RateLimiter([ResourceLimit("R", 2)])
    held = f"count: 2 passive: true {need(1)}"
    model = Making(fails="g0_1")
    for _ in range(3):
        with pytest.raises(InternalError, match="no memory"):
            InstancePool.of(config("count: 2", held), model, limiter)
        assert all(instance.closed for instance in model.made.values())
        InstancePool.of(config("count: 1", held), Making(), limiter).close()
