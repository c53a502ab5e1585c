"""Every request is answered for the last time exactly once, whatever order things happen in."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.backends.contract import ExecuteRequest
from edge_server.backends.python.codes import Code, code_of, error_of
from edge_server.backends.python.in_flight import InFlight
from edge_server.backends.python.messages import Answered, ChildError, ChildResponse, Executed
from edge_server.errors import DeadlineExceeded, EdgeServerError, InternalError, NotFound
from edge_server.inference.snapshot import Snapshot
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

WORLD = Snapshot({})


class Asker:
    """One request, and what it hears."""

    def __init__(self, deadline: float | None = None) -> None:
        self.heard: list[tuple[object, bool]] = []
        self.request = ExecuteRequest(
            {"x": Tensor(np.zeros(1))},
            frozenset({"y"}),
            lambda answer, final, parameters=None: self.heard.append((answer, final)),  # type: ignore[misc]
            InferRequest("m", {}, deadline=deadline),
            WORLD,
        )

    @property
    def last(self) -> object:
        assert [final for _, final in self.heard].count(True) == 1, self.heard
        assert self.heard[-1][1]
        return self.heard[-1][0]


steps = st.one_of(
    st.tuples(st.just("answer"), st.integers(0, 5), st.booleans(), st.booleans()),
    st.tuples(st.just("executed"), st.integers(0, 1), st.booleans(), st.just(False)),
    st.tuples(st.just("end"), st.just(0), st.just(False), st.just(False)),
)


@given(st.lists(steps, max_size=25), st.booleans())
def test_the_last_answer_comes_once_and_nothing_after_it(
    things: list[tuple[str, int, bool, bool]], decoupled: bool
) -> None:
    in_flight = InFlight("m_0", decoupled=decoupled)
    askers = [Asker() for _ in range(6)]
    batches = []
    for number in (0, 1):
        part = range(3 * number, 3 * number + 3)
        batch = in_flight.add(number, list(part), [askers[i].request for i in part])
        assert batch is not None
        batches.append(batch)
    for what, which, flag, failed in things:
        if what == "answer":
            answer = ChildResponse(failure=ChildError(1, "bad")) if failed else ChildResponse()
            in_flight.answer(Answered(which, answer, flag), {})
        elif what == "executed":
            in_flight.executed(Executed(which, 1, "failed" if flag else ""))
        else:
            in_flight.end("dead")
    in_flight.end("closed")
    for asker in askers:
        assert asker.last is not None
    assert all(batch.done.is_set() for batch in batches)
    assert in_flight.callers() == ()


def test_a_batch_is_done_when_it_is_executed_and_all_are_answered() -> None:
    in_flight = InFlight("m_0", decoupled=False)
    batch = in_flight.add(1, [2, 3], [Asker().request, Asker().request])
    assert batch is not None
    in_flight.answer(Answered(2, ChildResponse(), final=True), {})
    in_flight.executed(Executed(1, 5))
    assert not batch.done.is_set()
    in_flight.answer(Answered(3, ChildResponse(), final=True), {})
    assert batch.done.is_set()
    assert batch.execute_ns == 5


def test_a_decoupled_batch_is_done_when_it_is_executed() -> None:
    in_flight = InFlight("m_0", decoupled=True)
    batch = in_flight.add(1, [2], [Asker().request])
    assert batch is not None
    in_flight.executed(Executed(1, 5))
    assert batch.done.is_set()
    assert in_flight.waits(2)


def test_a_deadline_that_has_passed_goes_before_the_reason() -> None:
    in_flight = InFlight("m_0", decoupled=False)
    late, early = Asker(time.monotonic() - 1), Asker(time.monotonic() + 60)
    in_flight.add(1, [2, 3], [late.request, early.request])
    in_flight.end("it was killed")
    assert isinstance(late.last, DeadlineExceeded)
    assert isinstance(early.last, InternalError)
    assert str(early.last) == "Stub process 'm_0' is not healthy. Reason: it was killed"
    assert in_flight.add(4, [5], [late.request]) is None


@pytest.mark.parametrize("code", Code)
def test_codes_and_errors_say_the_same(code: Code) -> None:
    error = error_of(code, "text")
    assert isinstance(error, EdgeServerError)
    assert code_of(error) == (Code.INTERNAL if code is Code.UNKNOWN else code)


def test_an_error_without_a_code_of_its_own_gets_the_nearest() -> None:
    assert code_of(DeadlineExceeded("late")) is Code.UNAVAILABLE
    assert type(error_of(99, "odd")) is InternalError
    assert type(error_of(2, "gone")) is NotFound
