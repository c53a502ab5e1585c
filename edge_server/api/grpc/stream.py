"""ModelStreamInfer: requests and responses on one call, each at its own pace.

A thread reads the requests and submits them in order, so that the requests of a sequence reach
the scheduler in order; the call's own thread writes the responses. A model that is scheduled
directly runs on the reading thread, so the stream's next request waits for it; other streams do
not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import grpc
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.admission import SHUTTING_DOWN, ByteBudget
from edge_server.api.convert import AS_IT_IS, to_response_message
from edge_server.api.grpc.traffic import SLOW_READER_S
from edge_server.api.grpc.wire import write_response, write_stream_response
from edge_server.errors import EdgeServerError, InternalError, Unavailable, forget_frames
from edge_server.requests import InferResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from edge_server.api.convert import OutputForm
    from edge_server.requests import ResponseCallback

    # Parses the bytes into the request, gives it its place, and submits it with its `respond`.
    # Raises EdgeServerError where the request is refused; `respond` is not called then.
    Submit = Callable[[bytes, "StreamRequest"], None]

log = logging.getLogger(__name__)

# Requests of one stream that are read and have no response yet, and responses not yet sent. Beyond
# that limit the client's next request stays in its socket, and a decoupled model waits.
_MOST_WAITING = 16
# Smaller responses are not counted while they wait.
_COUNTED_FROM_BYTES = 4 * 1024
# Limit for an error text, which may quote a client's request: the text also waits in memory.
_LONGEST_TEXT = 4000
_NAME_OF_FINAL = "triton_final_response"


class InferStream:
    """One open stream.

    Responses of models that are not decoupled keep the order of the requests; a decoupled model's
    responses are sent as the model returns them. An error is one response among the others; the
    call itself ends with OK.

    Args:
        submit: starts a request.
        errors_end_it: the first error ends the call with its status.
        slow_reader_s: seconds that a model waits for a client that reads no response.
        budget: counts a request's bytes until its last response is sent; without room the stream
            delays the next request, as a refused one would be missing in a sequence.
    """

    def __init__(
        self,
        submit: Submit,
        budget: ByteBudget | None = None,
        *,
        errors_end_it: bool = False,
        slow_reader_s: float = SLOW_READER_S,
    ) -> None:
        self._submit = submit
        self._budget = budget or ByteBudget()
        self._errors_end_it = errors_end_it
        self._slow_reader_s = slow_reader_s
        self._changed = threading.Condition()
        # Requests in order, each until its last response is sent; decoupled models' responses.
        self._requests: list[StreamRequest] = []
        self._at_once: deque[tuple[StreamRequest, ResponseCallback, bool, int]] = deque()
        self._read_to_end = False
        self._closing = False
        self._failure: EdgeServerError | None = None
        self.over = False

    def responses(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """Yield each `ModelStreamInferResponse`; raise the error that the stream ends with."""
        reader = threading.Thread(
            target=self._read, args=(requests,), name="grpc-stream", daemon=True
        )
        reader.start()
        try:
            while (taken := self._take()) is not None:
                request, response, final, held_bytes = taken
                try:
                    yield self._serialise(request, response, final=final)
                finally:
                    with self._changed:
                        request.unsent -= 1
                        held_bytes = min(held_bytes, request.size_bytes)
                        request.size_bytes -= held_bytes
                        self._budget.give(held_bytes)
                        self._remove_if_over(request)
                    del taken, request, response
        finally:
            self.end()

    def close(self) -> None:
        """Accept no more requests; accepted ones get their responses, then the stream ends."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def end(self) -> None:
        """Cancel all outstanding requests, as the client is gone."""
        with self._changed:
            if self.over:
                return
            self.over = True
            ended, self._requests = self._requests, []
            self._at_once.clear()
            callbacks = [callback for request in ended for callback in request.callbacks]
            for request in ended:
                self._remove_if_over(request)
            self._changed.notify_all()
        for callback in callbacks:
            callback()

    def when_over(self, request: StreamRequest, callback: Callable[[], None]) -> None:
        with self._changed:
            if not self.over:
                request.callbacks.append(callback)
                return
        callback()

    def count(self, request: StreamRequest, size_bytes: int) -> None:
        self._budget.take(size_bytes)
        with self._changed:
            request.size_bytes += size_bytes

    def admit(self, request: StreamRequest) -> None:
        with self._changed:
            if not self.over:
                self._requests.append(request)

    def add(self, request: StreamRequest, response: ResponseCallback, *, final: bool) -> None:
        """Queue a model's response in its order; a response after the end is dropped."""
        with self._changed:
            if request.decoupled:
                if (response is not None or request.empty_final) and self._wait_for_room():
                    held_bytes = self._hold(request, response)
                    self._at_once.append((request, response, final, held_bytes))
                    request.unsent += 1
            elif not self.over:
                request.response = response or request.response
                request.unsent = int(final)
                self._hold(request, response)
            # Last: a stream does not end while it has incomplete requests.
            if final:
                request.complete = True
                request.callbacks.clear()
                self._remove_if_over(request)
            failed = self._failure is not None
            self._changed.notify_all()
        if failed:
            # Otherwise each model of the stream would wait as long again for each next response.
            self.end()

    def _hold(self, request: StreamRequest, response: ResponseCallback) -> int:
        """Count a large response, which is in memory, with its request; return its bytes."""
        if not isinstance(response, InferResponse):
            return 0
        size_bytes = sum(tensor.array.nbytes for tensor in response.outputs.values())
        if size_bytes < _COUNTED_FROM_BYTES:
            return 0
        self._budget.add(size_bytes)
        request.size_bytes += size_bytes
        return size_bytes

    def _serialise(
        self, request: StreamRequest, response: ResponseCallback, *, final: bool
    ) -> bytes:
        try:
            return request.serialise(response, final=final)
        except EdgeServerError as error:
            if self._errors_end_it:
                raise
            forget_frames(error)
            return request.serialise_error(error)

    def _remove_if_over(self, request: StreamRequest) -> None:
        """Forget a request without further responses, and release its bytes from the budget."""
        if not request.complete or (request.unsent and not self.over):
            return
        if request in self._requests:
            self._requests.remove(request)
        size_bytes, request.size_bytes = request.size_bytes, 0
        self._budget.give(size_bytes)
        self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        """Block a decoupled model for a limited time; return whether its response fits."""
        if not self._changed.wait_for(
            lambda: self.over or len(self._at_once) < _MOST_WAITING, self._slow_reader_s
        ):
            self._failure = Unavailable(
                f"no response was read for {self._slow_reader_s:g} s while {_MOST_WAITING} waited"
            )
        return not (self.over or self._failure)

    def _read(self, requests: Iterator[bytes]) -> None:
        left_out = False
        began_ns = time.monotonic_ns()
        try:
            for data in requests:
                request = StreamRequest(self, len(data), (began_ns, time.monotonic_ns()))
                left_out = not self._has_room() or not self._budget.take_when_it_fits(
                    request.size_bytes, lambda: self.over
                )
                if left_out:
                    return
                self._start(request, data)
                # A client may pause for hours; and when the client disconnects, gRPC's error keeps
                # this frame until the next full garbage collection.
                del data, request
                began_ns = time.monotonic_ns()
        except grpc.RpcError:
            # gRPC raises this when the call is over.
            return
        finally:
            with self._changed:
                self._read_to_end = not left_out
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until the stream may accept one more request; return False after its end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.over or self._closing or len(self._requests) < _MOST_WAITING
            )
            return not (self.over or self._closing)

    def _start(self, request: StreamRequest, data: bytes) -> None:
        try:
            self._submit(data, request)
        except EdgeServerError as error:
            self._refuse(request, type(error)(str(error)[:_LONGEST_TEXT]))
        except Exception as error:
            log.exception("grpc ModelStreamInfer: unforeseen error")
            text = f"{type(error).__name__}: {error}"
            self._refuse(request, InternalError(text[:_LONGEST_TEXT]))

    def _refuse(self, request: StreamRequest, error: EdgeServerError) -> None:
        if request not in self._requests:
            request.decoupled = False
            self.admit(request)
        request.respond(error, True)

    def _take(self) -> tuple[StreamRequest, ResponseCallback, bool, int] | None:
        """Wait for the next response, and return it with the bytes that are counted for it alone;
        None at the end of the stream.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self.over
                    or self._failure
                    or self._at_once
                    or self._first_in_order()
                    or ((self._read_to_end or self._closing) and not self._requests)
                )
            )
            if self._failure is not None:
                raise self._failure
            if self.over:
                return None
            if self._at_once:
                self._changed.notify_all()
                return self._at_once.popleft()
            request = self._first_in_order()
            if request is not None:
                text = f"model '{request.model_name}' ended without a response"
                return request, request.response or InternalError(text), True, 0
            if not self._read_to_end:
                raise Unavailable(SHUTTING_DOWN)
            return None

    def _first_in_order(self) -> StreamRequest | None:
        first = next((each for each in self._requests if not each.decoupled), None)
        return first if first is not None and first.complete else None


class StreamRequest:
    """One request of a stream and its responses; also the `Cancellation` of that request.

    Attributes:
        size_bytes: of the request, of what is parsed from it, and of its responses that wait.
        reading_ns: when the stream began to read the request, and when it had it.
        decoupled: the responses do not wait for those of earlier requests.
        empty_final: the client wants a final response even if it is empty.
        response: of a model that is not decoupled, until its last one.
        complete: the model has given the last response.
        unsent: number of responses that are queued or being sent.
    """

    def __init__(
        self, stream: InferStream, size_bytes: int = 0, reading_ns: tuple[int, int] = (0, 0)
    ) -> None:
        self._stream = stream
        self.size_bytes = size_bytes
        self.reading_ns = reading_ns
        self.id = ""
        self.model_name = ""
        self.model_version = ""
        self.decoupled = False
        self.empty_final = False
        self.forms: Mapping[str, OutputForm] = AS_IT_IS
        self.response: ResponseCallback = None
        self.complete = False
        self.unsent = 0
        self.callbacks: list[Callable[[], None]] = []

    def count(self, size_bytes: int) -> None:
        self._stream.count(self, size_bytes)

    @property
    def cancelled(self) -> bool:
        return self._stream.over

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        self._stream.when_over(self, callback)

    def take_place(self) -> None:
        self._stream.admit(self)

    def respond(self, response: ResponseCallback, final: bool) -> None:
        """See `Respond`. A decoupled model blocks here while the client reads too slowly."""
        self._stream.add(self, response, final=final)

    def serialise(self, response: ResponseCallback, *, final: bool) -> bytes:
        """Return the `ModelStreamInferResponse` for one response."""
        if response is None:
            response = InferResponse(self.model_name, self.model_version, self.id, {})
        if isinstance(response, EdgeServerError):
            raise response
        message, raw = to_response_message(response, self.forms)
        # Of every model: a client may not know whether the model is decoupled.
        message.parameters[_NAME_OF_FINAL].bool_param = final
        return write_stream_response(write_response(message, raw))

    def serialise_error(self, error: EdgeServerError) -> bytes:
        message = pb.ModelStreamInferResponse(error_message=str(error) or type(error).__name__)
        message.infer_response.id = self.id
        written: bytes = message.SerializeToString()
        return written
