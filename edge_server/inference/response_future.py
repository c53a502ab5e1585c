"""A caller that waits for its single response."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from edge_server.errors import Cancelled, DeadlineExceeded, EdgeServerError, InternalError

if TYPE_CHECKING:
    from edge_server.requests import InferRequest, InferResponse, ResponseCallback


class ResponseFuture:
    """A `Respond` that keeps the response, and a thread that waits for it.

    Waiting costs nothing where the response is already there, as from a model that runs on the
    caller's own thread.
    """

    __slots__ = ("_answer", "_over")

    def __init__(self) -> None:
        self._answer: ResponseCallback = None
        self._over = threading.Lock()
        self._over.acquire()

    def __call__(self, answer: ResponseCallback, final: bool) -> None:
        if answer is not None:
            self._answer = answer
        if final:
            self._wake()

    def wait(self, request: InferRequest) -> InferResponse:
        """Wait for the response to `request` and return it.

        Raises:
            EdgeServerError: the model responded with it.
            DeadlineExceeded: no response came before the request's deadline.
            Cancelled: the caller cancelled meanwhile.
        """
        if not self._over.acquire(blocking=False):
            self._wait(request)
        answer = self._answer
        if isinstance(answer, EdgeServerError):
            raise answer
        if answer is None:
            raise InternalError(f"model '{request.model_name}' ended without an answer")
        return answer

    def _wait(self, request: InferRequest) -> None:
        if request.cancellation is not None:
            request.cancellation.when_cancelled(self._wake)
        left_s = -1.0 if request.deadline is None else request.deadline - time.monotonic()
        if (left_s != -1.0 and left_s <= 0) or not self._over.acquire(timeout=left_s):
            raise DeadlineExceeded("the request's deadline passed before it was answered")
        if self._answer is None and request.cancelled:
            raise Cancelled("the caller took the request back")

    def _wake(self) -> None:
        # The response and the cancellation may both get here; the second finds the future done.
        if self._over.locked():
            try:
                self._over.release()
            except RuntimeError:
                return
