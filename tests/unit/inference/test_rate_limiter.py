"""Instances run while their resources are free, and in turns by priority."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from support.waiting import TIMEOUT_S, wait_until

from edge_server.errors import Cancelled, DeadlineExceeded, ModelConfigError
from edge_server.inference.line import RateLimiter, ResourceLimit, Share
from edge_server.model_config.config import InstanceGroup, RateLimitResource

if TYPE_CHECKING:
    from collections.abc import Callable


def group(
    *resources: tuple[str, int],
    count: int = 1,
    priority: int = 1,
    passive: bool = False,
    per_device: bool = False,
) -> InstanceGroup:
    return InstanceGroup(
        "g",
        "CPU",
        count,
        tuple(RateLimitResource(name, number, per_device) for name, number in resources),
        priority,
        passive,
    )


def limiter(*resources: str) -> RateLimiter:
    """Each resource as NAME:COUNT or NAME:COUNT:DEVICE."""
    parts = [text.split(":") for text in resources]
    return RateLimiter([ResourceLimit(name, *map(int, numbers)) for name, *numbers in parts])


def one(limit: RateLimiter, of: InstanceGroup) -> Share:
    (share,) = limit.enrol([of])
    return share


def take_now(limit: RateLimiter, *shares: Share) -> Share | None:
    try:
        return limit.take(shares, deadline=time.monotonic())
    except DeadlineExceeded:
        return None


class Taker:
    """Somebody on a thread of their own who waits for a share."""

    def __init__(self, limit: RateLimiter, *shares: Share) -> None:
        before = len(limit._claims)
        self.got: Share | None = None
        self._thread = threading.Thread(target=self._take, args=(limit, shares))
        self._thread.start()
        wait_until(lambda: len(limit._claims) > before or not self._thread.is_alive())

    def _take(self, limit: RateLimiter, shares: tuple[Share, ...]) -> None:
        self.got = limit.take(shares, time.monotonic() + TIMEOUT_S)

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> Share:
        self._thread.join(TIMEOUT_S)
        assert self.got is not None
        return self.got


def test_without_limits_there_is_as_much_as_the_largest_need() -> None:
    limit = limiter()
    large, small = one(limit, group(("R", 4))), one(limit, group(("R", 2)))
    other = one(limit, group(("R", 2)))
    assert take_now(limit, large) is large
    assert take_now(limit, small) is None
    limit.give_back(large)
    assert take_now(limit, small) is small
    assert take_now(limit, other) is other
    assert take_now(limit, large) is None


def test_a_limit_lets_that_much_run_at_once() -> None:
    limit = limiter("R:6")
    shares = limit.enrol([group(("R", 2), count=4)])
    assert [take_now(limit, share) is share for share in shares] == [True, True, True, False]


def test_instances_that_need_nothing_always_run() -> None:
    limit = limiter("R:1")
    busy, free = one(limit, group(("R", 1))), one(limit, group())
    assert take_now(limit, busy) is busy
    assert take_now(limit, free) is free


def test_a_limit_that_is_too_small_fails_the_load_in_tritons_words() -> None:
    limit = limiter("R:1")
    with pytest.raises(ModelConfigError) as refused:
        limit.enrol([group(("R", 4))])
    assert (
        'Resource count for "R" is limited to 1 which will prevent scheduling of one or more model '
        "instances, the minimum required count is 4"
    ) in str(refused.value)
    # What failed to load holds nothing back.
    share = one(limit, group(("R", 1)))
    assert take_now(limit, share) is share


def test_where_limits_are_given_there_is_nothing_of_what_they_do_not_name() -> None:
    with pytest.raises(ModelConfigError, match=r'"S" is limited to 0'):
        limiter("R:1").enrol([group(("S", 1))])


def test_a_limit_of_another_device_does_not_count() -> None:
    with pytest.raises(ModelConfigError, match="is limited to 0"):
        limiter("R:4:1").enrol([group(("R", 1), per_device=True)])
    limiter("R:4:0").enrol([group(("R", 4), per_device=True)])
    limiter("R:4").enrol([group(("R", 4), per_device=True)])
    limiter("R:4:1").enrol([group(("R", 4))])


def test_one_name_is_not_both_global_and_of_a_device() -> None:
    limit = limiter()
    limit.enrol([group(("R", 1))])
    with pytest.raises(ModelConfigError, match="both global and device-specific"):
        limit.enrol([group(("R", 1), per_device=True)])


def test_passive_instances_hold_what_they_need_until_they_leave() -> None:
    limit = limiter("R:3")
    passive = limit.enrol([group(("R", 1), passive=True)])
    shares = limit.enrol([group(("R", 1), count=3)])
    assert [take_now(limit, share) is share for share in shares] == [True, True, False]
    limit.leave(passive)
    assert take_now(limit, shares[2]) is shares[2]
    with pytest.raises(ModelConfigError, match="minimum required count is 4"):
        limit.enrol([group(("R", 3), passive=True)])


def test_without_limits_there_is_enough_beside_the_passive_ones() -> None:
    limit = limiter()
    limit.enrol([group(("R", 2), passive=True)])
    share = one(limit, group(("R", 1)))
    assert take_now(limit, share) is share


def test_a_caller_that_waits_is_woken_by_what_becomes_free() -> None:
    limit = limiter()
    one_share, other = limit.enrol([group(("R", 1), count=2)])
    limit.take([one_share], None)
    taker = Taker(limit, other)
    assert taker.waits
    limit.give_back(one_share)
    assert taker.wait() is other


def test_of_several_idle_instances_one_whose_resources_are_free_runs() -> None:
    limit = limiter()
    needs_r, needs_s, other = limit.enrol([group(("R", 1)), group(("S", 1)), group(("R", 1))])
    limit.take([other], None)
    assert take_now(limit, needs_r, needs_s) is needs_s


def test_a_large_need_is_not_passed_over_and_other_resources_go_on() -> None:
    limit = limiter("R:2", "S:1")
    large, small, running, other = limit.enrol(
        [group(("R", 2)), group(("R", 1)), group(("R", 1)), group(("S", 1))]
    )
    limit.take([running], None)
    first = Taker(limit, large)
    # One R is free, and kept for the large one, which came first and ran as rarely.
    assert take_now(limit, small) is None
    assert take_now(limit, other) is other
    limit.give_back(running)
    assert first.wait() is large


def test_what_was_kept_for_one_callers_that_gave_up_goes_to_the_next() -> None:
    limit = limiter("R:2")
    large, small, running = limit.enrol([group(("R", 2)), group(("R", 1)), group(("R", 1))])
    limit.take([running], None)
    assert take_now(limit, large) is None
    assert take_now(limit, small) is small


def test_a_caller_that_goes_while_waiting_waits_no_longer() -> None:
    class Gone:
        cancelled = False

        def when_cancelled(self, callback: Callable[[], None]) -> None:
            threading.Timer(0.01, callback).start()

    limit = limiter("R:1")
    holder, waiter = one(limit, group(("R", 1))), one(limit, group(("R", 1)))
    assert take_now(limit, holder) is holder
    with pytest.raises(Cancelled):
        limit.take([waiter], time.monotonic() + TIMEOUT_S, Gone())
    limit.give_back(holder)
    assert take_now(limit, waiter) is waiter


def test_priority_n_gets_one_nth_of_the_chances() -> None:
    limit = limiter("R:1")
    often, seldom = limit.enrol([group(("R", 1)), group(("R", 1), priority=3)])
    executions: Counter[Share] = Counter()
    running = limit.take([often], None)
    for _ in range(40):
        # Both wait while one of them runs.
        waiting = seldom if running is often else often
        taker = Taker(limit, waiting, running)
        executions[running] += 1
        limit.give_back(running)
        running = taker.wait()
    assert executions == {often: 30, seldom: 10}


def test_time_spent_idle_earns_no_chances() -> None:
    limit = limiter("R:1")
    busy, idle = limit.enrol([group(("R", 1), count=2)])
    for _ in range(100):
        limit.give_back(limit.take([busy], None))
    running = limit.take([idle], None)
    order = []
    for _ in range(10):
        taker = Taker(limit, busy, idle)
        limit.give_back(running)
        running = taker.wait()
        order.append(running)
    assert order.count(busy) == 5
