"""`pb_utils.InferenceResponseSender`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from edge_server.backends.python.channel import MessageTooLong
from edge_server.backends.python.child.errors import TritonModelException
from edge_server.backends.python.child.link import ResponseWindow
from edge_server.backends.python.codes import Code
from edge_server.backends.python.messages import Answered, ChildError, ChildResponse
from edge_server.backends.python.packing import take_back
from edge_server.backends.python.response_pump import MOST_WAITING

if TYPE_CHECKING:
    from edge_server.backends.python.child.link import DaemonLink
    from edge_server.backends.python.child.response import InferenceResponse

COMPLETE_FINAL = 1


class InferenceResponseSender:
    """Sends the responses to one request, from any thread.

    Attributes:
        taken: the model has taken the sender, so it may respond at any time.
    """

    def __init__(
        self, link: DaemonLink, number: int, outputs: frozenset[str], *, decoupled: bool
    ) -> None:
        self.taken = False
        self._link = link
        self._number = number
        self._outputs = outputs
        self._decoupled = decoupled
        self._room = ResponseWindow(MOST_WAITING)
        if decoupled:
            link.rooms[number] = self._room
        self._lock = threading.Lock()
        self._sent = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """Return whether the last response has been sent."""
        return self._closed

    def is_cancelled(self) -> bool:
        """Return whether the request's client is gone."""
        return self._number in self._link.cancelled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, or with `TRITONSERVER_RESPONSE_COMPLETE_FINAL` the last one, or both.

        The call waits while too many earlier responses are undelivered, because the client is slow.
        """
        if self._decoupled and flags == 0 and not self._closed:
            self._room.take()
        with self._lock:
            message = self._message(response, flags)
            try:
                self._link.send(message)
            except MessageTooLong as error:
                take_back(message.answer.outputs if message.answer else (), self._link.outbox)
                failure = ChildError(Code.INTERNAL, f"an answer: {error}")
                self._closed = True
                self._link.answered(self._number)
                self._link.send(Answered(self._number, ChildResponse(failure=failure), final=True))

    def last(self, response: InferenceResponse) -> Answered:
        """Return `response` as the last response, for the caller to send."""
        with self._lock:
            return self._message(response, COMPLETE_FINAL)

    def nothing(self) -> Answered:
        """Return the end without a response, for the caller to send."""
        self._closed = True
        self._link.answered(self._number)
        return Answered(self._number, None, final=True)

    def _message(self, response: InferenceResponse | None, flags: int) -> Answered:
        if flags not in (0, COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if flags == 0 and response is None:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        self._check(response)
        final = flags == COMPLETE_FINAL
        answer = None if response is None else response.answer(self._link.outbox, self._outputs)
        self._sent += 1
        self._closed = final
        if final:
            self._link.answered(self._number)
        return Answered(self._number, answer, final)

    def _check(self, response: InferenceResponse | None) -> None:
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if self._decoupled:
            return
        if response is not None and self._sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        if response is None and not self._sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before "
                "sending a response."
            )
