"""A version that is worse than its predecessor fails once; one that is not passes."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from unit.inference.canaries import (
    CONFIG,
    DECOUPLED,
    FINE,
    NAN,
    TERMS,
    TIMED,
    Canary,
    FixedScheduler,
    config,
    predecessor,
    response,
    unwatched,
)

from edge_server.errors import (
    Cancelled,
    DeadlineExceeded,
    EdgeServerError,
    InternalError,
    InvalidRequest,
    Unavailable,
)
from edge_server.inference import mirror as mirror_module
from edge_server.inference.canary_monitor import (
    CanaryMonitor,
    CanaryTerms,
    WatchedScheduler,
    recorded,
)
from edge_server.inference.registry import LoadedModel, Snapshot
from edge_server.inference.statistics import ModelStatistics
from edge_server.requests import (
    InferRequest,
    SequencePlace,
)
from edge_server.tensors import DataType, Tensor

if TYPE_CHECKING:
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import Respond

SEQUENCE = config("sequence_batching {}")
FINE_INPUT = {"a": Tensor(np.ones(2, "<f4"))}


def test_it_passes_with_the_requests_and_the_seconds_and_is_then_left_alone() -> None:
    canary = Canary()
    canary.send(times=99)
    assert canary.look(now=31.0) == []
    canary.send()
    assert canary.look(now=29.0) == []
    assert canary.look(now=30.0) == ["passed"]
    canary.send(InternalError("late"), times=99)
    assert canary.look(now=40.0) == ["passed"]
    scheduler = canary.watched.scheduler
    assert isinstance(scheduler, WatchedScheduler)
    assert scheduler.seen.total() == 100


def test_a_model_that_gets_no_request_passes_in_the_end() -> None:
    canary = Canary()
    assert canary.look(now=299.0) == []
    assert canary.look(now=300.0) == ["passed"]


def test_the_third_failure_is_one_too_many_and_reported_once() -> None:
    canary = Canary(predecessor(good=100))
    canary.send(InternalError("no"), times=2)
    assert canary.look() == []
    canary.send(InternalError("no"), times=2)
    verdict = [
        "version 2: 4 of 4 requests failed; its predecessor, given 4 of these requests, responded "
        "well to 4"
    ]
    assert canary.look() == verdict
    canary.send(InternalError("no"), times=9)
    assert canary.look(now=999.0) == verdict


def test_what_its_predecessor_fails_at_too_is_the_callers_doing() -> None:
    canary = Canary(predecessor(good=100))
    canary.before.response = InternalError("neither")
    canary.send(InternalError("no"), times=100)
    assert canary.look(now=30.0) == ["passed"]


def test_what_was_not_replayed_is_taken_to_be_like_what_was() -> None:
    """More fails than there is room for, or time: the share that counts is not the less for it."""
    canary = Canary()
    canary.send(InternalError("no"), times=50, replayed=False)
    assert canary.look() == []
    canary.replay()
    assert canary.look() == [
        "version 2: 50 of 50 requests failed; its predecessor, given 8 of these requests, "
        "responded well to 8"
    ]


def test_requests_that_both_fail_at_do_not_hide_those_that_only_the_new_one_fails_at() -> None:
    canary = Canary()
    for _ in range(20):
        canary.before.response = InternalError("neither")
        canary.send(InternalError("no"), times=4)
        canary.before.response = response(FINE)
        canary.send(InternalError("no"), times=1)
    assert "its predecessor, given 50 of these requests, responded well to 10" in canary.look()[0]


def test_what_only_the_predecessor_fails_at_is_held_against_what_only_the_new_one_does() -> None:
    """Both fail at one request of five, whichever."""
    canary = Canary(config=TIMED)
    for _ in range(20):
        for new, old in ((InternalError("no"), None), *[(None, None)] * 3):
            canary.before.response = old or response(FINE)
            canary.send(new)
        canary.before.response = InternalError("no")
        canary.mirror.sample(InferRequest("m", {}), response(FINE))
        canary.replay()
        canary.before.response = response(FINE)
    assert canary.look() == []


def test_without_replays_failures_as_they_were_before_are_no_reason() -> None:
    canary = Canary(predecessor(good=80, failed=20, config=DECOUPLED), DECOUPLED)
    for _ in range(20):
        canary.send(InternalError("no"), times=2)
        canary.send(times=3)
    assert canary.look() == []
    canary.send(InternalError("no"), times=60)
    assert "requests failed; before it 20.0% did" in canary.look()[0]


def test_what_fails_after_much_that_was_good_is_seen_in_the_last_requests() -> None:
    canary = Canary()
    canary.send(times=10_000)
    canary.send(InternalError("no"), times=6)
    assert canary.look()[0].startswith("version 2: 6 of 100 requests failed;")


NO_VERDICT = [Cancelled, DeadlineExceeded, Unavailable]


@pytest.mark.parametrize("kind", NO_VERDICT)
def test_a_request_whose_caller_left_is_neither_good_nor_bad(kind: type[EdgeServerError]) -> None:
    canary = Canary()
    canary.send(kind("x"), times=100)
    assert canary.look(now=30.0) == []
    assert canary.look(now=300.0) == ["passed"]


@pytest.mark.parametrize("kind", NO_VERDICT)
@pytest.mark.parametrize("config", [CONFIG, DECOUPLED])
def test_requests_whose_callers_left_hide_no_failures(
    kind: type[EdgeServerError], config: ModelConfig
) -> None:
    canary = Canary(config=config)
    for _ in range(3):
        canary.send(InternalError("no"))
        canary.send(kind("x"), times=30)
    assert canary.look()[0].startswith("version 2: 3 of 3 requests failed;")


def test_what_only_the_new_version_refuses_is_its_failure() -> None:
    canary = Canary()
    canary.send(times=20)
    canary.send(InvalidRequest("a batch of 8"), times=3)
    assert canary.look()[0].startswith("version 2: 3 of 23 requests failed; its predecessor, given")


def test_what_both_versions_refuse_is_the_callers_doing() -> None:
    canary = Canary()
    canary.before.response = InvalidRequest("no text")
    canary.send(InvalidRequest("no text"), times=100)
    assert canary.look(now=30.0) == ["passed"]


def test_a_refusal_that_cannot_be_replayed_is_neither_good_nor_bad() -> None:
    canary = Canary(config=DECOUPLED)
    canary.send(InvalidRequest("no text"), times=100)
    assert canary.look(now=30.0) == []


def test_a_response_that_cannot_be_looked_at_reaches_its_caller(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(tensor: Tensor) -> bool:
        raise MemoryError

    monkeypatch.setattr(mirror_module, "is_finite", no_memory)
    canary = Canary()
    canary.send()
    assert "a response could not be checked" in caplog.text
    scheduler = canary.watched.scheduler
    assert isinstance(scheduler, WatchedScheduler)
    assert scheduler.oldest() is None


@pytest.mark.parametrize(
    "outputs",
    [
        NAN,
        {**FINE, "c": Tensor(np.array(np.inf, "<f2"))},
        {"b": Tensor(np.array([0xFF80], "<u2").view(DataType.BF16.numpy))},
    ],
)
@pytest.mark.parametrize("kind", [CONFIG, DECOUPLED])
def test_responses_that_are_not_finite_fail_it(
    outputs: dict[str, Tensor], kind: ModelConfig
) -> None:
    canary = Canary(config=kind)
    canary.send(times=20)
    canary.send(response(outputs), times=3, stream=kind.decoupled)
    assert canary.look()[0].startswith("version 2: 3 of 23 responses were not finite; ")


@pytest.mark.parametrize("kind", [CONFIG, DECOUPLED])
def test_what_is_made_of_numbers_that_are_not_finite_is_the_callers_doing(
    kind: ModelConfig,
) -> None:
    """Even where its predecessor makes something of them."""
    canary = Canary(config=kind)
    canary.send(response(NAN), times=100, inputs={"a": NAN["b"]})
    assert canary.look(now=30.0) == ["passed"]
    assert canary.before.requests == 0


def test_what_finite_numbers_too_large_for_both_make_is_the_callers_doing() -> None:
    canary = Canary()
    canary.before.response = response(NAN)
    canary.send(response(NAN), times=100, inputs={"a": Tensor(np.full(1, 3e38, "<f4"))})
    assert canary.look(now=30.0) == ["passed"]


def test_a_sequence_that_was_given_nan_once_may_respond_with_it_until_it_starts_anew() -> None:
    canary = Canary(config=SEQUENCE)
    canary.send(response(NAN), inputs={"a": NAN["b"]}, sequence=SequencePlace(7, start=True))
    canary.send(response(NAN), times=99, inputs=FINE_INPUT, sequence=SequencePlace(7))
    assert canary.look() == []
    canary.send(response(NAN), inputs=FINE_INPUT, sequence=SequencePlace(7, start=True))
    canary.send(response(NAN), times=2, inputs=FINE_INPUT, sequence=SequencePlace(8, start=True))
    assert len(canary.look()) == 1


def test_sequences_that_ended_do_not_fill_the_memory_of_those_given_nan() -> None:
    canary = Canary(config=SEQUENCE)
    for number in range(1, 2000):
        whole = SequencePlace(number, start=True, end=True)
        canary.send(response(NAN), inputs={"a": NAN["b"]}, sequence=whole)
    canary.send(response(NAN), times=3, inputs=FINE_INPUT, sequence=SequencePlace(1, start=True))
    assert canary.look()[0].startswith("version 2: 3 of 100 responses were not finite")


def test_one_response_of_many_that_is_not_finite_is_enough() -> None:
    canary = Canary(config=DECOUPLED)
    canary.scheduler.more = (response(NAN), response(FINE))
    canary.send(times=3, stream=True)
    assert len(canary.look()) == 1


def test_integers_and_texts_are_always_finite() -> None:
    canary = Canary()
    outputs = {"b": Tensor(np.array([1])), "c": Tensor(np.array([b"nan"], np.object_))}
    canary.send(response(outputs), times=100)
    assert canary.look(now=30.0) == ["passed"]


def test_infinities_that_its_predecessor_gave_too_are_no_reason() -> None:
    before = recorded(predecessor(config=DECOUPLED), TERMS)
    unwatched(before).response = response(NAN)
    for _ in range(150):
        before.scheduler.submit(InferRequest("m", {}), Snapshot({}), lambda *_: None)
    assert before.scheduler.seen.total() == 100  # type: ignore[attr-defined]  # this scheduler has it
    canary = Canary(before, DECOUPLED)
    canary.send(response(NAN), times=100)
    assert canary.look(now=30.0) == ["passed"]


def test_after_stop_no_verdict_is_given() -> None:
    canary = Canary()
    canary.send(InternalError("no"), times=9)
    canary.monitor.stop()
    assert canary.look() == []


def test_without_room_for_a_thread_it_serves_unwatched_and_frees_its_predecessor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    over = threading.Event()
    before, scheduler = predecessor(), FixedScheduler()
    monitor = CanaryMonitor(
        "m", TERMS, on_failed=lambda _: None, on_passed=lambda: None, on_over=over.set
    )
    fresh = LoadedModel(CONFIG, 2, scheduler, ModelStatistics())
    watched = monitor.watch(fresh, before)
    before.close()
    assert unwatched(before).closed == 0
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monitor.start()
    assert over.is_set()
    assert unwatched(before).closed == 1
    assert "model m: not compared with its predecessor: can't start new thread" in caplog.text
    watched.scheduler.submit(InferRequest("m", {}), Snapshot({}), lambda *_: None)
    assert scheduler.requests == 1


def test_its_own_thread_reports_promptly_and_the_end_last() -> None:
    ended = threading.Event()
    events: list[str] = []
    scheduler = FixedScheduler()

    def over() -> None:
        events.append("over")
        ended.set()

    monitor = CanaryMonitor(
        "m",
        CanaryTerms(),
        on_failed=lambda _: events.append(threading.current_thread().name),
        on_passed=lambda: events.append("passed"),
        on_over=over,
    )
    fresh = LoadedModel(CONFIG, 2, scheduler, ModelStatistics())
    watched = monitor.watch(fresh, predecessor())
    monitor.start()
    scheduler.response = InternalError("no")
    for _ in range(3):
        watched.scheduler.submit(InferRequest("m", {}), Snapshot({}), lambda *_: None)
    assert ended.wait(30)
    assert events == ["canary-m", "over"]
    monitor.wait_over(30)


def test_the_predecessor_is_closed_when_its_last_replay_has_ended() -> None:
    running, may_run, over = threading.Event(), threading.Event(), threading.Event()

    class Blocking(FixedScheduler):
        def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
            running.set()
            assert may_run.wait(30)
            super().submit(request, snapshot, respond)

    before, scheduler = LoadedModel(CONFIG, 1, Blocking(), ModelStatistics()), FixedScheduler()
    monitor = CanaryMonitor(
        "m", TERMS, on_failed=lambda _: None, on_passed=lambda: None, on_over=over.set
    )
    watched = monitor.watch(LoadedModel(CONFIG, 2, scheduler, ModelStatistics()), before)
    before.close()
    monitor.start()
    scheduler.response = InternalError("no")
    watched.scheduler.submit(InferRequest("m", {}), Snapshot({}), lambda *_: None)
    assert running.wait(30)
    monitor.stop()
    monitor.wait_over(0.05)
    assert unwatched(before).closed == 0
    may_run.set()
    assert over.wait(30)
    assert unwatched(before).closed == 1


def test_a_watched_scheduler_is_its_scheduler_in_all_else() -> None:
    canary = Canary()
    scheduler = canary.watched.scheduler
    assert (scheduler.pending(), scheduler.running_since()) == (3, math.inf)
    canary.watched.close()
    assert canary.scheduler.closed == 1


def test_counts_of_many_threads_add_up() -> None:
    scheduler = WatchedScheduler(FixedScheduler(), CONFIG, 10)

    def submit() -> None:
        for _ in range(200):
            scheduler.submit(InferRequest("m", {}), Snapshot({}), lambda *_: None)

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (scheduler.seen.total(), scheduler.recent.total()) == (800, 10)
