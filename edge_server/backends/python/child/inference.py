"""`pb_utils.InferenceRequest`: requests to this model, and its requests to other models."""

from __future__ import annotations

import json
import operator
import queue
from typing import TYPE_CHECKING, Any

from edge_server.backends.python.arena import ArenaFull
from edge_server.backends.python.child.errors import TritonError, TritonModelException
from edge_server.backends.python.child.given import text, whole
from edge_server.backends.python.child.link import daemon
from edge_server.backends.python.child.response import InferenceResponse, plain_parameters
from edge_server.backends.python.child.response_sender import InferenceResponseSender
from edge_server.backends.python.child.tensor import Tensor
from edge_server.backends.python.codes import Code
from edge_server.backends.python.messages import Asked, CallAnswered, CallModel, CancelCall
from edge_server.backends.python.packing import pack_for_daemon, take_back, unpack
from edge_server.tensors import DataType

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from edge_server.backends.python.child.link import DaemonLink
    from edge_server.backends.python.messages import (
        Answered,
        CallReturned,
        ChildResponse,
        TensorPlace,
        Value,
    )

RELEASE_ALL = 1


class InferenceRequest:
    """A request; the model can execute a request that it made itself."""

    def __init__(  # noqa: PLR0917 - Triton's signature
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: Any = None,
        trace: Any = None,
        parameters: Mapping[str, Value] | str | None = None,
    ) -> None:
        for tensor in inputs:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"inputs must be Tensor objects, found type '{type(tensor)}'")
        self._id = text(request_id, "request_id")
        self._correlation_id = _correlation_id(correlation_id)
        self._inputs = list(inputs)
        self._outputs = [text(name, "requested_output_names") for name in requested_output_names]
        self._model_name = text(model_name, "model_name")
        self._model_version = whole(model_version, "model_version")
        self._flags = whole(flags, "flags")
        self._timeout = whole(timeout, "timeout")
        self._preferred_memory = preferred_memory
        self._trace = trace
        self._parameters = _parameters(parameters)
        self._sender: InferenceResponseSender | None = None

    @classmethod
    def of(cls, asked: Asked, link: DaemonLink, *, decoupled: bool) -> InferenceRequest:
        """Return the daemon's request; its inputs lie in the daemon's arena."""
        request = cls(
            asked.id,
            asked.correlation_id,
            _tensors(asked.inputs, link),
            asked.outputs,
            asked.model_name,
            int(asked.model_version),
            asked.flags,
            asked.timeout_us,
            parameters=asked.parameters,
        )
        request._sender = InferenceResponseSender(
            link, asked.number, frozenset(asked.outputs), decoupled=decoupled
        )
        return request

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        return self._outputs

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = whole(flags, "flags")

    def timeout(self) -> int:
        """The timeout in µs; 0 without a timeout."""
        return self._timeout

    def parameters(self) -> str:
        """The parameters as a JSON object."""
        return json.dumps(self._parameters)

    def preferred_memory(self) -> Any:
        return self._preferred_memory

    def trace(self) -> Any:
        return self._trace

    def model_name(self) -> str:
        return self._model_name

    def model_version(self) -> int:
        return self._model_version

    def is_cancelled(self) -> bool:
        """Return whether the request's client is gone."""
        return self._sender is not None and self._sender.is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        if self._sender is None:
            raise TritonModelException("only a request given to 'execute' has a response sender")
        self._sender.taken = True
        return self._sender

    def last_answer(self, response: InferenceResponse | None) -> Answered | None:
        """Return the result of `execute` for this request, as its last response.

        None where `execute` returned nothing because the model has taken the response sender.
        """
        sender = self._sender
        if sender is None:
            raise TritonModelException("only a request given to 'execute' is answered")
        if response is None:
            return None if sender.taken else sender.nothing()
        return sender.last(response)

    def set_release_flags(self, flags: int) -> None:
        """Accept the flags without effect: a request is always released with its last response."""
        if flags != RELEASE_ALL:
            raise TritonModelException(
                "this server supports no release flags but TRITONSERVER_REQUEST_RELEASE_ALL"
            )

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Run this request on its model, and wait for the response; an error is in the response.

        Args:
            decoupled: return an iterator over any number of responses.
        """
        answers: queue.SimpleQueue[tuple[InferenceResponse, bool]] = queue.SimpleQueue()
        call = self._call(lambda *heard: answers.put(heard), decoupled=decoupled)
        iterator = ResponseIterator(daemon(), call, answers)
        return iterator if decoupled else next(iterator)

    async def async_exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Like `exec`; the event loop's other coroutines run meanwhile."""
        if decoupled:
            return self.exec(decoupled=True)
        import asyncio  # noqa: PLC0415 - slow to import; a caller that awaits has it already

        loop = asyncio.get_running_loop()
        answer: asyncio.Future[InferenceResponse] = loop.create_future()
        self._call(
            lambda response, _final: loop.call_soon_threadsafe(_settle, answer, response),
            decoupled=False,
        )
        return await answer

    def _call(self, hear: Callable[[InferenceResponse, bool], object], *, decoupled: bool) -> int:
        """Send the call; `hear` gets each response and whether it is the last, on any thread.

        Returns:
            The call's number; 0 where the call could not be sent.
        """
        link = daemon()
        if not (link.executing or link.unanswered):
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        contents = [(tensor.name(), *tensor.content) for tensor in self._inputs]
        try:
            places = pack_for_daemon(contents, link.outbox)
        except ArenaFull as error:
            text = f"the inputs for model '{self._model_name}': {error}"
            hear(InferenceResponse([], error=TritonError(text)), True)
            return 0

        def message(number: int) -> CallModel:
            version = "" if self._model_version == -1 else str(self._model_version)
            asked = Asked(
                number,
                self._id,
                places,
                self._outputs,
                self._correlation_id,
                self._flags,
                self._timeout,
                self._parameters,
                self._model_name,
                version,
            )
            return CallModel(asked, decoupled)

        def hear_answer(heard: CallAnswered | CallReturned) -> None:
            if isinstance(heard, CallAnswered):
                hear(_response(heard.answer, link), heard.final)

        try:
            return link.call(message, hear_answer)
        except BaseException:
            take_back(places, link.outbox)
            raise


