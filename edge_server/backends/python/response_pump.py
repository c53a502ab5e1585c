"""Deliver the responses of a decoupled model from its process to the caller."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

from edge_server.requests import NO_PARAMETERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.backends.contract import RespondTensors, Tensors
    from edge_server.errors import EdgeServerError
    from edge_server.requests import Parameters

log = logging.getLogger(__name__)

# The model waits while this many responses to one request are undelivered; the pump reports
# deliveries to the model in batches of this size.
MOST_WAITING = 64
_LOT = 16


class ResponsePump:
    """A `RespondTensors` that delivers the responses to one request on its own thread.

    A slow receiver, e.g. a client that reads slowly, delays only its own request; the other
    requests of the process proceed meanwhile.

    Args:
        name: of the instance.
        respond: the request's own `respond`.
        taken: called with the number of responses delivered since its last call.
    """

    def __init__(self, name: str, respond: RespondTensors, taken: Callable[[int], None]) -> None:
        self._name = name
        self._respond = respond
        self._taken = taken
        self._answers: queue.SimpleQueue[
            tuple[Tensors | EdgeServerError | None, bool, Parameters]
        ] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(
        self,
        answer: Tensors | EdgeServerError | None,
        final: bool,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        """Queue a response.

        Raises:
            ValueError: the model exceeded the limit without waiting.
        """
        if not final and self._answers.qsize() > 2 * MOST_WAITING:
            raise ValueError(f"more than {2 * MOST_WAITING} answers to a request are on their way")
        self._answers.put((answer, final, parameters))
        if self._thread is None and not self._start():
            self._pass_one()
            self._taken(1)

    def _start(self) -> bool:
        """Start a thread; return False where the system refuses, and the caller's thread delivers
        instead."""
        thread = threading.Thread(target=self._run, name=f"answers of {self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("instance %s: passes an answer on by itself: %s", self._name, error)
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        final, taken = False, 0
        while not final:
            final = self._pass_one()
            taken += 1
            if taken == _LOT:
                self._taken(taken)
                taken = 0

    def _pass_one(self) -> bool:
        """Deliver one response; return whether it was the last."""
        answer, final, parameters = self._answers.get()
        try:
            self._respond(answer, final, parameters)
        except Exception:
            # The following responses, and the last of all, must still be delivered.
            log.exception("instance %s: an answer could not be passed on", self._name)
        return final
