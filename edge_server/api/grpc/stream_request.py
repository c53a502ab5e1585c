"""StreamRequest: one request of a ModelStreamInfer call, and its responses on the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritonclient.grpc import service_pb2 as pb

from edge_server.api.grpc.convert import AS_IT_IS, to_response_message
from edge_server.api.grpc.wire import write_response, write_stream_response
from edge_server.errors import EdgeServerError
from edge_server.requests import InferResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edge_server.api.grpc.convert import OutputForm
    from edge_server.api.grpc.stream import InferStream
    from edge_server.requests import ResponseCallback

_NAME_OF_FINAL = "triton_final_response"


class StreamRequest:
    """One request of a stream and its responses; also the `Cancellation` of that request.

    Attributes:
        size_bytes: of the request.
        id: of the request, if it could be parsed.
        decoupled: the responses do not wait for those of earlier requests.
        empty_final: the client wants a final response even if it is empty.
        forms: see `to_response_message`.
        finally_: called once, after the last response.
    """

    def __init__(self, stream: InferStream, size_bytes: int = 0) -> None:
        self._stream = stream
        self.size_bytes = size_bytes
        self.id = ""
        self.model_name = ""
        self.model_version = ""
        self.decoupled = False
        self.empty_final = False
        self.forms: Mapping[str, OutputForm] = AS_IT_IS
        self.finally_: Callable[[], None] | None = None
        self.answer: ResponseCallback = None
        self.answered = False
        self.callbacks: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        return self._stream.over

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        self._stream.when_over(self, callback)

    def take_place(self) -> None:
        """Give the request its place among the stream's responses."""
        self._stream.admit(self)

    def respond(self, answer: ResponseCallback, final: bool) -> None:
        """See `Respond`. A decoupled model blocks here while the client reads too slowly."""
        if final and self.finally_ is not None:
            finally_, self.finally_ = self.finally_, None
            finally_()
        self._stream.give(self, answer, final=final)

    def written(self, answer: ResponseCallback, *, final: bool) -> bytes:
        """Return the `ModelStreamInferResponse` for one response.

        Raises:
            EdgeServerError: the response does not fit the form that the client requested.
        """
        if answer is None:
            answer = InferResponse(self.model_name, self.model_version, self.id, {})
        if isinstance(answer, EdgeServerError):
            raise answer
        message, raw = to_response_message(answer, self.forms)
        if self.decoupled:
            message.parameters[_NAME_OF_FINAL].bool_param = final
        return write_stream_response(write_response(message, raw))

    def told(self, error: EdgeServerError) -> bytes:
        """Return the `ModelStreamInferResponse` for an error: only its text and the id."""
        message = pb.ModelStreamInferResponse(error_message=str(error) or type(error).__name__)
        message.infer_response.id = self.id
        written: bytes = message.SerializeToString()
        return written
