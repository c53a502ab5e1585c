"""A canary and its predecessor on a clock of their own, for tests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from support.model_configs import config_of

from edge_server.backends.contract import Phases
from edge_server.inference.canary_monitor import CanaryMonitor, CanaryTerms, WatchedScheduler
from edge_server.inference.registry import LoadedModel, Snapshot
from edge_server.inference.statistics import FailureReason, ModelStatistics
from edge_server.requests import (
    InferRequest,
    InferResponse,
    ResponseCallback,
    SequencePlace,
    StepTiming,
)
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from edge_server.inference.mirror import Mirror
    from edge_server.model_config.config import ModelConfig, Placement
    from edge_server.requests import Respond


def config(extra: str = "", backend: str = "identity") -> ModelConfig:
    text = (
        f'name: "m" backend: "{backend}" input {{ name: "a" data_type: TYPE_FP32 dims: -1 '
        f'optional: true }} output {{ name: "b" data_type: TYPE_FP32 dims: -1 }} {extra}'
    )
    return config_of(text)


# Failed requests can be replayed on its predecessor; on the next one's any; on the others' none.
CONFIG = config(backend="python")


TIMED = config()


DECOUPLED = config("model_transaction_policy { decoupled: true }")


TERMS = CanaryTerms(requests=100, least_s=30.0, longest_s=300.0)


MS = 1_000_000


FINE = {"b": Tensor(np.ones(2, "<f4"))}


NAN = {"b": Tensor(np.array([1, np.nan], "<f4"))}


class FixedScheduler:
    """A scheduler that gives `response` at once."""

    def __init__(self) -> None:
        self.response: ResponseCallback = response(FINE)
        self.more: tuple[ResponseCallback, ...] = ()
        self.since = math.inf
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

    def running_since(self) -> float:
        return self.since

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
        self.looked = 0.0

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
        """Look at `now`, after the process did not run since the last look."""
        self.looked = now
        self.monitor.check(now)
        return self.verdicts

    def look_on(self, until: float) -> list[str]:
        """Look as often as the monitor's own thread does, until then."""
        while self.looked < until:
            self.look(self.looked + min(0.25, until - self.looked))
        return self.verdicts
