"""Requests of several callers run together; each is answered once, run or refused."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.contract import TensorModel
from edge_server.errors import (
    Cancelled,
    DeadlineExceeded,
    EdgeServerError,
    InternalError,
    Unavailable,
)
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.rate_limiter import RateLimiter
from edge_server.inference.registry import ModelRegistry
from edge_server.inference.scheduling import Scheduling
from edge_server.inference.snapshot import LoadedModel, ModelEntry, ModelState
from edge_server.inference.statistics import FailureReason
from edge_server.model_config.config import ModelConfig
from edge_server.requests import InferRequest, InferResponse, ResponseCallback
from edge_server.tensors import Tensor
from tests.unit.inference.threads import no_more_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.backends.contract import Tensors

PATIENCE_S = 10.0


class Gated(TensorModel):
    """Passes its input on; each run first shows what it got, and waits to be let through."""

    def __init__(self) -> None:
        super().__init__(self._pass_on)
        self.entered: queue.Queue[list[float]] = queue.Queue()
        self.open = False
        self.closed = False
        self._through = threading.Semaphore(0)

    def _pass_on(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        self.entered.put(inputs["a"].array[:, 0].tolist())
        if not self.open:
            assert self._through.acquire(timeout=PATIENCE_S)
        return {"b": inputs["a"]}

    def next_run(self) -> list[float]:
        """The first column of the next batch, once it runs."""
        return self.entered.get(timeout=PATIENCE_S)

    def let_through(self, runs: int = 1) -> None:
        self._through.release(runs)

    def close(self) -> None:
        self.closed = True


class Heard:
    """What one caller heard."""

    def __init__(self, on_answer: Callable[[], None] = lambda: None) -> None:
        self.answers: list[tuple[ResponseCallback, bool]] = []
        self._on_answer = on_answer
        self._over = threading.Event()

    def __call__(self, answer: ResponseCallback, final: bool) -> None:
        self.answers.append((answer, final))
        self._on_answer()
        if final:
            self._over.set()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def only(self) -> InferResponse | EdgeServerError:
        assert self._over.wait(PATIENCE_S)
        ((answer, _),) = self.answers
        assert answer is not None
        return answer

    def value(self) -> float:
        answer = self.only()
        assert isinstance(answer, InferResponse), answer
        return float(answer.outputs["b"].array[0, 0])


class Caller:
    """A caller that may go."""

    cancelled = False

    def when_cancelled(self, callback: Callable[[], None]) -> None: ...


class World:
    """One model, `m`: a → b, behind a real data plane."""

    def __init__(
        self,
        batching: str = "",
        *,
        instances: int = 1,
        max_batch_size: int = 4,
        limiter: RateLimiter | None = None,
        resources: str = "",
    ) -> None:
        config = ModelConfig.of(
            text_format.Parse(
                f"""
                name: "m" backend: "identity" max_batch_size: {max_batch_size}
                input {{ name: "a" data_type: TYPE_FP32 dims: -1 }}
                output {{ name: "b" data_type: TYPE_FP32 dims: -1 }}
                instance_group {{ name: "m" count: {instances} {resources} }}
                dynamic_batching {{ {batching} }}
                """,
                pb.ModelConfig(),
            )
        )
        self.model = Gated()
        self.loaded: LoadedModel = Scheduling(limiter).model(config, 1, self.model)
        self.registry = ModelRegistry()
        self.registry.replace("m", [ModelEntry("m", 1, ModelState.READY, loaded=self.loaded)])
        self._data_plane = DataPlane(self.registry)

    def ask(
        self,
        value: float,
        *,
        rows: int = 1,
        columns: int = 1,
        heard: Heard | None = None,
        **fields: object,
    ) -> Heard:
        heard = heard or Heard()
        tensor = Tensor(np.full((rows, columns), value, np.float32))
        request = InferRequest("m", {"a": tensor}, **fields)  # type: ignore[arg-type]
        self._data_plane.submit(request, heard)
        return heard

    @property
    def counts(self) -> tuple[int, int]:
        counts = self.loaded.statistics.counts()
        return counts.execution_count, counts.inference_count


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*args: object, **kwargs: object) -> World:
        made.append(World(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for world in made:
        world.model.open = True
        world.model.let_through(100)
        world.registry.clear()
        assert _soon(lambda world=world: world.model.closed)


def _soon(true: Callable[[], bool]) -> bool:
    """Whether that becomes true; for what another thread does and no event tells."""
    until = time.monotonic() + PATIENCE_S
    while not true() and time.monotonic() < until:
        time.sleep(0.002)
    return true()


def test_a_lone_request_runs_at_once(worlds: Callable[..., World]) -> None:
    world = worlds()
    heard = world.ask(1)
    assert world.model.next_run() == [1]
    world.model.let_through()
    assert heard.value() == 1


def test_what_comes_while_all_instances_are_busy_runs_together(
    worlds: Callable[..., World],
) -> None:
    world = worlds()
    first = world.ask(1)
    assert world.model.next_run() == [1]
    others = [world.ask(value, rows=rows) for value, rows in ((2, 1), (3, 2), (4, 1), (5, 1))]
    assert world.loaded.scheduler.pending() == 4
    world.model.let_through(3)
    assert world.model.next_run() == [2, 3, 3, 4]
    assert world.model.next_run() == [5]
    assert [heard.value() for heard in (first, *others)] == [1, 2, 3, 4, 5]
    assert world.counts == (3, 6)
    assert world.loaded.scheduler.pending() == 0


def test_the_dead_leave_the_line_while_every_instance_runs(
    worlds: Callable[..., World],
) -> None:
    world = worlds()
    first = world.ask(1)
    assert world.model.next_run() == [1]
    callers = [Caller() for _ in range(20)]
    gone = [world.ask(2, cancellation=caller) for caller in callers]
    kept = world.ask(3)
    late = [world.ask(4, deadline=time.monotonic() + 0.05) for _ in range(20)]
    for caller in callers:
        caller.cancelled = True
    assert all(isinstance(heard.only(), Cancelled) for heard in gone)
    assert all(isinstance(heard.only(), DeadlineExceeded) for heard in late)
    assert world.loaded.scheduler.pending() == 1
    world.model.let_through(2)
    assert (first.value(), kept.value()) == (1, 3)


def test_a_delay_longer_than_a_thread_can_wait_is_no_fault(
    worlds: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    world = worlds(f"preferred_batch_size: 2 max_queue_delay_microseconds: {2**64 - 1}")
    world.ask(1)
    assert _soon(lambda: world.loaded.scheduler._gathering)  # type: ignore[attr-defined]
    world.ask(2)
    assert world.model.next_run() == [1, 2]
    assert caplog.text == ""


def test_priority_levels_as_many_as_can_be_written_cost_nothing(
    worlds: Callable[..., World],
) -> None:
    most = 2**64 - 1
    world = worlds(f"priority_levels: {most} default_priority_level: {most}", max_batch_size=1)
    world.ask(0)
    assert world.model.next_run() == [0]
    for value, priority in ((1, 0), (2, 2**63), (3, 1)):
        world.ask(value, priority=priority)
    world.model.let_through(4)
    assert [world.model.next_run() for _ in range(3)] == [[3], [2], [1]]


def test_where_the_system_gives_no_thread_nothing_is_left_open() -> None:
    with no_more_threads(after=1), pytest.raises(InternalError, match="gets no thread"):
        World(instances=2)


def test_requests_of_another_shape_run_apart_and_in_order(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.ask(1)
    world.model.next_run()
    world.ask(2)
    world.ask(3, columns=2)
    world.ask(4)
    world.model.let_through(4)
    assert [world.model.next_run() for _ in range(3)] == [[2], [3], [4]]


def test_without_a_batch_dimension_requests_queue_and_run_one_by_one() -> None:
    config = ModelConfig.of(
        text_format.Parse(
            'name: "m" backend: "identity" instance_group { name: "m" count: 1 } '
            'input { name: "a" data_type: TYPE_FP32 dims: [-1, -1] } '
            'output { name: "b" data_type: TYPE_FP32 dims: [-1, -1] } dynamic_batching { }',
            pb.ModelConfig(),
        )
    )
    model = Gated()
    model.open = True
    loaded = Scheduling().model(config, 1, model)
    heard = [Heard() for _ in range(3)]
    for value, each in enumerate(heard):
        tensor = Tensor(np.full((1, 1), value, np.float32))
        loaded.scheduler.submit(InferRequest("m", {"a": tensor}), None, each)  # type: ignore[arg-type]
    assert [each.value() for each in heard] == [0, 1, 2]
    assert loaded.statistics.counts().execution_count == 3
    loaded.close()


def test_a_batch_waits_for_company_and_goes_when_it_is_preferred(
    worlds: Callable[..., World],
) -> None:
    hour_us = 3_600_000_000
    world = worlds(f"preferred_batch_size: 3 max_queue_delay_microseconds: {hour_us}")
    for value in (1, 2):
        world.ask(value)
    assert _soon(lambda: world.loaded.scheduler._gathering)  # type: ignore[attr-defined]
    assert world.model.entered.empty()
    # Waiting for company is no run, however long it takes.
    assert world.loaded.scheduler.longest_run_s(time.monotonic() + 100) == 0
    world.ask(3)
    assert world.model.next_run() == [1, 2, 3]


def test_the_delay_ends_the_wait_for_company(worlds: Callable[..., World]) -> None:
    world = worlds("preferred_batch_size: 4 max_queue_delay_microseconds: 20000")
    asked_at = time.monotonic()
    world.ask(1)
    assert world.model.next_run() == [1]
    assert time.monotonic() - asked_at >= 0.02


def test_a_higher_priority_overtakes_and_urgent_overtakes_that(
    worlds: Callable[..., World],
) -> None:
    world = worlds("priority_levels: 2 default_priority_level: 2", max_batch_size=1)
    world.ask(0)
    world.model.next_run()
    for value, fields in (
        (1, {}),
        (2, {"priority": 1}),
        (3, {"priority": 2}),
        (4, {"urgent": True}),
    ):
        world.ask(value, **fields)
    world.model.let_through(5)
    assert [world.model.next_run() for _ in range(4)] == [[4], [2], [1], [3]]


def test_a_full_line_refuses_at_once_and_counts_it(worlds: Callable[..., World]) -> None:
    world = worlds("default_queue_policy { max_queue_size: 2 }", max_batch_size=1)
    world.ask(0)
    world.model.next_run()
    taken = [world.ask(value) for value in (1, 2)]
    refused = world.ask(3, id="x")
    # Refused before anything else moved.
    assert refused.over
    assert isinstance(refused.only(), Unavailable)
    assert str(refused.only()) == "[request id: x] Exceeds maximum queue size"
    assert world.loaded.statistics.counts().failures[FailureReason.REJECTED] == 1
    world.model.let_through(3)
    assert [heard.value() for heard in taken] == [1, 2]


def test_who_has_waited_too_long_is_refused_and_never_runs(worlds: Callable[..., World]) -> None:
    hour_us = 3_600_000_000
    world = worlds(
        f"default_queue_policy {{ default_timeout_microseconds: {hour_us} "
        "allow_timeout_override: true }"
    )
    world.ask(0)
    world.model.next_run()
    late = world.ask(1, timeout_us=1)
    world.model.let_through()
    error = late.only()
    assert isinstance(error, Unavailable)
    assert str(error) == "Request timeout expired"
    world.ask(2)
    assert world.model.next_run() == [2]
    assert world.loaded.statistics.counts().failures[FailureReason.REJECTED] == 1


def test_a_time_limit_also_ends_the_wait_for_company(worlds: Callable[..., World]) -> None:
    hour_us = 3_600_000_000
    world = worlds(
        f"max_queue_delay_microseconds: {hour_us} "
        "default_queue_policy { default_timeout_microseconds: 1000 }"
    )
    assert str(world.ask(1).only()) == "Request timeout expired"
    assert world.counts == (0, 0)


def test_a_time_limit_is_kept_while_every_instance_is_busy(worlds: Callable[..., World]) -> None:
    hour_us = 3_600_000_000
    world = worlds(
        f"default_queue_policy {{ default_timeout_microseconds: {hour_us} "
        "allow_timeout_override: true }"
    )
    running = world.ask(1)
    assert world.model.next_run() == [1]
    late = world.ask(2, timeout_us=1000)
    assert str(late.only()) == "Request timeout expired"
    assert not running.over
    world.model.let_through()
    assert running.value() == 1


def test_who_has_gone_is_dropped_without_running(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.ask(0)
    world.model.next_run()
    caller = Caller()
    gone = world.ask(1, cancellation=caller)
    late = world.ask(2, deadline=time.monotonic() - 1)
    stays = world.ask(3)
    caller.cancelled = True
    world.model.let_through(2)
    assert world.model.next_run() == [3]
    assert isinstance(gone.only(), Cancelled)
    assert isinstance(late.only(), DeadlineExceeded)
    assert stays.value() == 3
    failures = world.loaded.statistics.counts().failures
    assert (failures[FailureReason.CANCELED], failures[FailureReason.REJECTED]) == (1, 1)


def test_who_would_be_answered_too_late_is_turned_away_while_the_model_runs(
    worlds: Callable[..., World],
) -> None:
    world = worlds()
    slow = world.ask(0)
    world.model.next_run()
    assert not slow._over.wait(0.3)
    world.model.let_through()
    slow.value()
    busy = world.ask(1)
    world.model.next_run()
    hurried = world.ask(2, deadline=time.monotonic() + 0.25)
    refusal = hurried.only()
    assert isinstance(refusal, Unavailable)
    assert "would have no response before its deadline" in str(refusal)
    patient = world.ask(3, deadline=time.monotonic() + 60)
    assert not busy.over
    world.model.let_through(2)
    assert world.model.next_run() == [3]
    assert (busy.value(), patient.value()) == (1, 3)
    assert world.loaded.statistics.counts().failures[FailureReason.REJECTED] == 1


def test_several_instances_run_several_batches_at_once(worlds: Callable[..., World]) -> None:
    world = worlds(instances=2, max_batch_size=1)
    heard = [world.ask(value) for value in (1, 2)]
    assert sorted(world.model.next_run() + world.model.next_run()) == [1, 2]
    world.model.let_through(2)
    assert [each.value() for each in heard] == [1, 2]


class Uneven(Gated):
    """Holds back the runs that have a 1 in front, lets all others through."""

    def _pass_on(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        if inputs["a"].array[0, 0] == 1:
            return super()._pass_on(inputs, outputs)
        self.entered.put(inputs["a"].array[:, 0].tolist())
        return {"b": inputs["a"]}


@pytest.mark.parametrize("preserve", ["true", "false"])
def test_answers_keep_the_order_of_arrival_where_that_is_asked_for(
    worlds: Callable[..., World], preserve: str
) -> None:
    world = worlds(f"preserve_ordering: {preserve}", instances=2, max_batch_size=1)
    world.loaded.close()
    world.model = Uneven()
    world.loaded = Scheduling().model(world.loaded.config, 1, world.model)
    world.registry.replace("m", [ModelEntry("m", 1, ModelState.READY, loaded=world.loaded)])
    order: list[int] = []
    heard = [world.ask(n, heard=Heard(lambda n=n: order.append(n))) for n in (1, 2, 3)]
    for _ in range(3):
        world.model.next_run()
    assert _soon(lambda: world.counts[0] == 2)
    if preserve == "false":
        assert _soon(lambda: order == [2, 3])
    else:
        assert order == []
    world.model.let_through()
    assert [each.value() for each in heard] == [1, 2, 3]
    assert order == ([1, 2, 3] if preserve == "true" else [2, 3, 1])


def test_a_failing_batch_costs_its_requests_and_nothing_else(
    worlds: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    world = worlds()
    world.loaded.close()

    class Fails(Gated):
        def _pass_on(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
            if inputs["a"].array[0, 0] < 0:
                raise ValueError("odd")
            return {"b": inputs["a"]}

    world.model = Fails()
    world.loaded = Scheduling().model(world.loaded.config, 1, world.model)
    world.registry.replace("m", [ModelEntry("m", 1, ModelState.READY, loaded=world.loaded)])
    for _ in range(3):
        assert "ValueError('odd')" in str(world.ask(-1).only())
        assert world.ask(1).value() == 1
    assert "an instance raised" in caplog.text


def test_what_replaces_a_model_closes_it_after_its_last_answer(
    worlds: Callable[..., World],
) -> None:
    world = worlds(instances=2)
    heard = [world.ask(value) for value in (1, 2)]
    world.model.next_run()
    # The last answer is given on a worker, which then closes the scheduler it works for.
    world.registry.replace("m", [])
    assert not world.model.closed
    world.model.let_through(2)
    assert [each.value() for each in heard] == [1, 2]
    assert _soon(lambda: world.model.closed)
    assert _soon(lambda: not any(w.alive for w in world.loaded.scheduler._workers))  # type: ignore[attr-defined]


def test_closing_refuses_who_still_waits_and_who_comes_later(
    worlds: Callable[..., World],
) -> None:
    world = worlds()
    world.ask(0)
    world.model.next_run()
    waiting = world.ask(1, id="w")
    closing = threading.Thread(target=world.loaded.scheduler.close)
    closing.start()
    text = "Server is stopping, scheduler for model has stopped accepting new inference requests"
    assert str(waiting.only()) == f"[request id: w] {text}"
    assert text in str(world.ask(2).only())
    world.model.let_through()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_a_batch_grows_while_the_rate_limiter_holds_it_back(worlds: Callable[..., World]) -> None:
    limiter = RateLimiter()
    resources = 'rate_limiter { resources { name: "R" global: true count: 1 } }'
    one = worlds(limiter=limiter, resources=resources)
    other = worlds(limiter=limiter, resources=resources)
    one.ask(1)
    assert one.model.next_run() == [1]
    held_back = [other.ask(value) for value in (1, 2, 3)]
    assert other.model.entered.empty()
    one.model.let_through()
    assert other.model.next_run() == [1, 2, 3]
    other.model.let_through()
    assert [heard.value() for heard in held_back] == [1, 2, 3]


def test_far_above_capacity_every_request_is_answered_once_run_or_refused(
    worlds: Callable[..., World],
) -> None:
    world = worlds("default_queue_policy { max_queue_size: 5 }", instances=2)
    world.model.open = True
    submitters, each_asks = 12, 100
    heard: list[list[Heard]] = [[] for _ in range(submitters)]

    def ask_all(own: list[Heard]) -> None:
        for value in range(each_asks):
            own.append(world.ask(value))  # noqa: PERF401 - it is asked one by one

    threads = [threading.Thread(target=ask_all, args=(own,)) for own in heard]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    outcomes: Counter[str] = Counter()
    for own in heard:
        for value, each in enumerate(own):
            answer = each.only()
            if isinstance(answer, InferResponse):
                assert each.value() == value
                outcomes["run"] += 1
            else:
                assert "Exceeds maximum queue size" in str(answer)
                outcomes["refused"] += 1
    assert sum(outcomes.values()) == submitters * each_asks
    counts = world.loaded.statistics.counts()
    assert (counts.success.count, counts.failures[FailureReason.REJECTED]) == (
        outcomes["run"],
        outcomes["refused"],
    )
    assert world.loaded.scheduler.pending() == 0
    # Every place in the line and every instance is free again.
    world.model.open = False
    for _ in range(2):
        world.ask(1)
        assert _soon(lambda: world.loaded.scheduler.pending() == 0)
    assert not any(world.ask(1).over for _ in range(5))
    assert world.ask(1).over
