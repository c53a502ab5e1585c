"""A version that is worse than the one before it is told of once; one that is not passes."""

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
from edge_server.model_config.config import ModelConfig, Placement
from edge_server.requests import Answer, InferRequest, InferResponse
from edge_server.serving.probation import Probation, ProbationTerms, recorded
from edge_server.serving.snapshot import LoadedModel, Snapshot
from edge_server.serving.statistics import Failure, ModelStatistics
from edge_server.serving.watch import Watch, WatchedScheduler
from edge_server.tensors import DataType, Tensor

if TYPE_CHECKING:
    from edge_server.requests import Respond

CONFIG = ModelConfig.of(text_format.Parse('name: "m" backend: "identity"', pb.ModelConfig()))
TERMS = ProbationTerms(requests=100, least_s=30.0, longest_s=300.0)
MS = 1_000_000
FINE = {"b": Tensor(np.ones(2, "<f4"))}
NAN = {"b": Tensor(np.array([1, np.nan], "<f4"))}


class Says:
    """A scheduler that gives `answer` at once."""

    def __init__(self) -> None:
        self.answer: Answer = response(FINE)
        self.more: tuple[Answer, ...] = ()
        self.run_s = 0.0
        self.closed = 0

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        if request.parameters:
            for answer in (*self.more, self.answer):
                respond(answer, False)
            respond(None, True)
        else:
            respond(self.answer, True)

    def pending(self) -> int:
        return 3

    def longest_run_s(self, now: float) -> float:
        return self.run_s

    def close(self) -> None:
        self.closed += 1


class Troubled:
    """A model that says what troubles it."""

    why = ""

    def make_instance(self, name: str, placement: Placement) -> Any:
        raise NotImplementedError

    def trouble(self) -> str:
        return self.why

    def metrics(self) -> tuple[()]:
        return ()

    def close(self) -> None: ...


def response(outputs: dict[str, Tensor]) -> InferResponse:
    return InferResponse("m", "2", "", outputs)


def predecessor(good: int = 0, failed: int = 0, ms: float = 1) -> LoadedModel:
    statistics = ModelStatistics()
    for _ in range(good):
        statistics.succeeded(int(ms * MS), 0, Phases(0, 0, 0))
    for _ in range(failed):
        statistics.failed(Failure.BACKEND, MS)
    return LoadedModel(CONFIG, 1, Says(), statistics)


class Trial:
    """A version on probation from second 0 on, without the thread that looks."""

    def __init__(self, before: LoadedModel | None = None) -> None:
        self.verdicts: list[str] = []
        self.says = Says()
        self.model = Troubled()
        self.probation = Probation(
            "m",
            TERMS,
            on_failed=self.verdicts.append,
            on_passed=lambda: self.verdicts.append("passed"),
        )
        fresh = LoadedModel(CONFIG, 2, self.says, ModelStatistics(), self.model)
        self.watched = self.probation.watch(fresh, before or predecessor())
        self.probation.begin(0.0)

    def ask(self, answer: Answer = None, times: int = 1, *, stream: bool = False) -> None:
        self.says.answer = answer or response(FINE)
        parameters = {"stream": True} if stream else {}
        heard: list[Answer] = []
        request = InferRequest("m", {}, parameters=parameters)
        for _ in range(times):
            self.watched.scheduler.submit(request, Snapshot({}), lambda a, _: heard.append(a))
        said = [*(self.says.more if stream else ()), self.says.answer]
        assert [a for a in heard if a is not None] == said * times

    def slow(self, times: int, ms: float) -> None:
        """Answers that took so long, without waiting for them."""
        (each,) = self.probation.watched
        for _ in range(times):
            each.watch.note(None, int(ms * MS), finite=True)

    def look(self, now: float = 1.0) -> list[str]:
        self.probation.look(now)
        return self.verdicts


def test_it_passes_with_the_requests_and_the_seconds_and_is_then_left_alone() -> None:
    trial = Trial()
    trial.ask(times=99)
    assert trial.look(now=31.0) == []
    trial.ask()
    assert trial.look(now=29.0) == []
    assert trial.look(now=30.0) == ["passed"]
    trial.ask(InternalError("late"), times=99)
    assert trial.look(now=40.0) == ["passed"]
    scheduler = trial.watched.scheduler
    assert isinstance(scheduler, WatchedScheduler)
    assert scheduler.seen.requests == 100


def test_a_model_that_nobody_asks_passes_in_the_end() -> None:
    trial = Trial()
    assert trial.look(now=299.0) == []
    assert trial.look(now=300.0) == ["passed"]


def test_the_third_failure_is_one_too_many_and_told_once() -> None:
    trial = Trial(predecessor(good=100))
    trial.ask(InternalError("no"), times=2)
    assert trial.look() == []
    trial.ask(InternalError("no"), times=2)
    verdict = ["version 2: 4 of 4 requests failed; before it 0.0% did"]
    assert trial.look() == verdict
    trial.ask(InternalError("no"), times=9)
    assert trial.look(now=999.0) == verdict


def test_failures_as_they_were_before_are_no_reason() -> None:
    trial = Trial(predecessor(good=80, failed=20))
    for _ in range(20):
        trial.ask(InternalError("no"), times=2)
        trial.ask(times=3)
    assert trial.look() == []
    trial.ask(InternalError("no"), times=60)
    assert "requests failed; before it 20.0% did" in trial.look()[0]


def test_what_fails_after_much_that_was_good_is_seen_in_the_last_requests() -> None:
    trial = Trial()
    trial.ask(times=10_000)
    trial.ask(InternalError("no"), times=6)
    assert trial.look() == ["version 2: 6 of 100 requests failed; before it 0.0% did"]


