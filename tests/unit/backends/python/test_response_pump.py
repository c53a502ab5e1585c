"""Answers are passed on in order, from a thread of their own, whatever their taker does."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from edge_server.backends.python.response_pump import MOST_WAITING, ResponsePump
from edge_server.errors import InternalError
from tests.unit.inference.threads import no_more_threads

if TYPE_CHECKING:
    import pytest

    from edge_server.backends.contract import Tensors
    from edge_server.errors import EdgeServerError
    from edge_server.requests import Parameters

PATIENCE_S = 10.0


class Taker:
    """Keeps what it hears; refuses answers of `None` that are not the last."""

    def __init__(self) -> None:
        self.heard: list[tuple[object, bool, Parameters]] = []
        self.over = threading.Event()

    def __call__(
        self,
        answer: Tensors | EdgeServerError | None,
        final: bool,
        parameters: Parameters = {},  # noqa: B006 - never written to
    ) -> None:
        if answer is None and not final:
            raise RuntimeError("no")
        self.heard.append((answer, final, parameters))
        if final:
            self.over.set()


def test_answers_keep_their_order_and_the_model_hears_of_all_but_the_last_lot() -> None:
    taker, taken = Taker(), list[int]()
    passing_on = ResponsePump("m_0", taker, taken.append)
    for number in range(100):
        passing_on({}, False, {"n": number})
    error = InternalError("over")
    passing_on(error, True)
    assert taker.over.wait(PATIENCE_S)
    assert [said.get("n") for _, _, said in taker.heard] == [*range(100), None]
    assert taker.heard[-1][:2] == (error, True)
    assert 100 - MOST_WAITING < sum(taken) <= 100


def test_an_answer_that_cannot_be_passed_on_does_not_keep_the_last_one_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    taker = Taker()
    passing_on = ResponsePump("m_0", taker, lambda _count: None)
    passing_on(None, False)
    passing_on(None, True)
    assert taker.over.wait(PATIENCE_S)
    assert len(taker.heard) == 1
    assert "instance m_0: an answer could not be passed on" in caplog.text


def test_where_the_system_gives_no_thread_the_answers_come_all_the_same() -> None:
    taker, taken = Taker(), list[int]()
    passing_on = ResponsePump("m_0", taker, taken.append)
    with no_more_threads():
        passing_on({}, False, {"n": 0})
    passing_on({}, True, {"n": 1})
    assert taker.over.wait(PATIENCE_S)
    assert [said["n"] for _, _, said in taker.heard] == [0, 1]
    assert taken == [1]