class ResponseIterator:
    """Iterates over the responses of another model as they arrive; the last may be empty and
    only marks the end."""

    def __init__(
        self,
        link: DaemonLink,
        call: int,
        answers: queue.SimpleQueue[tuple[InferenceResponse, bool]],
    ) -> None:
        self._link = link
        self._call = call
        self._answers = answers
        self._over = False

    def __iter__(self) -> ResponseIterator:
        return self

    def __next__(self) -> InferenceResponse:
        if self._over:
            raise StopIteration
        response, self._over = self._answers.get()
        return response

    def cancel(self) -> None:
        """Cancel the request to the other model."""
        if not self._over and self._call:
            self._link.send(CancelCall(self._call))


def _response(answer: ChildResponse | None, link: DaemonLink) -> InferenceResponse:
    if answer is None:
        return InferenceResponse([])
    if answer.failure is not None:
        return InferenceResponse(
            [], error=TritonError(answer.failure.text, Code(answer.failure.code))
        )
    return InferenceResponse(_tensors(answer.outputs, link), parameters=answer.parameters)


def _tensors(places: Iterable[TensorPlace], link: DaemonLink) -> list[Tensor]:
    return [Tensor.over(p.name, DataType(p.datatype), unpack(p, link.inbox)) for p in places]


def _settle(answer: asyncio.Future[InferenceResponse], response: InferenceResponse) -> None:
    if not answer.done():
        answer.set_result(response)


def _correlation_id(given: int | str) -> int | str:
    if isinstance(given, (str, bytes)):
        return text(given, "correlation_id")
    number = operator.index(given)
    if not 0 <= number < 1 << 64:
        raise TypeError(f"correlation_id must fit 64 bits without a sign, found {number}")
    return number


def _parameters(given: Mapping[str, Value] | str | None) -> dict[str, Value]:
    return plain_parameters(json.loads(given or "{}") if isinstance(given, str) else given or {})
