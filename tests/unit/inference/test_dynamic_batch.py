"""Requests of several callers run together; each is responded once, run or refused."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.callers import Caller
from support.model_configs import config_of
from support.waiting import TIMEOUT_S, wait_until
from unit.inference.threads import no_more_threads

from edge_server.backends.contract import TensorModel
from edge_server.errors import (
    Cancelled,
    DeadlineExceeded,
    EdgeServerError,
    InternalError,
    Unavailable,
)
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.direct import InstancePool
from edge_server.inference.dynamic_batch import DynamicBatchScheduler
from edge_server.inference.execution import Executor
from edge_server.inference.line import LineWatch, RateLimiter
from edge_server.inference.registry import (
    LoadedModel,
    ModelEntry,
    ModelRegistry,
    ModelState,
    Snapshot,
)
from edge_server.inference.scheduling import Scheduling
from edge_server.inference.statistics import FailureReason, ModelStatistics
from edge_server.requests import InferRequest, InferResponse, ResponseCallback
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.backends.contract import Tensors
    from edge_server.model_config.config import ModelConfig


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
            assert self._through.acquire(timeout=TIMEOUT_S)
        return {"b": inputs["a"]}

    def next_run(self) -> list[float]:
        """The first column of the next batch, once it runs."""
        return self.entered.get(timeout=TIMEOUT_S)

    def let_through(self, runs: int = 1) -> None:
        self._through.release(runs)

    def close(self) -> None:
        self.closed = True


class Responses:
    """What one caller responses."""

    def __init__(self, on_response: Callable[[], None] = lambda: None) -> None:
        self.responses: list[tuple[ResponseCallback, bool]] = []
        self._on_response = on_response
        self._over = threading.Event()

    def __call__(self, response: ResponseCallback, final: bool) -> None:
        self.responses.append((response, final))
        self._on_response()
        if final:
            self._over.set()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def only(self) -> InferResponse | EdgeServerError:
        assert self._over.wait(TIMEOUT_S)
        ((response, _),) = self.responses
        assert response is not None
        return response

    def value(self) -> float:
        response = self.only()
        assert isinstance(response, InferResponse), response
        return float(response.outputs["b"].array[0, 0])


def model_config(
    batching: str, instances: int = 1, max_batch_size: int = 4, resources: str = ""
) -> ModelConfig:
    return config_of(f"""
            name: "m" backend: "identity" max_batch_size: {max_batch_size}
            input {{ name: "a" data_type: TYPE_FP32 dims: -1 }}
            output {{ name: "b" data_type: TYPE_FP32 dims: -1 }}
            instance_group {{ name: "m" count: {instances} {resources} }}
            dynamic_batching {{ {batching} }}
            """)


class Served:
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
        config = model_config(batching, instances, max_batch_size, resources)
        self.model = Gated()
        self.loaded: LoadedModel = Scheduling(limiter).model(config, 1, self.model)
        self.registry = ModelRegistry()
        self.registry.replace("m", [ModelEntry("m", 1, ModelState.READY, loaded=self.loaded)])
        self._data_plane = DataPlane(self.registry)

    def submit(
        self,
        value: float,
        *,
        rows: int = 1,
        columns: int = 1,
        responses: Responses | None = None,
        **fields: object,
    ) -> Responses:
        responses = responses or Responses()
        tensor = Tensor(np.full((rows, columns), value, np.float32))
        request = InferRequest("m", {"a": tensor}, **fields)
        self._data_plane.submit(request, responses)
        return responses

    @property
    def counts(self) -> tuple[int, int]:
        counts = self.loaded.statistics.counts()
        return counts.execution_count, counts.inference_count


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(*args: object, **kwargs: object) -> Served:
        made.append(Served(*args, **kwargs))
        return made[-1]

    yield make
    for served in made:
        served.model.open = True
        served.model.let_through(100)
        served.registry.clear()
        wait_until(lambda served=served: served.model.closed)


def test_a_lone_request_runs_at_once(serve: Callable[..., Served]) -> None:
    served = serve()
    responses = served.submit(1)
    assert served.model.next_run() == [1]
    served.model.let_through()
    assert responses.value() == 1


def test_what_comes_while_all_instances_are_busy_runs_together(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    first = served.submit(1)
    assert served.model.next_run() == [1]
    others = [served.submit(value, rows=rows) for value, rows in ((2, 1), (3, 2), (4, 1), (5, 1))]
    assert served.loaded.scheduler.pending() == 4
    served.model.let_through(3)
    assert served.model.next_run() == [2, 3, 3, 4]
    assert served.model.next_run() == [5]
    assert [responses.value() for responses in (first, *others)] == [1, 2, 3, 4, 5]
    assert served.counts == (3, 6)
    assert served.loaded.scheduler.pending() == 0


def test_the_dead_leave_the_queue_while_every_instance_runs(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    first = served.submit(1)
    assert served.model.next_run() == [1]
    callers = [Caller() for _ in range(20)]
    gone = [served.submit(2, cancellation=caller) for caller in callers]
    kept = served.submit(3)
    late = [served.submit(4, deadline=time.monotonic() + 0.05) for _ in range(20)]
    for caller in callers:
        caller.cancelled = True
    assert all(isinstance(responses.only(), Cancelled) for responses in gone)
    assert all(isinstance(responses.only(), DeadlineExceeded) for responses in late)
    assert served.loaded.scheduler.pending() == 1
    served.model.let_through(2)
    assert (first.value(), kept.value()) == (1, 3)


def test_a_delay_longer_than_a_thread_can_wait_is_no_fault(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(f"preferred_batch_size: 2 max_queue_delay_microseconds: {2**64 - 1}")
    served.submit(1)
    wait_until(lambda: served.loaded.scheduler._gathering)  # type: ignore[attr-defined]  # this scheduler has it
    served.submit(2)
    assert served.model.next_run() == [1, 2]
    assert caplog.text == ""


def test_priority_levels_as_many_as_can_be_written_cost_nothing(
    serve: Callable[..., Served],
) -> None:
    most = 2**64 - 1
    served = serve(f"priority_levels: {most} default_priority_level: {most}", max_batch_size=1)
    served.submit(0)
    assert served.model.next_run() == [0]
    for value, priority in ((1, 0), (2, 2**63), (3, 1)):
        served.submit(value, priority=priority)
    served.model.let_through(4)
    assert [served.model.next_run() for _ in range(3)] == [[3], [2], [1]]


def test_where_the_system_gives_no_thread_nothing_is_left_open() -> None:
    with no_more_threads(after=1), pytest.raises(InternalError, match="gets no thread"):
        Served(instances=2)


def test_requests_of_another_shape_run_apart_and_in_order(serve: Callable[..., Served]) -> None:
    served = serve()
    served.submit(1)
    served.model.next_run()
    served.submit(2)
    served.submit(3, columns=2)
    served.submit(4)
    served.model.let_through(4)
    assert [served.model.next_run() for _ in range(3)] == [[2], [3], [4]]


def test_without_a_batch_dimension_requests_queue_and_run_one_by_one() -> None:
    config = config_of(
        'name: "m" backend: "identity" instance_group { name: "m" count: 1 } '
        'input { name: "a" data_type: TYPE_FP32 dims: [-1, -1] } '
        'output { name: "b" data_type: TYPE_FP32 dims: [-1, -1] } dynamic_batching { }'
    )
    model = Gated()
    model.open = True
    loaded = Scheduling().model(config, 1, model)
    responses = [Responses() for _ in range(3)]
    for value, each in enumerate(responses):
        tensor = Tensor(np.full((1, 1), value, np.float32))
        loaded.scheduler.submit(InferRequest("m", {"a": tensor}), None, each)
    assert [each.value() for each in responses] == [0, 1, 2]
    assert loaded.statistics.counts().execution_count == 3
    loaded.close()


def test_a_batch_waits_for_company_and_goes_when_it_is_preferred(
    serve: Callable[..., Served],
) -> None:
    hour_us = 3_600_000_000
    served = serve(f"preferred_batch_size: 3 max_queue_delay_microseconds: {hour_us}")
    for value in (1, 2):
        served.submit(value)
    wait_until(lambda: served.loaded.scheduler._gathering)  # type: ignore[attr-defined]  # this scheduler has it
    assert served.model.entered.empty()
    # Waiting for company is no run, however long it takes.
    assert served.loaded.scheduler.running_since() == math.inf
    served.submit(3)
    assert served.model.next_run() == [1, 2, 3]


def test_the_delay_ends_the_wait_for_company(serve: Callable[..., Served]) -> None:
    served = serve("preferred_batch_size: 4 max_queue_delay_microseconds: 20000")
    submitted_at = time.monotonic()
    served.submit(1)
    assert served.model.next_run() == [1]
    assert time.monotonic() - submitted_at >= 0.02


def test_a_higher_priority_overtakes_and_urgent_overtakes_that(
    serve: Callable[..., Served],
) -> None:
    served = serve("priority_levels: 2 default_priority_level: 2", max_batch_size=1)
    served.submit(0)
    served.model.next_run()
    for value, fields in (
        (1, {}),
        (2, {"priority": 1}),
        (3, {"priority": 2}),
        (4, {"urgent": True}),
    ):
        served.submit(value, **fields)
    served.model.let_through(5)
    assert [served.model.next_run() for _ in range(4)] == [[4], [2], [1], [3]]


def test_a_full_line_refuses_at_once_and_counts_it(serve: Callable[..., Served]) -> None:
    served = serve("default_queue_policy { max_queue_size: 2 }", max_batch_size=1)
    served.submit(0)
    served.model.next_run()
    taken = [served.submit(value) for value in (1, 2)]
    refused = served.submit(3, id="x")
    # Refused before anything else moved.
    assert refused.over
    assert isinstance(refused.only(), Unavailable)
    assert str(refused.only()) == "[request id: x] Exceeds maximum queue size"
    assert served.loaded.statistics.counts().failures[FailureReason.REJECTED] == 1
    served.model.let_through(3)
    assert [responses.value() for responses in taken] == [1, 2]


def test_a_request_that_has_waited_too_long_is_refused_and_never_runs(
    serve: Callable[..., Served],
) -> None:
    hour_us = 3_600_000_000
    served = serve(
        f"default_queue_policy {{ default_timeout_microseconds: {hour_us} "
        "allow_timeout_override: true }"
    )
    served.submit(0)
    served.model.next_run()
    late = served.submit(1, timeout_us=1)
    served.model.let_through()
    error = late.only()
    assert isinstance(error, Unavailable)
    assert str(error) == "Request timeout expired"
    served.submit(2)
    assert served.model.next_run() == [2]
    assert served.loaded.statistics.counts().failures[FailureReason.REJECTED] == 1


def test_a_time_limit_also_ends_the_wait_for_company(serve: Callable[..., Served]) -> None:
    hour_us = 3_600_000_000
    served = serve(
        f"max_queue_delay_microseconds: {hour_us} "
        "default_queue_policy { default_timeout_microseconds: 1000 }"
    )
    assert str(served.submit(1).only()) == "Request timeout expired"
    assert served.counts == (0, 0)


def test_what_is_left_after_a_time_limit_runs_at_once_where_it_is_due(
    serve: Callable[..., Served],
) -> None:
    hour_us = 3_600_000_000
    served = serve(
        f"preferred_batch_size: [ 2, 6 ] max_queue_delay_microseconds: {hour_us} "
        f"default_queue_policy {{ default_timeout_microseconds: {hour_us} "
        "allow_timeout_override: true }",
        max_batch_size=8,
    )
    late, stays = served.submit(1, timeout_us=50_000), served.submit(2, rows=2)
    assert str(late.only()) == "Request timeout expired"
    assert served.model.next_run() == [2, 2]  # not in an hour
    served.model.let_through()
    assert stays.value() == 2


def test_a_time_limit_is_kept_while_every_instance_is_busy(serve: Callable[..., Served]) -> None:
    hour_us = 3_600_000_000
    served = serve(
        f"default_queue_policy {{ default_timeout_microseconds: {hour_us} "
        "allow_timeout_override: true }"
    )
    running = served.submit(1)
    assert served.model.next_run() == [1]
    late = served.submit(2, timeout_us=1000)
    assert str(late.only()) == "Request timeout expired"
    assert not running.over
    served.model.let_through()
    assert running.value() == 1


def test_a_time_limit_is_kept_however_seldom_the_queues_are_searched() -> None:
    watch = LineWatch(period_s=60.0)
    config = model_config(
        "priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 1 "
        "value { default_timeout_microseconds: 20000 } }"
    )
    model, responses = Gated(), [Responses(), Responses(), Responses()]
    pool = InstancePool.of(config, model)
    executor = Executor(config, 1, ModelStatistics())
    assert config.dynamic_batching is not None
    scheduler = DynamicBatchScheduler(executor, pool, config.dynamic_batching, watch)
    request = InferRequest("m", {"a": Tensor(np.ones((1, 1), np.float32))})
    # Without a time limit, as a busy machine may let the worker wait.
    unlimited = InferRequest("m", request.inputs, priority=2)
    scheduler.submit(unlimited, Snapshot({}), responses[0])
    assert model.next_run() == [1]
    for late in responses[1:]:
        scheduler.submit(request, Snapshot({}), late)
        assert str(late.only()) == "Request timeout expired"
    model.let_through()
    assert responses[0].value() == 1
    scheduler.close()
    watch.close()


def test_a_caller_that_has_gone_is_dropped_without_running(serve: Callable[..., Served]) -> None:
    served = serve()
    served.submit(0)
    served.model.next_run()
    caller = Caller()
    gone = served.submit(1, cancellation=caller)
    late = served.submit(2, deadline=time.monotonic() - 1)
    stays = served.submit(3)
    caller.cancelled = True
    served.model.let_through(2)
    assert served.model.next_run() == [3]
    assert isinstance(gone.only(), Cancelled)
    assert isinstance(late.only(), DeadlineExceeded)
    assert stays.value() == 3
    failures = served.loaded.statistics.counts().failures
    assert (failures[FailureReason.CANCELED], failures[FailureReason.REJECTED]) == (1, 1)


def test_a_caller_that_would_be_served_too_late_is_refused_while_the_model_runs(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    # A run takes an hour, as far as anybody knows.
    scheduler = served.loaded.scheduler
    assert isinstance(scheduler, DynamicBatchScheduler)
    runs_s = scheduler._pool.expected.runs_s
    runs_s.append(3600.0)
    busy = served.submit(1)
    served.model.next_run()
    short_deadline = served.submit(2, deadline=time.monotonic() + 1000)
    refusal = short_deadline.only()
    assert isinstance(refusal, Unavailable)
    assert "would have no response before its deadline" in str(refusal)
    long_deadline = served.submit(3, deadline=time.monotonic() + 10_000)
    assert not busy.over
    served.model.let_through(2)
    assert served.model.next_run() == [3]
    assert (busy.value(), long_deadline.value()) == (1, 3)
    wait_until(lambda: len(runs_s) == 3, otherwise="each run tells how long one takes")
    served.model.let_through(1)
    with served.registry.lease() as snapshot:
        first_run = InferRequest("m", {"a": Tensor(np.full((1, 2), 4, np.float32))})
        scheduler.without_queue().infer(first_run, snapshot)
    assert len(runs_s) == 3, "those of a model's validation do not"
    assert served.loaded.statistics.counts().failures[FailureReason.REJECTED] == 1


def test_several_instances_run_several_batches_at_once(serve: Callable[..., Served]) -> None:
    served = serve(instances=2, max_batch_size=1)
    responses = [served.submit(value) for value in (1, 2)]
    assert sorted(served.model.next_run() + served.model.next_run()) == [1, 2]
    served.model.let_through(2)
    assert [each.value() for each in responses] == [1, 2]


class Uneven(Gated):
    """Holds back the runs that have a 1 in front, lets all others through."""

    def _pass_on(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        if inputs["a"].array[0, 0] == 1:
            return super()._pass_on(inputs, outputs)
        self.entered.put(inputs["a"].array[:, 0].tolist())
        return {"b": inputs["a"]}


@pytest.mark.parametrize("preserve", ["true", "false"])
def test_responses_keep_the_order_of_arrival_where_that_is_requested(
    serve: Callable[..., Served], preserve: str
) -> None:
    served = serve(f"preserve_ordering: {preserve}", instances=2, max_batch_size=1)
    served.loaded.close()
    served.model = Uneven()
    served.loaded = Scheduling().model(served.loaded.config, 1, served.model)
    served.registry.replace("m", [ModelEntry("m", 1, ModelState.READY, loaded=served.loaded)])
    order: list[int] = []
    responses = [
        served.submit(n, responses=Responses(lambda n=n: order.append(n))) for n in (1, 2, 3)
    ]
    for _ in range(3):
        served.model.next_run()
    wait_until(lambda: served.counts[0] == 2)
    if preserve == "false":
        wait_until(lambda: order == [2, 3])
    else:
        assert order == []
    served.model.let_through()
    assert [each.value() for each in responses] == [1, 2, 3]
    assert order == ([1, 2, 3] if preserve == "true" else [2, 3, 1])


def test_a_failing_batch_costs_its_requests_and_nothing_else(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    served.loaded.close()

    class Fails(Gated):
        def _pass_on(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
            if inputs["a"].array[0, 0] < 0:
                raise ValueError("odd")
            return {"b": inputs["a"]}

    served.model = Fails()
    served.loaded = Scheduling().model(served.loaded.config, 1, served.model)
    served.registry.replace("m", [ModelEntry("m", 1, ModelState.READY, loaded=served.loaded)])
    for _ in range(3):
        assert "ValueError('odd')" in str(served.submit(-1).only())
        assert served.submit(1).value() == 1
    assert "an instance raised" in caplog.text


def test_what_replaces_a_model_closes_it_after_its_last_response(
    serve: Callable[..., Served],
) -> None:
    served = serve(instances=2)
    responses = [served.submit(value) for value in (1, 2)]
    served.model.next_run()
    # The last response is given on a worker, which then closes the scheduler it works for.
    served.registry.replace("m", [])
    assert not served.model.closed
    served.model.let_through(2)
    assert [each.value() for each in responses] == [1, 2]
    wait_until(lambda: served.model.closed)
    wait_until(lambda: not any(w.alive for w in served.loaded.scheduler._workers))  # type: ignore[attr-defined]  # this scheduler has it


def test_closing_refuses_callers_that_still_waits_and_callers_that_comes_later(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    served.submit(0)
    served.model.next_run()
    waiting = served.submit(1, id="w")
    closing = threading.Thread(target=served.loaded.scheduler.close)
    closing.start()
    text = "Server is stopping, scheduler for model has stopped accepting new inference requests"
    assert str(waiting.only()) == f"[request id: w] {text}"
    assert text in str(served.submit(2).only())
    served.model.let_through()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()


def test_a_batch_grows_while_the_rate_limiter_holds_it_back(serve: Callable[..., Served]) -> None:
    limiter = RateLimiter()
    resources = 'rate_limiter { resources { name: "R" global: true count: 1 } }'
    one = serve(limiter=limiter, resources=resources)
    other = serve(limiter=limiter, resources=resources)
    one.submit(1)
    assert one.model.next_run() == [1]
    held_back = [other.submit(value) for value in (1, 2, 3)]
    assert other.model.entered.empty()
    one.model.let_through()
    assert other.model.next_run() == [1, 2, 3]
    other.model.let_through()
    assert [responses.value() for responses in held_back] == [1, 2, 3]


def test_far_above_capacity_every_request_gets_a_response_once_run_or_refused(
    serve: Callable[..., Served],
) -> None:
    served = serve("default_queue_policy { max_queue_size: 5 }", instances=2)
    served.model.open = True
    submitters, each_submits = 12, 100
    responses: list[list[Responses]] = [[] for _ in range(submitters)]

    def submit_all(own: list[Responses]) -> None:
        for value in range(each_submits):
            own.append(served.submit(value))  # noqa: PERF401 - it is asked one by one

    threads = [threading.Thread(target=submit_all, args=(own,)) for own in responses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    outcomes: Counter[str] = Counter()
    for own in responses:
        for value, each in enumerate(own):
            response = each.only()
            if isinstance(response, InferResponse):
                assert each.value() == value
                outcomes["run"] += 1
            else:
                assert "Exceeds maximum queue size" in str(response)
                outcomes["refused"] += 1
    assert sum(outcomes.values()) == submitters * each_submits
    counts = served.loaded.statistics.counts()
    assert (counts.success.count, counts.failures[FailureReason.REJECTED]) == (
        outcomes["run"],
        outcomes["refused"],
    )
    assert served.loaded.scheduler.pending() == 0
    # Every place in the line and every instance is free again.
    served.model.open = False
    for _ in range(2):
        served.submit(1)
        wait_until(lambda: served.loaded.scheduler.pending() == 0)
    assert not any(served.submit(1).over for _ in range(5))
    assert served.submit(1).over
