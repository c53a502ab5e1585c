"""A canary is compared with its predecessor by time, and ended where a run of it hangs."""

from __future__ import annotations

import numpy as np

from edge_server.errors import (
    InternalError,
)
from edge_server.inference.snapshot import Snapshot
from edge_server.requests import (
    InferRequest,
)
from edge_server.tensors import Tensor
from tests.unit.inference.canaries import (
    DECOUPLED,
    FINE,
    TIMED,
    Canary,
    config,
    predecessor,
    response,
)


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
    canary.pair(20, 4, times=60)
    canary.pair(4, 4, times=40)
    assert canary.look(now=299.0) == []
    assert len(canary.news) == 1
    canary.pair(4, 4, times=20)
    assert canary.look(now=299.0) == ["passed"]
    assert canary.news[1:] == [""]


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


def test_a_run_that_does_not_end_is_seen_at_the_second_look() -> None:
    canary = Canary()
    canary.scheduler.never = True
    canary.watched.scheduler.submit(InferRequest("m", {}), Snapshot({}), lambda *_: None)
    canary.scheduler.run_s = 1.5
    assert canary.look(now=1.0) == []
    canary.scheduler.run_s = 0.0
    assert canary.look(now=1.3) == []
    canary.scheduler.run_s = 1.5
    assert canary.look(now=1.6) == []
    assert canary.look(now=1.85) == ["version 2: a run takes 1.5 s and does not end"]
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
    canary.scheduler.run_s = 20
    assert [canary.look(now=1.0), canary.look(now=1.3)] == [[], []]
    canary.scheduler.run_s = 25
    canary.look(now=2.0)
    assert canary.look(now=2.3) == ["version 2: a run takes 25.0 s and does not end"]


def test_a_run_that_does_not_end_in_its_predecessor_either_is_the_callers_doing() -> None:
    canary = Canary()
    canary.scheduler.never = True
    canary.watched.scheduler.submit(InferRequest("m", {}), Snapshot({}), lambda *_: None)
    canary.scheduler.run_s = 20
    canary.before.response = InternalError("neither")
    for now in (1.0, 2.0, 3.0):
        assert canary.look(now) == []
        canary.replay()


def test_without_replays_a_run_must_take_long_to_hang() -> None:
    canary = Canary(predecessor(good=50, ms=1, config=DECOUPLED), DECOUPLED)
    canary.scheduler.run_s = 4.9
    assert [canary.look(now=1.0), canary.look(now=2.0)] == [[], []]
    canary.scheduler.run_s = 5.1
    assert canary.look(now=3.0) == []
    assert len(canary.look(now=3.3)) == 1


def test_a_slow_models_runs_may_take_long() -> None:
    canary = Canary(predecessor(good=50, ms=1000, config=DECOUPLED), DECOUPLED)
    canary.scheduler.run_s = 20
    assert [canary.look(now=1.0), canary.look(now=9.0)] == [[], []]


def test_a_model_whose_predecessor_is_ended_by_the_same_request_may_be_away() -> None:
    canary = Canary()
    canary.model.why = "its process ended"
    canary.before.response = InternalError("ended too")
    canary.send(InternalError("its process ended"))
    assert [canary.look(now=1.0), canary.look(now=9.0)] == [[], []]


def test_a_model_that_stays_away_fails_it() -> None:
    canary = Canary()
    canary.model.why = "its process ended"
    assert canary.look(now=1.0) == []
    canary.model.why = ""
    assert canary.look(now=1.9) == []
    canary.model.why = "its process ended"
    assert canary.look(now=2.0) == []
    assert canary.look(now=3.0) == ["away for more than 1 s: its process ended"]
