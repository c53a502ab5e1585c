"""A full house turns callers away at once, and a place is free again when its caller leaves."""

from __future__ import annotations

import threading

import pytest
from support.waiting import TIMEOUT_S

from edge_server.api.admission import MIB, Admission, ByteBudget
from edge_server.api.http.rest.api import gate_and_threads
from edge_server.errors import Unavailable


def test_one_too_many_is_turned_away_and_may_come_again() -> None:
    admission = Admission(2)
    with admission:
        with (
            admission,
            pytest.raises(Unavailable, match="Exceeds maximum queue size"),
            admission,
        ):
            raise AssertionError("nobody is let in")
        with admission:
            pass


def test_a_place_is_given_back_when_the_inference_fails() -> None:
    admission = Admission(1)
    for _ in range(3):
        with pytest.raises(ValueError, match="broken"), admission:
            raise ValueError("broken")


def test_a_closed_gate_refuses_all_callers_and_lets_those_inside_finish() -> None:
    admission = Admission(2)
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with admission:
            entered.set()
            leave.wait(TIMEOUT_S)

    inside = threading.Thread(target=stay)
    inside.start()
    assert entered.wait(TIMEOUT_S)
    admission.close()
    with pytest.raises(Unavailable, match="has stopped accepting new requests"), admission:
        raise AssertionError("nobody is let in")
    admission.wait_until_empty(0.01)
    assert inside.is_alive()
    leave.set()
    admission.wait_until_empty(TIMEOUT_S)
    assert admission.inside == 0
    inside.join(TIMEOUT_S)


def test_streams_have_places_of_their_own_and_are_called_when_the_gate_closes() -> None:
    admission = Admission(1, streams=1)
    received = threading.Event()
    with admission.stream(received.set):
        with admission:
            pass
        with (
            pytest.raises(Unavailable, match="1 streams are open already"),
            admission.stream(print),
        ):
            raise AssertionError("nobody is let in")
        assert not received.is_set()
        admission.close()
        assert received.is_set()
    with pytest.raises(Unavailable, match="shutting down"), admission.stream(print):
        raise AssertionError("nobody is let in")


def test_open_streams_take_no_place_and_are_waited_for() -> None:
    admission = Admission(1)
    ended = threading.Event()

    def stream() -> None:
        with admission.stream(print):
            assert ended.wait(TIMEOUT_S)

    open_stream = threading.Thread(target=stream)
    open_stream.start()
    with admission:
        pass
    admission.close()
    admission.wait_until_empty(0.01)
    assert open_stream.is_alive()
    ended.set()
    admission.wait_until_empty(TIMEOUT_S)
    open_stream.join(TIMEOUT_S)


def test_what_does_not_fit_is_turned_away_by_name_and_may_come_again() -> None:
    budget = ByteBudget(3 * MIB)
    budget.take(2 * MIB)
    with pytest.raises(Unavailable, match=r"of 3145728 at most \(grpc.max_pending_bytes\)"):
        budget.take(2 * MIB)
    budget.take(MIB)
    budget.give(3 * MIB)
    budget.take(2 * MIB)


def test_a_message_alone_is_always_taken() -> None:
    budget = ByteBudget(MIB)
    budget.take(2 * MIB)
    budget.take(3 * MIB, instead_of=2 * MIB)
    assert budget.used_bytes == 3 * MIB


def test_a_response_takes_the_place_of_its_request_and_no_more_than_there_is() -> None:
    budget = ByteBudget(10 * MIB)
    budget.take(6 * MIB)
    budget.take(4 * MIB)
    budget.take(5 * MIB, instead_of=6 * MIB)
    with pytest.raises(Unavailable, match=f"of {5 * MIB} bytes are in flight already, and of"):
        budget.take(6 * MIB, instead_of=4 * MIB)
    with pytest.raises(Unavailable, match=r"grpc\.max_pending_bytes"):
        budget.take(2 * MIB)
    assert budget.used_bytes == 9 * MIB


def test_a_request_that_may_not_be_refused_waits() -> None:
    budget = ByteBudget(MIB)
    budget.take(MIB)
    assert not budget.take_when_it_fits(1, lambda: True)
    taken = threading.Event()

    def wait() -> None:
        assert budget.take_when_it_fits(1, lambda: False)
        taken.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not taken.is_set()
    budget.give(MIB)
    assert taken.wait(TIMEOUT_S)
    waiting.join()


def test_http_and_grpc_refuse_by_one_setting_in_the_same_words() -> None:
    over_http, threads = gate_and_threads(2)
    threads.shutdown()
    texts = []
    for gate in (over_http, Admission(2)):
        with gate, gate:
            texts.append(str(gate.refusal()))
    assert set(texts) == {
        "Exceeds maximum queue size: 2 inferences are in flight already (serving.max_inferences)"
    }
