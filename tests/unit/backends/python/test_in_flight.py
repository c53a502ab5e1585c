"""Every request gets its last response exactly once, whatever order things happen in; responses of
a decoupled model are delivered in order, from a thread of their own."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.waiting import TIMEOUT_S
from unit.inference.threads import no_more_threads

from edge_server.backends.contract import ExecuteRequest
from edge_server.backends.python.in_flight import InFlight, ResponsePump
from edge_server.backends.python.messages import (
    MOST_UNDELIVERED,
    ChildError,
    ChildResponse,
    Code,
    Executed,
    Responded,
    code_of,
    error_of,
)
from edge_server.errors import DeadlineExceeded, EdgeServerError, InternalError, NotFound
from edge_server.inference.registry import Snapshot
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.backends.contract import RespondTensors, Tensors
    from edge_server.requests import Parameters

RESOLVER = Snapshot({})


class Caller:
    """One request, and its responses."""

    def __init__(self, deadline: float | None = None) -> None:
        self.responses: list[tuple[object, bool]] = []
        self.request = ExecuteRequest(
            {"x": Tensor(np.zeros(1))},
            frozenset({"y"}),
            lambda response, final, parameters=None: self.responses.append((response, final)),
            InferRequest("m", {}, deadline=deadline),
            RESOLVER,
        )

    @property
    def last(self) -> object:
        assert [final for _, final in self.responses].count(True) == 1, self.responses
        assert self.responses[-1][1]
        return self.responses[-1][0]


def respond_at_once(_number: int, request: ExecuteRequest) -> RespondTensors:
    return request.respond


steps = st.one_of(
    st.tuples(st.just("respond"), st.integers(0, 5), st.booleans(), st.booleans()),
    st.tuples(st.just("executed"), st.integers(0, 1), st.booleans(), st.just(False)),
    st.tuples(st.just("end"), st.just(0), st.just(False), st.just(False)),
)


@given(st.lists(steps, max_size=25), st.booleans())
@example([("respond", 0, False, False), ("executed", 0, True, False)], False)
def test_the_last_response_comes_once_and_nothing_after_it(
    things: list[tuple[str, int, bool, bool]], decoupled: bool
) -> None:
    in_flight = InFlight("m_0", respond_at_once if decoupled else None)
    callers = [Caller() for _ in range(6)]
    batches = []
    for number in (0, 1):
        part = range(3 * number, 3 * number + 3)
        batch = in_flight.add(number, list(part), [callers[i].request for i in part])
        assert batch is not None
        batches.append(batch)
    for what, which, flag, failed in things:
        if what == "respond":
            response = ChildResponse(failure=ChildError(1, "bad")) if failed else ChildResponse()
            in_flight.responded(Responded(which, response, flag), {})
        elif what == "executed":
            in_flight.executed(Executed(which, 1, "failed" if flag else ""))
        else:
            in_flight.end("dead")
    in_flight.end("closed")
    for caller in callers:
        # The last one is empty only behind a response, whose request then has no failure either.
        assert caller.last is not None or caller.responses[0][0] is not None
    assert all(batch.done.is_set() for batch in batches)
    assert in_flight.callers() == ()


def test_a_call_may_be_for_any_request_that_has_not_ended() -> None:
    in_flight = InFlight("m_0", respond_at_once)
    first, second = Caller().request, Caller().request
    for number, request in ((1, first), (2, second)):
        assert in_flight.add(number, [10 + number], [request]) is not None
        in_flight.executed(Executed(number, 5))
    assert in_flight.callers() == (first, second)
    in_flight.responded(Responded(11, ChildResponse(), final=True), {})
    assert in_flight.callers() == (second,)


def test_a_batch_is_done_when_it_is_executed_and_all_have_their_last_response() -> None:
    in_flight = InFlight("m_0")
    batch = in_flight.add(1, [2, 3], [Caller().request, Caller().request])
    assert batch is not None
    in_flight.responded(Responded(2, ChildResponse(), final=True), {})
    in_flight.executed(Executed(1, 5))
    assert not batch.done.is_set()
    in_flight.responded(Responded(3, ChildResponse(), final=True), {})
    assert batch.done.is_set()
    assert batch.execute_ns == 5


def test_a_decoupled_batch_is_done_when_it_is_executed() -> None:
    in_flight = InFlight("m_0", respond_at_once)
    batch = in_flight.add(1, [2], [Caller().request])
    assert batch is not None
    in_flight.executed(Executed(1, 5))
    assert batch.done.is_set()
    assert in_flight.waits(2)


class Rescheduled(Caller):
    """A request of a scheduler that runs requests again."""

    def __init__(self) -> None:
        super().__init__()
        self.forget: list[Callable[[], None]] = []
        self.request = msgspec.structs.replace(self.request, reschedule=self.forget.append)


def test_a_rescheduled_request_keeps_its_number_and_its_batch_is_done() -> None:
    in_flight, caller = InFlight("m_0"), Rescheduled()
    first = in_flight.add(1, [11], [caller.request])
    assert first is not None
    in_flight.executed(Executed(1, 5, rescheduled=[11]))
    assert first.done.is_set()
    assert not caller.responses
    assert in_flight.number_again(caller.request) == 11
    assert in_flight.number_again(caller.request) is None
    second = in_flight.add(2, [11], [caller.request])
    assert second is not None
    in_flight.executed(Executed(2, 5))
    assert not second.done.is_set()
    assert in_flight.responded(Responded(11, ChildResponse(), final=True), {})
    assert second.done.is_set()
    assert caller.last == {}


def test_a_rescheduled_request_that_will_not_run_again_is_forgotten() -> None:
    forgotten: list[int] = []
    in_flight, caller = InFlight("m_0", forget=forgotten.append), Rescheduled()
    in_flight.add(1, [11], [caller.request])
    in_flight.executed(Executed(1, 5, rescheduled=[11]))
    caller.forget[0]()
    assert forgotten == [11]
    in_flight.forget(11)
    assert not in_flight.responded(Responded(11, ChildResponse(), final=True), {})
    assert not in_flight.waits(11)
    assert not caller.responses


def test_a_request_that_no_scheduler_runs_again_fails_when_it_is_rescheduled() -> None:
    in_flight, caller = InFlight("m_0"), Caller()
    in_flight.add(1, [11], [caller.request])
    in_flight.executed(Executed(1, 5, rescheduled=[11, 12]))
    assert isinstance(caller.last, InternalError)
    assert "iterative_sequence: true" in str(caller.last)


def test_a_deadline_that_has_passed_goes_before_the_reason() -> None:
    in_flight = InFlight("m_0")
    late, early = Caller(time.monotonic() - 1), Caller(time.monotonic() + 60)
    in_flight.add(1, [2, 3], [late.request, early.request])
    in_flight.end("it was killed")
    assert isinstance(late.last, DeadlineExceeded)
    assert isinstance(early.last, InternalError)
    assert str(early.last) == "Stub process 'm_0' is not healthy. Reason: it was killed"
    assert in_flight.add(4, [5], [late.request]) is None


@pytest.mark.parametrize("code", Code)
def test_codes_and_errors_match(code: Code) -> None:
    error = error_of(ChildError(code, "text"))
    assert isinstance(error, EdgeServerError)
    assert code_of(error) == code


def test_an_error_without_a_code_of_its_own_gets_the_nearest() -> None:
    assert code_of(DeadlineExceeded("late")) is Code.UNAVAILABLE
    assert type(error_of(ChildError(99, "odd"))) is InternalError
    assert type(error_of(ChildError(2, "gone"))) is NotFound


class Client:
    """Keeps its responses; refuses those of `None` that are not the last."""

    def __init__(self) -> None:
        self.responses: list[tuple[object, bool, Parameters]] = []
        self.over = threading.Event()

    def __call__(
        self,
        answer: Tensors | EdgeServerError | None,
        final: bool,
        parameters: Parameters = {},  # noqa: B006 - never written to
    ) -> None:
        if answer is None and not final:
            raise RuntimeError("no")
        self.responses.append((answer, final, parameters))
        if final:
            self.over.set()


def test_responses_keep_their_order_and_all_but_the_last_lot_are_reported_to_the_model() -> None:
    client, delivered = Client(), list[int]()
    pump = ResponsePump("m_0", client, delivered.append)
    for number in range(100):
        pump({}, False, {"n": number})
    error = InternalError("over")
    pump(error, True)
    assert client.over.wait(TIMEOUT_S)
    assert [parameters.get("n") for _, _, parameters in client.responses] == [*range(100), None]
    assert client.responses[-1][:2] == (error, True)
    assert 100 - MOST_UNDELIVERED < sum(delivered) <= 100


def test_a_response_that_cannot_be_delivered_does_not_keep_the_last_one_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = Client()
    pump = ResponsePump("m_0", client, lambda _count: None)
    pump(None, False)
    pump(None, True)
    assert client.over.wait(TIMEOUT_S)
    assert len(client.responses) == 1
    assert "instance m_0: a response could not be delivered" in caplog.text


def test_where_the_system_gives_no_thread_the_responses_come_all_the_same() -> None:
    client, delivered = Client(), list[int]()
    pump = ResponsePump("m_0", client, delivered.append)
    with no_more_threads():
        pump({}, False, {"n": 0})
    pump({}, True, {"n": 1})
    assert client.over.wait(TIMEOUT_S)
    assert [parameters["n"] for _, _, parameters in client.responses] == [0, 1]
    assert delivered == [1]
