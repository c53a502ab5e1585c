"""Decoupled members of an ensemble: responses in order, and held back where too many wait."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.callers import Caller
from support.waiting import wait_until
from unit.inference.ensembles import (
    TIMEOUT_S,
    Models,
    Queueing,
    Responses,
    counting,
    ensemble_config,
    models_of,
    plus,
    queueing,
    response_to,
    running,
    streaming,
    submitted,
    value,
)
from unit.inference.threads import no_more_threads

from edge_server.errors import (
    Cancelled,
    DeadlineExceeded,
    EdgeServerError,
    InternalError,
    Unavailable,
)
from edge_server.inference.line import StepThreads
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from edge_server.inference.line import Task
    from edge_server.inference.registry import Snapshot
    from edge_server.requests import Respond


def test_each_response_of_a_decoupled_step_goes_its_own_way_and_they_come_in_order() -> None:
    ensemble = ensemble_config("e", "x", "y", "s a=x > b=t", "m a=t > b=y")
    models = models_of(ensemble, streaming("s", counting(3)), running("m", plus(10)))
    responses = submitted(models, InferRequest("e", {"x": value(0)}))
    assert responses.numbers("y") == [[10], [11], [12]]
    assert [final for _, final in responses.responses] == [False, False, True]
    counts = models.statistics("e").counts()
    assert (counts.success.count, counts.execution_count) == (1, 1)
    assert [counts.responses[key].success.count for key in ("0", "1", "2")] == [1, 1, 1]
    assert models.snapshot.find("e").config.decoupled
    models.threads.close()


def test_responses_keep_their_order_when_the_steps_behind_do_not() -> None:
    queue = Queueing()
    ensemble = ensemble_config("e", "x", "y", "s a=x > b=t", "q a=t > b=y")
    models = models_of(ensemble, streaming("s", counting(3, end=True)), queueing("q", queue))
    responses = submitted(models, InferRequest("e", {"x": value(0)}))
    for request, respond in reversed([queue.next() for _ in range(3)]):
        respond(response_to(request, b=request.inputs["a"]), True)
    assert responses.numbers("y") == [[0], [1], [2]]


def test_a_decoupled_step_without_a_response_is_an_ensemble_without_one() -> None:
    ensemble = ensemble_config("e", "x", "y", "s a=x > b=t", "m a=t > b=y")
    models = models_of(ensemble, streaming("s", counting(0)), running("m", plus(0)))
    assert submitted(models, InferRequest("e", {"x": value(0)})).wait() == [None]


def test_tensors_from_elsewhere_are_used_for_each_response_whenever_they_come() -> None:
    late = Queueing()
    ensemble = ensemble_config(
        "e", "x", "y z", "s a=x > b=t", "late a=x > b=z", "sum a=t c=z > b=y"
    )
    members = (
        streaming("s", counting(3, end=True)),
        queueing("late", late),
        running("sum", plus(0), "a c"),
    )
    models = models_of(ensemble, *members)
    responses = submitted(models, InferRequest("e", {"x": value(1)}))
    assert responses.responses == []
    request, respond = late.next()
    respond(response_to(request, b=value(100)), True)
    assert responses.numbers("y") == [[101], [102], [103]]
    assert responses.numbers("z") == [[100]] * 3
    models.threads.close()


def test_outputs_that_no_decoupled_step_leads_to_come_once() -> None:
    ensemble = ensemble_config("e", "x", "y z", "s a=x > b=y", "m a=x > b=z")
    models = models_of(ensemble, streaming("s", counting(3)), running("m", plus(5)))
    responses = submitted(models, InferRequest("e", {"x": value(0)}, outputs=("z",)))
    assert responses.numbers("z") == [[5]]


def test_decoupled_steps_behind_each_other_respond_in_the_order_of_both() -> None:
    queue = Queueing()
    ensemble = ensemble_config("e", "x", "y", "s a=x > b=t", "u a=t > b=v", "q a=v > b=y")

    def hundreds(request: InferRequest, respond: Respond) -> None:
        start = request.inputs["a"].array
        if start[0] == 1:  # a response without responses
            respond(None, True)
            return
        for index in range(2):
            respond(response_to(request, b=Tensor(start + np.float32(100 * index))), False)
        respond(None, True)

    models = models_of(
        ensemble, streaming("s", counting(3)), streaming("u", hundreds), queueing("q", queue)
    )
    responses = submitted(models, InferRequest("e", {"x": value(0)}))
    for request, respond in reversed([queue.next() for _ in range(4)]):
        respond(response_to(request, b=request.inputs["a"]), True)
    assert responses.numbers("y") == [[0], [100], [2], [102]]
    models.threads.close()


def test_what_follows_a_response_does_not_wait_for_the_next_one() -> None:
    responses = Responses()

    def produce(request: InferRequest, respond: Respond) -> None:
        respond(response_to(request, b=value(1)), False)
        assert responses.came.acquire(timeout=TIMEOUT_S)
        respond(response_to(request, b=value(2)), True)

    ensemble = ensemble_config("e", "x", "y", "s a=x > b=t", "m a=t > b=y")
    models = models_of(ensemble, streaming("s", produce), running("m", plus(0)))
    models.snapshot.submit(InferRequest("e", {"x": value(0)}), responses)
    assert responses.numbers("y") == [[1], [2]]
    models.threads.close()


@pytest.mark.parametrize("max_inflight", [0, 1])
def test_without_an_idle_thread_the_responses_wait_for_the_end_of_the_decoupled_step(
    max_inflight: int,
) -> None:
    ensemble = ensemble_config(
        "e", "x", "y", "s a=x > b=t", "m a=t > b=y", max_inflight=max_inflight
    )
    models = models_of(
        ensemble, streaming("s", counting(4)), running("m", plus(0)), threads=StepThreads(0)
    )
    responses = submitted(models, InferRequest("e", {"x": value(0)}))
    assert responses.numbers("y") == [[0], [1], [2], [3]]


def test_an_error_in_a_stream_comes_after_the_responses_before_it_and_ends_it() -> None:
    def produce(request: InferRequest, respond: Respond) -> None:
        respond(response_to(request, b=value(1)), False)
        respond(InternalError("torn"), True)

    models = models_of(ensemble_config("e", "x", "y", "s a=x > b=y"), streaming("s", produce))
    responses = submitted(models, InferRequest("e", {"x": value(0)}))
    assert [str(a) for a in responses.wait() if isinstance(a, EdgeServerError)] == ["torn"]
    assert responses.numbers("y") == [[1]]


class Producer(threading.Thread):
    """Streams five responses from a thread of its own, and counts those it got rid of."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.given = 0
        self.step = threading.Semaphore(0)
        self._submitted: tuple[InferRequest, Respond] | None = None

    def produce(self, request: InferRequest, respond: Respond) -> None:
        self._submitted = (request, respond)
        self.start()

    def run(self) -> None:
        assert self._submitted is not None
        request, respond = self._submitted
        for index in range(5):
            respond(response_to(request, b=value(index)), False)
            self.given += 1
            self.step.release()
        respond(None, True)


