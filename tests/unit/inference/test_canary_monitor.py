"""A version that is worse than its predecessor fails once; one that is not passes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.contract import Phases
from edge_server.errors import (
    Cancelled,
    DeadlineExceeded,
    EdgeServerError,
    InternalError,
    InvalidRequest,
    Unavailable,
)
from edge_server.inference import replay as replay_module
from edge_server.inference.canary_monitor import CanaryMonitor, CanaryTerms, recorded
from edge_server.inference.canary_window import WatchedScheduler
from edge_server.inference.snapshot import LoadedModel, Snapshot
from edge_server.inference.statistics import FailureReason, ModelStatistics
from edge_server.model_config.config import ModelConfig, Placement
from edge_server.requests import (
    InferRequest,
    InferResponse,
    ResponseCallback,
    SequencePlace,
    StepTiming,
)
from edge_server.tensors import DataType, Tensor

if TYPE_CHECKING:
    from edge_server.inference.mirror import Mirror
    from edge_server.requests import Respond


def config(extra: str = "", backend: str = "identity") -> ModelConfig:
    text = (
        f'name: "m" backend: "{backend}" input {{ name: "a" data_type: TYPE_FP32 dims: -1 '
        f'optional: true }} output {{ name: "b" data_type: TYPE_FP32 dims: -1 }} {extra}'
    )
    return ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))


# Failed requests can be replayed on its predecessor; on the next one's any; on the others' none.
CONFIG = config(backend="python")
TIMED = config()
DECOUPLED = config("model_transaction_policy { decoupled: true }")
SEQUENCE = config("sequence_batching {}")
TERMS = CanaryTerms(requests=100, least_s=30.0, longest_s=300.0)
MS = 1_000_000
FINE = {"b": Tensor(np.ones(2, "<f4"))}
FINE_INPUT = {"a": Tensor(np.ones(2, "<f4"))}
NAN = {"b": Tensor(np.array([1, np.nan], "<f4"))}


class FixedScheduler:
    """A scheduler that gives `response` at once."""

    def __init__(self) -> None:
        self.response: ResponseCallback = response(FINE)
        self.more: tuple[ResponseCallback, ...] = ()
        self.run_s = 0.0
        self.closed = 0
        self.requests = 0
        self.never = False

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        self.requests += 1
        if self.never:
            return
        if request.parameters:
            for reply in (*self.more, self.response):
                respond(reply, False)
            respond(None, True)
        else:
            respond(self.response, True)

    def pending(self) -> int:
        return 3

    def longest_run_s(self, now: float) -> float:
        return self.run_s

    def close(self) -> None:
        self.closed += 1


class ModelStub:
    """A model that may be not ready."""

    why = ""

    def make_instance(self, name: str, placement: Placement) -> Any:
        raise NotImplementedError

    def not_ready_reason(self) -> str:
        return self.why

    def metrics(self) -> tuple[()]:
        return ()

    def close(self) -> None: ...


def response(outputs: dict[str, Tensor], ms: float = 0) -> InferResponse:
    return InferResponse("m", "2", "", outputs, (StepTiming("m", "identity", int(ms * MS)),))


def predecessor(
    good: int = 0, failed: int = 0, ms: float = 1, config: ModelConfig = CONFIG
) -> LoadedModel:
    statistics = ModelStatistics()
    for _ in range(good):
        statistics.succeeded(int(ms * MS), 0, Phases(0, 0, 0))
    for _ in range(failed):
        statistics.failed(FailureReason.BACKEND, MS)
    return LoadedModel(config, 1, FixedScheduler(), statistics)


def unwatched(model: LoadedModel) -> FixedScheduler:
    scheduler = model.scheduler
    if isinstance(scheduler, WatchedScheduler):
        scheduler = scheduler.beneath
    assert isinstance(scheduler, FixedScheduler)
    return scheduler


class Canary:
    """A version in a canary from second 0 on, without the thread that looks and replays."""

    def __init__(self, before: LoadedModel | None = None, config: ModelConfig = CONFIG) -> None:
        self.verdicts: list[str] = []
        self.news: list[str] = []
        self.scheduler = FixedScheduler()
        before = before or predecessor(config=config)
        self.before = unwatched(before)
        self.model = ModelStub()
        self.monitor = CanaryMonitor(
            "m",
            TERMS,
            on_failed=self.verdicts.append,
            on_passed=lambda: self.verdicts.append("passed"),
            on_news=self.news.append,
        )
        fresh = LoadedModel(config, 2, self.scheduler, ModelStatistics(), self.model)
        self.watched = self.monitor.watch(fresh, before)
        self.monitor.begin(0.0)

    @property
    def mirror(self) -> Mirror:
        (each,) = self.monitor.watched
        assert each.mirror is not None
        return each.mirror

    def send(
        self,
        reply: ResponseCallback = None,
        times: int = 1,
        *,
        stream: bool = False,
        inputs: dict[str, Tensor] | None = None,
        sequence: SequencePlace | None = None,
        replayed: bool = True,
    ) -> None:
        self.scheduler.response = reply or response(FINE)
        parameters = {"stream": True} if stream else {}
        responses: list[ResponseCallback] = []
        request = InferRequest("m", inputs or {}, parameters=parameters, sequence=sequence)
        for _ in range(times):
            self.watched.scheduler.submit(request, Snapshot({}), lambda a, _: responses.append(a))
            if replayed:
                self.replay()
        expected = [*(self.scheduler.more if stream else ()), self.scheduler.response]
        assert [a for a in responses if a is not None] == expected * times

    def replay(self) -> None:
        (each,) = self.monitor.watched
        while each.mirror is not None and each.mirror.step():
            pass

    def pair(self, new_ms: float, old_ms: float, times: int = 1) -> None:
        """Requests for which the versions report these times, each sampled."""
        self.before.response = response(FINE, old_ms)
        for _ in range(times):
            self.mirror.sample(InferRequest("m", {}), response(FINE, new_ms))
            self.replay()

    def look(self, now: float = 1.0) -> list[str]:
        self.monitor.look(now)
        return self.verdicts


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

    monkeypatch.setattr(replay_module, "is_finite", no_memory)
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
    assert before.scheduler.seen.total() == 100  # type: ignore[attr-defined]
    canary = Canary(before, DECOUPLED)
    canary.send(response(NAN), times=100)
    assert canary.look(now=30.0) == ["passed"]


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
    assert (scheduler.pending(), scheduler.longest_run_s(0)) == (3, 0)
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
