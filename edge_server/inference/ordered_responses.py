"""Sends responses in the order in which their requests came."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.errors import EdgeServerError
    from edge_server.requests import Respond, ResponseCallback

log = logging.getLogger(__name__)


class OrderedResponses:
    """Holds each response back until every earlier request has had its last one.

    One thread at a time sends responses, outside the lock. A callback that raises delays no other
    response.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: deque[_Place] = deque()
        self._sending = False

    def place(
        self, respond: Respond, death: Callable[[], EdgeServerError | None] = lambda: None
    ) -> Respond:
        """Return a callback that replaces `respond` and passes its responses on in order.

        Args:
            death: the error of a cancelled or overdue request; None while its caller waits.
        """
        place = _Place(respond, death)
        with self._lock:
            self._places.append(place)
        return partial(self._put, place)

    def forget_dead(self) -> None:
        """Drop held responses whose callers have gone; their places in the order stay."""
        with self._lock:
            for place in self._places:
                if place.responses and (death := place.death()) is not None:
                    final = place.responses[-1][1]
                    place.responses = deque([(death, True)] if final else ())

    def _put(self, place: _Place, response: ResponseCallback, final: bool) -> None:
        """Send this response and those it held back, unless an earlier request is unfinished."""
        with self._lock:
            place.responses.append((response, final))
            if self._sending:
                return
            self._sending = True
        while (turn := self._next()) is not None:
            respond, response, final = turn
            try:
                respond(response, final)
            except Exception:
                log.exception("a response could not be given")

    def _next(self) -> tuple[Respond, ResponseCallback, bool] | None:
        with self._lock:
            if not self._places or not self._places[0].responses:
                self._sending = False
                return None
            place = self._places[0]
            response, final = place.responses.popleft()
            if final:
                self._places.popleft()
            return place.respond, response, final


@dataclass(eq=False)
class _Place:
    """One request's place in the order, with the responses that are held back."""

    respond: Respond
    death: Callable[[], EdgeServerError | None]
    responses: deque[tuple[ResponseCallback, bool]] = field(default_factory=deque)
