"""Answers of a decoupled model, on their way from its process to whoever asked."""

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

# The model waits where so many answers to one request have not been taken; it hears of those that
# have been in lots of this size.
MOST_WAITING = 64
_LOT = 16


class ResponsePump:
    """A `RespondTensors` that passes the answers to one request on from a thread of its own.

    Who takes them may be slow, as a client that reads slowly is. That is between the two of them:
    the other requests of the process are answered meanwhile.

    Args:
        name: of the instance.
        respond: the request's.
        taken: hears how many answers have been taken since it heard that last.
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
        """Raises: ValueError: the model did not wait."""
        if not final and self._answers.qsize() > 2 * MOST_WAITING:
            raise ValueError(f"more than {2 * MOST_WAITING} answers to a request are on their way")
        self._answers.put((answer, final, parameters))
        if self._thread is None and not self._start():
            self._pass_one()
            self._taken(1)

    def _start(self) -> bool:
        """Whether the system gave a thread; else the answer goes on on this one."""
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
        """Whether that was the last."""
        answer, final, parameters = self._answers.get()
        try:
            self._respond(answer, final, parameters)
        except Exception:
            # Those that follow, and the last of all, are still to come.
            log.exception("instance %s: an answer could not be passed on", self._name)
        return final
