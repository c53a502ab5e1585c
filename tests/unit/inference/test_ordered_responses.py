"""Responses leave in the order of their requests, whichever is ready first."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import Cancelled, InternalError
from edge_server.inference.dynamic_batch import OrderedResponses
from edge_server.requests import InferResponse

if TYPE_CHECKING:
    import pytest

    from edge_server.requests import Respond, ResponseCallback


def named(sent: list[tuple[int, bool]], number: int) -> Respond:
    def respond(response: ResponseCallback, final: bool) -> None:
        sent.append((number, final))

    return respond


@given(data=st.data(), lengths=st.lists(st.integers(1, 3), min_size=1, max_size=6))
def test_every_response_is_sent_once_and_in_order(data: st.DataObject, lengths: list[int]) -> None:
    sent: list[tuple[int, bool]] = []
    order = OrderedResponses()
    places = [order.place(named(sent, number)) for number in range(len(lengths))]
    left = dict(enumerate(lengths))
    while left:
        number = data.draw(st.sampled_from(sorted(left)))
        left[number] -= 1
        final = left[number] == 0
        places[number](None, final)
        if final:
            del left[number]
    assert sent == [(n, k == length - 1) for n, length in enumerate(lengths) for k in range(length)]


def test_the_first_in_order_is_sent_at_once() -> None:
    sent: list[tuple[int, bool]] = []
    order = OrderedResponses()
    first, second = order.place(named(sent, 1)), order.place(named(sent, 2))
    second(InternalError("x"), True)
    assert sent == []
    first(None, False)
    assert sent == [(1, False)]
    first(None, True)
    assert sent == [(1, False), (1, True), (2, True)]


def test_a_callback_may_submit_again() -> None:
    sent: list[tuple[int, bool]] = []
    order = OrderedResponses()

    def ask_again(response: ResponseCallback, final: bool) -> None:
        order.place(named(sent, 2))(None, True)
        sent.append((1, True))

    order.place(ask_again)(None, True)
    assert sent == [(1, True), (2, True)]


def test_many_threads_respond_and_the_order_holds() -> None:
    sent: list[tuple[int, bool]] = []
    order = OrderedResponses()
    places = [order.place(named(sent, number)) for number in range(400)]

    def response(own: list[Respond]) -> None:
        for place in own:
            place(None, True)

    threads = [threading.Thread(target=response, args=(places[n::4][::-1],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [number for number, _ in sent] == list(range(400))


def test_a_callback_that_raises_delays_no_other_response(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[tuple[int, bool]] = []
    order = OrderedResponses()

    def raises(response: ResponseCallback, final: bool) -> None:
        raise ValueError("raises")

    places = [order.place(raises), order.place(named(sent, 2)), order.place(raises)]
    for place in reversed(places):
        place(None, True)
    assert sent == [(2, True)]
    order.place(named(sent, 4))(None, True)
    assert sent == [(2, True), (4, True)]
    assert caplog.text.count("ValueError: raises") == 2


def test_a_response_that_no_caller_waits_for_is_not_held() -> None:
    responses: list[ResponseCallback] = []
    order = OrderedResponses()
    gone = Cancelled("")
    first = order.place(lambda response, _: responses.append(response))
    second = order.place(lambda response, _: responses.append(response), lambda: gone)
    response = InferResponse("m", "1", "", {})
    second(response, True)
    order.forget_dead()
    first(response, True)
    assert responses == [response, gone]