@pytest.mark.parametrize("kind", [Cancelled, DeadlineExceeded, InvalidRequest, Unavailable])
def test_what_the_callers_do_is_no_failure_of_the_model(kind: type[EdgeServerError]) -> None:
    trial = Trial()
    trial.ask(kind("x"), times=100)
    assert trial.look(now=30.0) == ["passed"]


@pytest.mark.parametrize(
    "outputs",
    [
        NAN,
        {**FINE, "c": Tensor(np.array(np.inf, "<f2"))},
        {"b": Tensor(np.array([0xFF80], "<u2").view(DataType.BF16.numpy))},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_are_not_finite_fail_it(outputs: dict[str, Tensor], stream: bool) -> None:
    trial = Trial()
    trial.ask(times=20)
    trial.ask(response(outputs), times=3, stream=stream)
    assert trial.look() == ["version 2: 3 of 23 answers were not finite; before it 0.0% were not"]


def test_one_answer_of_many_that_is_not_finite_is_enough() -> None:
    trial = Trial()
    trial.says.more = (response(NAN), response(FINE))
    trial.ask(times=3, stream=True)
    assert len(trial.look()) == 1


def test_integers_and_texts_are_always_finite() -> None:
    trial = Trial()
    outputs = {"b": Tensor(np.array([1])), "c": Tensor(np.array([b"nan"], np.object_))}
    trial.ask(response(outputs), times=100)
    assert trial.look(now=30.0) == ["passed"]


def test_infinities_that_its_predecessor_gave_too_are_no_reason() -> None:
    before = recorded(predecessor(), TERMS)
    assert isinstance(before.scheduler.beneath, Says)  # type: ignore[attr-defined]
    before.scheduler.beneath.answer = response(NAN)  # type: ignore[attr-defined]
    for _ in range(150):
        before.scheduler.submit(InferRequest("m", {}), Snapshot({}), lambda *_: None)
    assert before.scheduler.seen.requests == 100  # type: ignore[attr-defined]
    trial = Trial(before)
    trial.ask(response(NAN), times=100)
    assert trial.look(now=30.0) == ["passed"]


def test_requests_slower_than_three_times_the_p99_before_and_5_ms_fail_it() -> None:
    trial = Trial(predecessor(good=50, ms=10))
    trial.slow(47, 34)
    trial.slow(2, 50)
    trial.slow(1, 34)
    assert trial.look() == []
    trial.slow(1, 50)
    (verdict,) = trial.look()
    assert verdict.startswith("version 2: 3 of 51 requests took longer than 36.5 ms,")


def test_latencies_are_not_compared_with_few_requests_on_either_side() -> None:
    trial = Trial(predecessor(good=50, ms=10))
    trial.slow(49, 500)
    assert trial.look() == []
    unknown = Trial(predecessor(good=49, ms=10))
    unknown.slow(100, 500)
    assert unknown.look() == []


def test_a_run_that_does_not_end_is_seen_at_the_second_look() -> None:
    trial = Trial(predecessor(good=50, ms=1))
    trial.says.run_s = 1.5
    assert trial.look(now=1.0) == []
    trial.says.run_s = 0.0
    assert trial.look(now=1.3) == []
    trial.says.run_s = 1.5
    assert trial.look(now=1.6) == []
    assert trial.look(now=1.85) == ["version 2: a run takes 1.5 s and does not end"]


def test_a_slow_models_runs_may_take_long() -> None:
    trial = Trial(predecessor(good=50, ms=1000))
    trial.says.run_s = 20
    assert [trial.look(now=1.0), trial.look(now=9.0)] == [[], []]


def test_a_model_that_stays_away_fails_it() -> None:
    trial = Trial()
    trial.model.why = "its process ended"
    assert trial.look(now=1.0) == []
    trial.model.why = ""
    assert trial.look(now=1.9) == []
    trial.model.why = "its process ended"
    assert trial.look(now=2.0) == []
    assert trial.look(now=3.0) == ["away for more than 1 s: its process ended"]


def test_after_stop_no_verdict_is_given() -> None:
    trial = Trial()
    trial.ask(InternalError("no"), times=9)
    trial.probation.stop()
    assert trial.look() == []


def test_its_own_thread_tells_promptly_and_what_is_over_last() -> None:
    told = threading.Event()
    said: list[str] = []
    says = Says()

    def over() -> None:
        said.append("over")
        told.set()

    probation = Probation(
        "m",
        ProbationTerms(),
        on_failed=lambda _: said.append(threading.current_thread().name),
        on_passed=lambda: said.append("passed"),
        on_over=over,
    )
    fresh = LoadedModel(CONFIG, 2, says, ModelStatistics())
    watched = probation.watch(fresh, predecessor())
    probation.start()
    says.answer = InternalError("no")
    for _ in range(3):
        watched.scheduler.submit(InferRequest("m", {}), Snapshot({}), lambda *_: None)
    assert told.wait(30)
    assert said == ["probation-m", "over"]
    probation.wait_over(30)


def test_a_watched_scheduler_is_its_scheduler_in_all_else() -> None:
    trial = Trial()
    scheduler = trial.watched.scheduler
    assert (scheduler.pending(), scheduler.longest_run_s(0)) == (3, 0)
    trial.watched.close()
    assert trial.says.closed == 1


def test_counts_of_many_threads_add_up() -> None:
    watch = Watch(10)

    def note() -> None:
        for _ in range(200):
            watch.note(None, 1, finite=True)

    threads = [threading.Thread(target=note) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (watch.all.requests, watch.recent.requests) == (800, 10)
