"""`pb_utils.InferenceResponse` and `InferenceResponseSender`."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

from edge_server.backends.python import messages as m
from edge_server.backends.python.channel import MessageTooLong
from edge_server.backends.python.pb_utils.tensor import PbTensor
from edge_server.backends.python.pb_utils.values import (
    TritonError,
    TritonModelException,
    plain_parameters,
)
from edge_server.backends.python.shared_memory import ArenaFull, pack_for_daemon, take_back

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.backends.python.child.link import DaemonLink
    from edge_server.backends.python.shared_memory import ArenaWriter

COMPLETE_FINAL = 1


class InferenceResponse:
    """One response: tensors, or an error."""

    def __init__(
        self,
        output_tensors: Sequence[PbTensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, m.Value] | None = None,
    ) -> None:
        for tensor in output_tensors:
            if tensor is None:
                raise TritonModelException(
                    "Output tensor for inference response should not be empty."
                )
            if not isinstance(tensor, PbTensor):
                raise TypeError(
                    f"output_tensors must be Tensor objects, found type '{type(tensor)}'"
                )
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error must be a TritonError, found type '{type(error)}'")
        self._tensors = list(output_tensors)
        self._error = error
        self._parameters = plain_parameters(parameters)

    def output_tensors(self) -> list[PbTensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """The parameters as a JSON object."""
        return json.dumps(self._parameters)

    def message(self, outbox: ArenaWriter, outputs: frozenset[str]) -> m.ChildResponse:
        """Return the message to the daemon: the tensors named in `outputs`, copied into
        `outbox`."""
        if self._error is not None:
            text = m.shortened(self._error.message())
            return m.ChildResponse(failure=m.ChildError(self._error.code(), text))
        tensors = [(t.name(), *t.content) for t in self._tensors if t.name() in outputs]
        try:
            places = pack_for_daemon(tensors, outbox)
        except ArenaFull as error:
            return m.internal_error(
                f"the outputs: {error}; parameter 'shared_memory_limit_mib' allows more"
            )
        return m.ChildResponse(places, parameters=self._parameters)


class InferenceResponseSender:
    """Sends the responses to one request, from any thread.

    Attributes:
        taken: the model has taken the sender, so it may respond at any time.
        closed: the last response has been sent.
    """

    def __init__(
        self, link: DaemonLink, number: int, outputs: frozenset[str], *, decoupled: bool
    ) -> None:
        self.taken = False
        self._link = link
        self._number = number
        self._outputs = outputs
        self._decoupled = decoupled
        if decoupled:
            link.open_window(number)
        self._lock = threading.Lock()
        self._sent = 0
        self.closed = False

    def is_cancelled(self) -> bool:
        """Return whether the request's client is gone."""
        return self._number in self._link.cancelled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, or with `TRITONSERVER_RESPONSE_COMPLETE_FINAL` the last one, or both.

        The call waits while too many earlier responses are undelivered, because the client is slow.
        """
        if self._decoupled and flags == 0 and not self.closed:
            self._link.wait_for_window(self._number)
        with self._lock:
            message = self._message(response, flags)
            try:
                self._link.send(message)
            except MessageTooLong as error:
                take_back(message.places, self._link.outbox)
                self._link.send(self._last(m.internal_error(f"a response: {error}")))

    def last(self, response: InferenceResponse | None) -> m.Responded | None:
        """Return the last response, which `execute` returned, for the caller to send.

        None where `execute` returned nothing because the model has taken this sender.
        """
        if response is None:
            return None if self.taken else self._last(None)
        with self._lock:
            return self._message(response, COMPLETE_FINAL)

    def _message(self, response: InferenceResponse | None, flags: int) -> m.Responded:
        if flags not in (0, COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if flags == 0 and response is None:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        self._check(response)
        message = None if response is None else response.message(self._link.outbox, self._outputs)
        self._sent += 1
        if flags == COMPLETE_FINAL:
            return self._last(message)
        return m.Responded(self._number, message, final=False)

    def _last(self, message: m.ChildResponse | None) -> m.Responded:
        self.closed = True
        self._link.forget(self._number)
        return m.Responded(self._number, message, final=True)

    def _check(self, response: InferenceResponse | None) -> None:
        if not self._decoupled:
            self._check_one(response)
        if self.closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")

    def _check_one(self, response: InferenceResponse | None) -> None:
        if response is not None and self._sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        if response is None and not self._sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before "
                "sending a response."
            )
