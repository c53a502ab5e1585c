"""`pb_utils.InferenceRequest`: requests to this model, its requests to other models, and the
responses to both."""

from __future__ import annotations

import json
import operator
import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from edge_server.backends.python import messages as m
from edge_server.backends.python.link import daemon, replying_daemon
from edge_server.backends.python.pb_utils.tensor import (
    PbTensor,
    TritonError,
    TritonModelException,
    plain_parameters,
    text,
    whole,
)
from edge_server.backends.python.shared_memory import ArenaFull, pack_for_daemon, take_back, unpack
from edge_server.process.child import MessageTooLong
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from edge_server.backends.python.link import DaemonLink
    from edge_server.backends.python.shared_memory import ArenaWriter

COMPLETE_FINAL = 1


class InferenceResponse:
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
    """Sends the responses to one request, from any thread; once `taken` by the model, at any time,
    until the last response has been sent."""

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
        return self._number in self._link.cancelled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, or with `TRITONSERVER_RESPONSE_COMPLETE_FINAL` the last one, or both;
        wait while too many earlier ones are undelivered, because the client is slow."""
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
        """Return the last response, which `execute` returned, for the caller to send; None where it
        returned nothing because the model has taken this sender."""
        if response is None:
            return None if self.taken else self._last(None)
        with self._lock:
            return self._message(response, COMPLETE_FINAL)

    def _message(self, response: InferenceResponse | None, flags: int) -> m.Responded:
        self._check(response, flags)
        message = None if response is None else response.message(self._link.outbox, self._outputs)
        self._sent += 1
        if flags == COMPLETE_FINAL:
            return self._last(message)
        return m.Responded(self._number, message, final=False)

    def _last(self, message: m.ChildResponse | None) -> m.Responded:
        self.closed = True
        self._link.forget(self._number)
        return m.Responded(self._number, message, final=True)

    def _check(self, response: InferenceResponse | None, flags: int) -> None:
        if flags == 0 and response is None:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        why = ""
        if flags not in (0, COMPLETE_FINAL):
            why = "Unsupported flag provided."
        elif not self._decoupled and response is not None and self._sent:
            why = "Non-decoupled model cannot send more than one response."
        elif not self._decoupled and response is None and not self._sent:
            why = "Non-decoupled model cannot send complete final before sending a response."
        elif self.closed:
            why = "Response sender has been closed."
        if why:
            raise TritonModelException(f"Unable to send response. {why}")


RELEASE_ALL, RELEASE_RESCHEDULE = 1, 2
_MOST_KEPT = 64
_HIGHEST_VERSION = -1


class InferenceRequest:
    """A request; the model can execute a request that it made itself. As in Triton the model has to
    name the inputs, the outputs (none are all) and the other model."""

    def __init__(  # noqa: PLR0917 - Triton's signature
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[PbTensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | None = None,
        model_version: int = _HIGHEST_VERSION,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: Any = None,
        trace: Any = None,
        parameters: Mapping[str, m.Value] | str | None = None,
    ) -> None:
        if inputs is None or requested_output_names is None or model_name is None:
            raise TypeError(
                "InferenceRequest requires inputs, requested_output_names and model_name"
            )
        for tensor in inputs:
            if tensor is None:
                raise TritonModelException(
                    f"Input tensor for request with id '{request_id}' and model name "
                    f"'{model_name}' should not be empty."
                )
            if not isinstance(tensor, PbTensor):
                raise TypeError(f"inputs must be Tensor objects, found type '{type(tensor)}'")
        version = whole(model_version, "model_version")
        # Without number and inputs, which the request gets when it is sent.
        self._message = m.ChildRequest(
            0,
            text(request_id, "request_id"),
            [],
            [text(name, "requested_output_names") for name in requested_output_names],
            _correlation_id(correlation_id),
            whole(flags, "flags"),
            whole(timeout, "timeout"),
            _parameters(parameters),
            text(model_name, "model_name"),
            "" if version == _HIGHEST_VERSION else str(version),
        )
        self._inputs = list(inputs)
        self._preferred_memory = preferred_memory
        self._trace = trace
        self._sender: InferenceResponseSender | None = None
        self._release_flags = RELEASE_ALL

    @classmethod
    def of(
        cls,
        message: m.ChildRequest,
        link: DaemonLink,
        sender: InferenceResponseSender | None = None,
        *,
        decoupled: bool,
    ) -> InferenceRequest:
        request = cls(
            inputs=_tensors(message.inputs, link), requested_output_names=(), model_name=""
        )
        request._message = message
        request._sender = sender or InferenceResponseSender(
            link, message.number, frozenset(message.outputs), decoupled=decoupled
        )
        return request

    def inputs(self) -> list[PbTensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._message.id

    def correlation_id(self) -> int | str:
        return self._message.correlation_id

    def requested_output_names(self) -> list[str]:
        return self._message.outputs

    def flags(self) -> int:
        return self._message.flags

    def set_flags(self, flags: int) -> None:
        self._message = replace(self._message, flags=whole(flags, "flags"))

    def timeout(self) -> int:
        return self._message.timeout_us

    def parameters(self) -> str:
        return json.dumps(self._message.parameters)

    def preferred_memory(self) -> Any:
        return self._preferred_memory

    def trace(self) -> Any:
        return self._trace

    def model_name(self) -> str:
        return self._message.model_name

    def model_version(self) -> int:
        return int(self._message.model_version or _HIGHEST_VERSION)

    def is_cancelled(self) -> bool:
        return self._sender is not None and self._sender.is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        if self._sender is None:
            raise TritonModelException("only a request given to 'execute' has a response sender")
        self._sender.taken = True
        return self._sender

    def last_response(self, response: InferenceResponse | None) -> m.Responded | None:
        """Return what `execute` returned for this request as its last response; see the sender's
        `last`."""
        if self._sender is None:
            raise TritonModelException("only a request given to 'execute' gets a response")
        if self.rescheduled:
            return None
        return self._sender.last(response)

    def set_release_flags(self, flags: int) -> None:
        """Say what becomes of the request after `execute`: with
        TRITONSERVER_REQUEST_RELEASE_RESCHEDULE it comes again, unless it has its last response."""
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException(
                "the release flags are TRITONSERVER_REQUEST_RELEASE_ALL or "
                "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE"
            )
        self._release_flags = flags

    @property
    def rescheduled(self) -> bool:
        return self._release_flags == RELEASE_RESCHEDULE

    @property
    def runs_again(self) -> InferenceResponseSender | None:
        """The sender of a rescheduled request that has no last response yet; None of any other."""
        sender = self._sender
        return sender if self.rescheduled and sender is not None and not sender.closed else None

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Run this request on its model, and wait for the response; an error is in the response. A
        `decoupled` one returns an iterator over any number of responses."""
        responses: queue.SimpleQueue[tuple[InferenceResponse, bool]] = queue.SimpleQueue()
        call = self._call(lambda *response: responses.put(response), decoupled=decoupled)
        iterator = ResponseIterator(daemon(), call, responses)
        return iterator if decoupled else next(iterator)

    async def async_exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Like `exec`, up to the first response, and let other coroutines run."""
        import asyncio  # noqa: PLC0415 - slow to import; a caller that awaits has it already

        responses: queue.SimpleQueue[tuple[InferenceResponse, bool]] = queue.SimpleQueue()
        future: Future[InferenceResponse] = Future()
        # A coroutine that is cancelled drops the response.
        future.set_running_or_notify_cancel()

        def received(response: InferenceResponse, final: bool) -> None:
            if decoupled:
                responses.put((response, final))
            if not future.done():
                future.set_result(response)

        call = self._call(received, decoupled=decoupled)
        first = await asyncio.wrap_future(future)
        return ResponseIterator(daemon(), call, responses) if decoupled else first

    def _call(
        self, respond: Callable[[InferenceResponse, bool], object], *, decoupled: bool
    ) -> int:
        """Send the call; `respond` gets each response and whether it is the last, on any thread.

        Returns:
            The call's number; 0 where the call could not be sent.
        """
        link = replying_daemon()
        if not (link.executing or link.unfinished):
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        contents = [(tensor.name(), *tensor.content) for tensor in self._inputs]
        try:
            places = pack_for_daemon(contents, link.outbox)
        except ArenaFull as error:
            reason = f"the inputs for model '{self._message.model_name}': {error}"
            respond(InferenceResponse([], error=TritonError(reason)), True)
            return 0

        def received(reply: m.Responded | m.QueryResult) -> None:
            if isinstance(reply, m.Responded):
                respond(_response(reply.response, link), reply.final)

        def message(number: int) -> m.CallModel:
            return m.CallModel(replace(self._message, number=number, inputs=places), decoupled)

        try:
            return link.call(message, received)
        except BaseException:
            take_back(places, link.outbox)
            raise


class ResponseIterator:
    """Iterates over the responses of another model as they arrive; the last may be empty and only
    marks the end. A loop continues where the last one ended. After the last response it begins
    again with the first, unless there were too many to keep: the memory of their tensors is
    limited."""

    def __init__(
        self,
        link: DaemonLink,
        call: int,
        responses: queue.SimpleQueue[tuple[InferenceResponse, bool]],
    ) -> None:
        self._link = link
        self._call = call
        self._responses = responses
        self._over = False
        self._kept: list[InferenceResponse] | None = []
        # The place in `_kept` of the next response, once all have come.
        self._next = 0

    def __iter__(self) -> ResponseIterator:
        if self._over:
            if self._kept is None:
                raise TritonModelException(
                    f"more than {_MOST_KEPT} responses can be iterated over once only"
                )
            self._next %= len(self._kept)
        return self

    def __next__(self) -> InferenceResponse:
        if self._over:
            if self._kept is None or self._next == len(self._kept):
                raise StopIteration
            self._next += 1
            return self._kept[self._next - 1]
        response, self._over = self._responses.get()
        if self._kept is not None:
            self._kept.append(response)
            self._next = len(self._kept)
            if self._next > _MOST_KEPT:
                self._kept = None
        return response

    def cancel(self) -> None:
        if not self._over and self._call:
            self._link.send(m.Cancel(self._call))


def _response(message: m.ChildResponse | None, link: DaemonLink) -> InferenceResponse:
    if message is None:
        return InferenceResponse([])
    if message.failure is not None:
        error = TritonError(message.failure.text, m.Code(message.failure.code))
        return InferenceResponse([], error=error)
    return InferenceResponse(_tensors(message.outputs, link), parameters=message.parameters)


def _tensors(places: Iterable[m.TensorPlace], link: DaemonLink) -> list[PbTensor]:
    return [PbTensor.over(p.name, DataType(p.datatype), unpack(p, link.inbox)) for p in places]


def _correlation_id(given: int | str) -> int | str:
    if isinstance(given, (str, bytes)):
        return text(given, "correlation_id")
    number = operator.index(given)
    if not 0 <= number < 1 << 64:
        raise TypeError(f"correlation_id must fit 64 bits without a sign, found {number}")
    return number


def _parameters(given: Mapping[str, m.Value] | str | None) -> dict[str, m.Value]:
    return plain_parameters(json.loads(given or "{}") if isinstance(given, str) else given)
