"""Answers leave in the order in which their requests came."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_server.requests import Answer, Respond


class OrderedAnswers:
    """Holds each answer back until every request before its own has had its last one.

    Callers are told outside the lock, by one thread at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: deque[_Place] = deque()
        self._telling = False

    def place(self, respond: Respond) -> Respond:
        """What to call instead of `respond`, which then hears the same, in its turn."""
        place = _Place(self, respond)
        with self._lock:
            self._places.append(place)
        return place

    def put(self, place: _Place, answer: Answer, final: bool) -> None:
        """Tell this and whatever waited for it, unless something before it is not over."""
        with self._lock:
            place.answers.append((answer, final))
            if self._telling:
                return
            self._telling = True
        while (told := self._next()) is not None:
            respond, answer, final = told
            respond(answer, final)

    def _next(self) -> tuple[Respond, Answer, bool] | None:
        with self._lock:
            if not self._places or not self._places[0].answers:
                self._telling = False
                return None
            place = self._places[0]
            answer, final = place.answers.popleft()
            if final:
                self._places.popleft()
            return place.respond, answer, final


class _Place:
    """One request's place in the order; what its job calls `respond`."""

    __slots__ = ("_order", "answers", "respond")

    def __init__(self, order: OrderedAnswers, respond: Respond) -> None:
        self._order = order
        self.respond = respond
        self.answers: deque[tuple[Answer, bool]] = deque()

    def __call__(self, answer: Answer, final: bool) -> None:
        self._order.put(self, answer, final)