def test_a_decoupled_step_is_held_while_too_many_of_its_responses_are_in_flight() -> None:
    queue, producer = Queueing(), Producer()
    ensemble = ensemble_config("e", "x", "y", "s a=x > b=t", "q a=t > b=y", max_inflight=2)
    models = models_of(ensemble, streaming("s", producer.produce), queueing("q", queue))
    responses = submitted(models, InferRequest("e", {"x": value(0)}))
    in_flight = [queue.next(), queue.next()]
    for _ in range(2):
        assert producer.step.acquire(timeout=TIMEOUT_S)
    assert not producer.step.acquire(timeout=0.05)
    to_come = 3
    while in_flight:
        request, respond = in_flight.pop(0)
        respond(response_to(request, b=request.inputs["a"]), True)
        if to_come:
            in_flight.append(queue.next())
            to_come -= 1
        assert len(queue.jobs) + len(in_flight) <= 2
    assert responses.numbers("y") == [[0], [1], [2], [3], [4]]


def test_a_held_step_is_let_go_when_the_request_fails() -> None:
    queue, producer = Queueing(), Producer()
    ensemble = ensemble_config("e", "x", "y", "s a=x > b=t", "q a=t > b=y", max_inflight=1)
    models = models_of(ensemble, streaming("s", producer.produce), queueing("q", queue))
    responses = submitted(models, InferRequest("e", {"x": value(0)}))
    queue.next()[1](InternalError("broken"), True)
    (response,) = responses.wait()
    assert str(response) == "broken"
    producer.join(TIMEOUT_S)
    assert producer.given == 5


def test_a_held_step_is_let_go_when_its_caller_goes() -> None:
    queue, producer, caller = Queueing(), Producer(), Caller()
    ensemble = ensemble_config("e", "x", "y", "s a=x > b=t", "q a=t > b=y", max_inflight=1)
    models = models_of(ensemble, streaming("s", producer.produce), queueing("q", queue))
    responses = submitted(models, InferRequest("e", {"x": value(0)}, cancellation=caller))
    # The model of the steps behind has hung since the first one.
    queue.next()
    assert producer.step.acquire(timeout=TIMEOUT_S)
    caller.cancelled = True
    slots = models.entries["e"].loaded.scheduler._slots[1]
    wait_until(lambda: slots._held)
    assert not responses.over.is_set()
    slots.drop_dead()
    assert [type(response) for response in responses.wait()] == [Cancelled]
    producer.join(TIMEOUT_S)
    assert producer.given == 5


