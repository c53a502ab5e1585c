"""Answers leave in the order in which their requests came."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.errors import EdgeServerError
    from edge_server.requests import Respond, ResponseCallback

log = logging.getLogger(__name__)


class OrderedResponses:
    """Holds each answer back until every request before its own has had its last one.

    Responses leave outside the lock, by one thread at a time. One that raises keeps its answer
    from nobody else.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: deque[_Place] = deque()
        self._telling = False

    def place(
        self, respond: Respond, death: Callable[[], EdgeServerError | None] = lambda: None
    ) -> Respond:
        """What to call instead of `respond`, which then hears the same, in its turn.

        Args:
            death: why nobody waits for the answers any more; None where somebody does.
        """
        place = _Place(self, respond, death)
        with self._lock:
            self._places.append(place)
        return place

    def forget_dead(self) -> None:
        """Hold no answer that nobody waits for; its place in the order stays."""
        with self._lock:
            for place in self._places:
                if place.answers and (death := place.death()) is not None:
                    final = place.answers[-1][1]
                    place.answers = deque([(death, True)] if final else ())

    def put(self, place: _Place, answer: ResponseCallback, final: bool) -> None:
        """Tell this and whatever waited for it, unless something before it is not over."""
        with self._lock:
            place.answers.append((answer, final))
            if self._telling:
                return
            self._telling = True
        while (turn := self._next()) is not None:
            respond, answer, final = turn
            try:
                respond(answer, final)
            except Exception:
                log.exception("a response could not be given")

    def _next(self) -> tuple[Respond, ResponseCallback, bool] | None:
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

    __slots__ = ("_order", "answers", "death", "respond")

    def __init__(
        self,
        order: OrderedResponses,
        respond: Respond,
        death: Callable[[], EdgeServerError | None],
    ) -> None:
        self._order = order
        self.respond = respond
        self.death = death
        self.answers: deque[tuple[ResponseCallback, bool]] = deque()

    def __call__(self, answer: ResponseCallback, final: bool) -> None:
        self._order.put(self, answer, final)
