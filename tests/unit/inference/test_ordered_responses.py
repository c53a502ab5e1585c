"""Answers leave in the order of their requests, whoever is ready first."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import Cancelled, InternalError
from edge_server.inference.ordered_responses import OrderedResponses
from edge_server.requests import InferResponse

if TYPE_CHECKING:
    import pytest

    from edge_server.requests import Respond, ResponseCallback


def named(told: list[tuple[int, bool]], number: int) -> Respond:
    def respond(answer: ResponseCallback, final: bool) -> None:
        told.append((number, final))

    return respond


@given(data=st.data(), lengths=st.lists(st.integers(1, 3), min_size=1, max_size=6))
def test_every_answer_is_told_once_and_in_order(data: st.DataObject, lengths: list[int]) -> None:
    told: list[tuple[int, bool]] = []
    order = OrderedResponses()
    places = [order.place(named(told, number)) for number in range(len(lengths))]
    left = dict(enumerate(lengths))
    while left:
        number = data.draw(st.sampled_from(sorted(left)))
        left[number] -= 1
        final = left[number] == 0
        places[number](None, final)
        if final:
            del left[number]
    assert told == [(n, k == length - 1) for n, length in enumerate(lengths) for k in range(length)]


def test_the_first_in_order_is_told_at_once() -> None:
    told: list[tuple[int, bool]] = []
    order = OrderedResponses()
    first, second = order.place(named(told, 1)), order.place(named(told, 2))
    second(InternalError("x"), True)
    assert told == []
    first(None, False)
    assert told == [(1, False)]
    first(None, True)
    assert told == [(1, False), (1, True), (2, True)]


def test_whoever_is_told_may_ask_again() -> None:
    told: list[tuple[int, bool]] = []
    order = OrderedResponses()

    def ask_again(answer: ResponseCallback, final: bool) -> None:
        order.place(named(told, 2))(None, True)
        told.append((1, True))

    order.place(ask_again)(None, True)
    assert told == [(1, True), (2, True)]


def test_many_threads_answer_and_the_order_holds() -> None:
    told: list[tuple[int, bool]] = []
    order = OrderedResponses()
    places = [order.place(named(told, number)) for number in range(400)]

    def answer(own: list[Respond]) -> None:
        for place in own:
            place(None, True)

    threads = [threading.Thread(target=answer, args=(places[n::4][::-1],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [number for number, _ in told] == list(range(400))


def test_a_caller_who_raises_keeps_nobody_from_an_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[tuple[int, bool]] = []
    order = OrderedResponses()

    def deaf(answer: ResponseCallback, final: bool) -> None:
        raise ValueError("deaf")

    places = [order.place(deaf), order.place(named(told, 2)), order.place(deaf)]
    for place in reversed(places):
        place(None, True)
    assert told == [(2, True)]
    order.place(named(told, 4))(None, True)
    assert told == [(2, True), (4, True)]
    assert caplog.text.count("ValueError: deaf") == 2


def test_an_answer_that_nobody_waits_for_is_not_held() -> None:
    heard: list[ResponseCallback] = []
    order = OrderedResponses()
    gone = Cancelled("")
    first = order.place(lambda answer, _: heard.append(answer))
    second = order.place(lambda answer, _: heard.append(answer), lambda: gone)
    response = InferResponse("m", "1", "", {})
    second(response, True)
    order.forget_dead()
    first(response, True)
    assert heard == [response, gone]
