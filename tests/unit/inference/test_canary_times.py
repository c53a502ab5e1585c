"""A canary is compared with its predecessor by time, and ended where a run of it hangs."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest
from unit.inference.canaries import (
    DECOUPLED,
    FINE,
    NAN,
    TIMED,
    Canary,
    config,
    predecessor,
    response,
)

from edge_server.errors import InternalError, InvalidRequest
from edge_server.inference.registry import Snapshot
from edge_server.requests import (
    InferRequest,
)
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from edge_server.errors import EdgeServerError


def test_a_version_that_is_only_slower_is_reported_and_stays() -> None:
    canary = Canary(config=TIMED)
    canary.send(times=100, replayed=False)
    canary.pair(20, 4, times=29)
    assert (canary.look(now=29.0), canary.news) == ([], [])
    canary.pair(20, 4, times=1)
    assert canary.look(now=29.0) == []
    news = [
        "version 2 is slower than its predecessor: 20.0 ms beside 4.0 ms, the medians of 30 "
        "requests that both were given"
    ]
    assert canary.news == news
    canary.pair(20, 4, times=1)
    assert canary.look(now=30.0) == ["passed"]
    assert canary.news == news


def test_a_busy_machine_makes_both_slow_and_is_no_reason() -> None:
    canary = Canary(config=TIMED)
    canary.send(times=100, replayed=False)
    for new, old in ((4, 4), (90, 80), (40, 4), (4, 60)) * 10:
        canary.pair(new, old)
    assert canary.look(now=30.0) == ["passed"]
    assert canary.news == []


def test_it_is_watched_on_while_it_is_not_clear_whether_it_is_slower() -> None:
    canary = Canary(config=TIMED)
    canary.send(times=100, replayed=False)
    assert canary.look(now=30.0) == []
    assert canary.news == [
        "watched for longer than 30 s: its predecessor was given 0 of 30 requests so far"
    ]
    canary.pair(4, 4, times=28)
    canary.pair(20, 4, times=2)
    assert canary.look(now=298.0) == []
    unclear = "whether it is slower than its predecessor is not clear"
    assert canary.news[1:] == [f"watched for longer than 30 s: {unclear}"] * (len(canary.news) - 1)
    canary.pair(4, 20, times=1)
    assert canary.look(now=299.0) == ["passed"]
    assert canary.news[-1] == ""


@pytest.mark.parametrize("seed", range(5))
def test_a_version_that_is_slow_for_a_tenth_of_its_requests_is_reported_and_stays(
    seed: int,
) -> None:
    """A busy machine makes as many slow with the predecessor, which shows what chance does."""
    chance = np.random.default_rng(seed)
    canary = Canary(config=TIMED)
    canary.send(times=100, replayed=False)
    for _ in range(200):
        busy, slow = chance.random(2) < 0.01, chance.random() < 0.1
        canary.pair(500 if slow else 40 if busy[0] else 5, 40 if busy[1] else 5)
    assert canary.look(now=30.0) == ["passed"]
    assert re.fullmatch(
        r"version 2 is slower than its predecessor for \d+ of \d+ requests: 500\.0 ms beside "
        r"5\.0 ms, the medians of \d+ requests that both were given",
        canary.news[-1],
    )


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
def test_chance_makes_no_version_slower(seed: int, share: float) -> None:
    chance = np.random.default_rng(seed)
    canary = Canary(config=TIMED)
    canary.send(times=100, replayed=False)
    for _ in range(200):
        new, old = chance.random(2) < share
        canary.pair(40 if new else 5, 40 if old else 5)
    assert canary.look(now=30.0) == ["passed"]
    assert not any("is slower" in news for news in canary.news)


def test_a_client_who_sends_nonsense_all_the_time_does_not_keep_the_canary_going() -> None:
    canary = Canary(config=TIMED)
    canary.before.response = InternalError("neither")
    canary.send(InternalError("no"), times=20)
    canary.send(InternalError("no"), times=8, replayed=False)
    assert canary.mirror.is_comparing
    canary.mirror._samples_from_s = 0.0
    assert canary.mirror.wants_sample()
    canary.send(times=100, replayed=False)
    canary.before.response = response(FINE)
    canary.pair(4, 4, times=30)
    canary.send(InternalError("no"), times=8, replayed=False)
    assert canary.look(now=30.0) == ["passed"]


def test_it_is_not_watched_for_ever() -> None:
    canary = Canary(config=TIMED)
    canary.send(times=100, replayed=False)
    assert canary.look(now=299.0) == []
    assert canary.look(now=300.0) == ["passed"]


def test_what_is_batched_by_the_server_is_not_compared_by_its_time() -> None:
    canary = Canary(config=config("max_batch_size: 4 dynamic_batching {}"))
    canary.send(times=100, replayed=False)
    canary.pair(20, 4, times=60)
    assert canary.look(now=30.0) == ["passed"]
    assert canary.news == []


def hanging(canary: Canary, inputs: dict[str, Tensor] | None = None, since: float = 0.0) -> None:
    """Give the version a request whose run does not end."""
    canary.scheduler.never = True
    canary.scheduler.since = since
    request = InferRequest("m", inputs or {})
    canary.watched.scheduler.submit(request, Snapshot({}), lambda *_: None)


def test_a_run_that_does_not_end_is_a_hang_after_a_second() -> None:
    canary = Canary()
    hanging(canary, since=1.5)
    assert canary.look_on(2.25) == []
    assert canary.look_on(2.5) == ["version 2: a run takes 1.0 s and does not end"]
    assert canary.before.requests == 1


def test_a_run_on_a_machine_that_held_up_its_predecessor_too_may_take_longer() -> None:
    canary = Canary(config=TIMED)
    canary.pair(5, 5, times=20)
    canary.pair(5, 300)
    hanging(canary)
    assert canary.look_on(2.75) == []
    assert canary.look_on(3.0) == ["version 2: a run takes 3.0 s and does not end"]


def test_a_standstill_of_the_process_is_no_hang() -> None:
    """Runs go on and end as ever, between the seconds in which nothing runs at all."""
    canary = Canary()
    canary.look_on(1.0)
    for _ in range(8):
        # Each takes 0.2 s, of which the standstill makes 2.
        hanging(canary, since=canary.looked + 0.1)
        assert canary.look(canary.looked + 2.1) == []
        canary.scheduler.since = math.inf
        assert canary.look_on(canary.looked + 0.1) == []


def test_a_run_that_hangs_is_found_between_standstills() -> None:
    canary = Canary()
    hanging(canary)
    for _ in range(4):
        canary.look(canary.looked + 2.0)
    assert canary.look_on(canary.looked + 0.25)[0].startswith("version 2: a run takes")


@pytest.mark.parametrize("before", [FINE, NAN])
@pytest.mark.parametrize("inputs", [FINE, NAN])
def test_a_request_that_is_not_finite_hides_no_run_that_hangs(
    before: dict[str, Tensor], inputs: dict[str, Tensor]
) -> None:
    canary = Canary()
    canary.before.response = response(before)
    hanging(canary, {"a": inputs["b"]})
    assert canary.look_on(1.0) == ["version 2: a run takes 1.0 s and does not end"]


@pytest.mark.parametrize("error", [InvalidRequest("no text"), InternalError("no")])
@pytest.mark.parametrize(("known", "limit_s"), [(50, 5.0), (0, 30.0)])
def test_a_request_that_the_predecessor_refuses_or_fails_at_hides_a_hang_for_seconds_only(
    error: EdgeServerError, known: int, limit_s: float
) -> None:
    canary = Canary(predecessor(good=known))
    canary.before.response = error
    hanging(canary)
    assert canary.look_on(limit_s - 0.25) == []
    assert canary.look_on(limit_s) == [f"version 2: a run takes {limit_s:.1f} s and does not end"]
    assert canary.before.requests == 1


def test_a_run_of_a_whole_batch_may_take_as_long_as_its_requests_one_after_another() -> None:
    canary = Canary(config=config("max_batch_size: 8 dynamic_batching {}"))
    canary.scheduler.never = True
    rows = {"a": Tensor(np.ones((1, 1), "<f4"))}
    for _ in range(8):
        request = InferRequest("m", rows)
        canary.watched.scheduler.submit(request, Snapshot({}), lambda *_: None)
    (each,) = canary.monitor.watched
    oldest = each.scheduler.oldest()
    # Its predecessor took 0.3 s for one of them.
    assert oldest is not None
    canary.mirror._timed_request = (oldest, 0.3)
    canary.scheduler.since = 0.0
    assert canary.look_on(23.75) == []
    assert canary.look_on(24.0) == ["version 2: a run takes 24.0 s and does not end"]


def test_a_run_that_does_not_end_in_its_predecessor_either_is_the_callers_doing() -> None:
    canary = Canary()
    canary.before.response = InternalError("neither")
    hanging(canary)
    assert canary.look_on(20.0) == []


def test_without_replays_a_run_must_take_long_to_hang() -> None:
    canary = Canary(predecessor(good=50, ms=1, config=DECOUPLED), DECOUPLED)
    canary.scheduler.since = 0.0
    assert canary.look_on(4.75) == []
    assert len(canary.look_on(5.0)) == 1


def test_a_slow_models_runs_may_take_long() -> None:
    canary = Canary(predecessor(good=50, ms=1000, config=DECOUPLED), DECOUPLED)
    canary.scheduler.since = 0.0
    assert canary.look_on(20.0) == []


def test_a_model_whose_predecessor_is_ended_by_the_same_request_may_be_away() -> None:
    canary = Canary()
    canary.model.why = "its process ended"
    canary.before.response = InternalError("ended too")
    canary.send(InternalError("its process ended"))
    assert canary.look_on(29.0) == []
    # Each such request starts the half minute again, in which both may come back.
    canary.send(InternalError("its process ended"))
    assert canary.look_on(58.0) == []
    assert canary.look_on(60.0) == ["away for more than 30 s: its process ended"]


def test_a_request_that_both_refuse_excuses_no_absence() -> None:
    canary = Canary()
    canary.before.response = InvalidRequest("no text")
    canary.send(InvalidRequest("no text"))
    canary.model.why = "its process ended"
    assert canary.look_on(2.0) == ["away for more than 1 s: its process ended"]


def test_a_model_that_stays_away_fails_it() -> None:
    canary = Canary()
    canary.model.why = "its process ended"
    assert canary.look_on(0.75) == []
    canary.model.why = ""
    assert canary.look_on(1.0) == []
    canary.model.why = "its process ended"
    # A standstill of the whole process is no absence.
    assert [canary.look_on(1.25), canary.look(3.0)] == [[], []]
    assert canary.look_on(3.5) == ["away for more than 1 s: its process ended"]