def test_a_held_slot_is_free_again_when_its_caller_goes_before_a_thread_takes_the_step() -> None:
    class Late(StepThreads):
        def try_run(self, task: Task) -> bool:
            self.waiting.append(task)
            return True

    caller, threads = Caller(), Late()
    ensemble = ensemble_config("e", "x", "y", "s a=x > b=t", "q a=t > b=y", max_inflight=1)
    behind = running("q", plus(1))
    models = models_of(ensemble, streaming("s", counting(1, end=True)), behind, threads=threads)
    responses = submitted(models, InferRequest("e", {"x": value(0)}, cancellation=caller))
    caller.cancelled = True
    threads.drop_dead()
    assert [type(response) for response in responses.wait()] == [Cancelled]
    slots = models.entries["e"].loaded.scheduler._slots[1]
    assert slots._taken == 0


def test_the_limit_is_one_for_all_requests_and_a_step_holds_no_thread_of_a_caller() -> None:
    queue = Queueing()
    ensemble = ensemble_config("e", "x", "y", "q a=x > b=y", max_inflight=1)
    models = models_of(ensemble, queueing("q", queue))
    responses = [submitted(models, InferRequest("e", {"x": value(n)})) for n in range(3)]
    urgent = submitted(models, InferRequest("e", {"x": value(9)}, urgent=True))
    order = []
    for _ in range(4):
        request, respond = queue.next()
        assert not queue.jobs
        order.append(request.inputs["a"].array.tolist())
        respond(response_to(request, b=request.inputs["a"]), True)
    assert order == [[0], [9], [1], [2]]
    assert [each.numbers("y") for each in [*responses, urgent]] == [[[0]], [[1]], [[2]], [[9]]]
    models.threads.close()


def test_a_request_parked_for_a_slot_ends_once_its_caller_is_gone() -> None:
    queue = Queueing()
    ensemble = ensemble_config("e", "x", "y", "q a=x > b=y", max_inflight=1)
    models = models_of(ensemble, queueing("q", queue))
    first = submitted(models, InferRequest("e", {"x": value(0)}))
    late = submitted(models, InferRequest("e", {"x": value(1)}, deadline=time.monotonic()))
    (slots,) = models.entries["e"].loaded.scheduler._slots
    assert not slots.drop_dead()
    assert [type(response) for response in late.wait()] == [DeadlineExceeded]
    kept = submitted(models, InferRequest("e", {"x": value(2)}))
    assert slots.drop_dead()
    for _ in range(2):
        request, respond = queue.next()
        respond(response_to(request, b=request.inputs["a"]), True)
    assert [first.numbers("y"), kept.numbers("y")] == [[[0]], [[2]]]
    models.threads.close()


def test_a_model_that_raises_after_its_response_gives_back_one_slot_only() -> None:
    class Raises(Queueing):
        def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
            respond(response_to(request, b=request.inputs["a"]), True)
            raise ValueError("odd")

    ensemble = ensemble_config("e", "x", "y", "q a=x > b=y", max_inflight=1)
    models = models_of(ensemble, queueing("q", Raises()))
    assert submitted(models, InferRequest("e", {"x": value(0)})).numbers("y") == [[0]]
    (slots,) = models.entries["e"].loaded.scheduler._slots
    assert slots._taken == 0
    models.threads.close()


def test_where_the_system_gives_no_thread_the_request_gets_a_response() -> None:
    queue = Queueing()
    ensemble = ensemble_config("e", "x", "y", "q a=x > b=t", "r a=t > b=y")
    models = models_of(ensemble, queueing("q", queue), running("r", plus(0)))
    responses = submitted(models, InferRequest("e", {"x": value(0)}))
    request, respond = queue.next()
    with no_more_threads():
        respond(response_to(request, b=request.inputs["a"]), True)
    assert [type(response) for response in responses.wait()] == [Unavailable]


@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize("threads", [1, 4])
def test_streams_through_nested_ensembles_end_in_order_whatever_is_scarce(
    limit: int, threads: int
) -> None:
    queue, stop = Queueing(), threading.Event()

    def respond_to_all() -> None:
        while True:
            queue.came.acquire()
            if stop.is_set():
                return
            request, respond = queue.jobs.popleft()
            respond(response_to(request, b=request.inputs["a"]), True)

    def produce(request: InferRequest, respond: Respond) -> None:
        threading.Thread(target=counting(5), args=(request, respond), daemon=True).start()

    responding = [threading.Thread(target=respond_to_all) for _ in range(2)]
    for thread in responding:
        thread.start()
    inner = ensemble_config(
        "inner", "x", "y", "s a=x > b=t", "q a=t > b=u", "m a=u > b=y", max_inflight=limit
    )
    outer = ensemble_config("outer", "x", "y", "inner x=x > y=t", "q a=t > b=y", max_inflight=limit)
    members = (streaming("s", produce), queueing("q", queue), running("m", plus(0)))
    models = Models((inner, outer), members, StepThreads(threads))
    responses = [submitted(models, InferRequest("outer", {"x": value(10 * n)})) for n in range(12)]
    assert [each.numbers("y") for each in responses] == [
        [[10 * n + index] for index in range(5)] for n in range(12)
    ]
    stop.set()
    queue.came.release(len(responding))
    for thread in responding:
        thread.join(TIMEOUT_S)
    models.threads.close()
