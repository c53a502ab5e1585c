"""ModelStreamInfer: requests and responses on one call, each at its own pace.

A thread reads the requests and submits them in order, so that the requests of a sequence reach
the scheduler in order; the call's own thread writes the responses. A model that is scheduled
directly runs on the reading thread, so the stream's next request waits for it; other streams do
not.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

import grpc

from edge_server.api.grpc.admission import SHUTTING_DOWN
from edge_server.api.grpc.byte_budget import ByteBudget
from edge_server.api.grpc.stream_request import StreamRequest
from edge_server.api.grpc.traffic import SLOW_READER_S
from edge_server.errors import EdgeServerError, InternalError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.requests import ResponseCallback

log = logging.getLogger(__name__)

# Requests of one stream that are read and have no response yet, and responses not yet sent. Beyond
# that limit the client's next request stays in its socket, and a decoupled model waits.
_MOST_WAITING = 16
# Limit for an error text, which may quote a client's request: the text also waits in memory.
_LONGEST_TEXT = 4000


class Submit(Protocol):
    """Starts one request of a stream."""

    def __call__(self, data: bytes, stream_request: StreamRequest) -> None:
        """Parse `data` into `stream_request`, give it its place, submit it with its `respond`.

        Raises:
            EdgeServerError: the request is refused; `respond` is not called.
        """
        ...


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
        # Responses to write: the ordered ones by request, and those of decoupled models.
        self._in_order: deque[StreamRequest] = deque()
        self._at_once: deque[tuple[StreamRequest, ResponseCallback, bool]] = deque()
        self._open: set[StreamRequest] = set()
        self._read_to_end = False
        self._closing = False
        self._failure: EdgeServerError | None = None
        self.over = False

    def answers(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """Yield each response as a serialised `ModelStreamInferResponse`, until the last one.

        Raises:
            EdgeServerError: the stream ends with that status.
        """
        reader = threading.Thread(
            target=self._read, args=(requests,), name="grpc-stream", daemon=True
        )
        reader.start()
        try:
            while (taken := self._take()) is not None:
                stream_request, answer, final = taken
                try:
                    yield self._written(stream_request, answer, final=final)
                finally:
                    if final:
                        self._release(stream_request)
                    del taken, stream_request, answer
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
            callbacks = [
                callback for stream_request in self._open for callback in stream_request.callbacks
            ]
            for stream_request in (*self._in_order, *(waiting[0] for waiting in self._at_once)):
                if stream_request.answered:
                    self._release(stream_request)
            self._in_order.clear()
            self._at_once.clear()
            self._changed.notify_all()
        for callback in callbacks:
            callback()

    def when_over(self, stream_request: StreamRequest, callback: Callable[[], None]) -> None:
        """Call `callback` when the stream ends before `stream_request` has its last response."""
        with self._changed:
            if not self.over:
                stream_request.callbacks.append(callback)
                return
        callback()

    def give(self, stream_request: StreamRequest, answer: ResponseCallback, *, final: bool) -> None:
        """Queue a model's response in its order; a response after the end is dropped."""
        queued = False
        with self._changed:
            if stream_request.decoupled:
                if (answer is not None or stream_request.empty_final) and self._wait_for_room():
                    self._at_once.append((stream_request, answer, final))
                    queued = True
            elif answer is not None:
                stream_request.answer = answer
            # Last: a stream does not end while it has open requests.
            if final:
                self._open.discard(stream_request)
                stream_request.callbacks.clear()
                if self.over or (stream_request.decoupled and not queued):
                    self._release(stream_request)
            stream_request.answered = stream_request.answered or final
            given_up = self._failure is not None
            self._changed.notify_all()
        if given_up:
            # Otherwise each model of the stream would wait as long again for each next response.
            self.end()

    def _written(
        self, stream_request: StreamRequest, answer: ResponseCallback, *, final: bool
    ) -> bytes:
        try:
            return stream_request.written(answer, final=final)
        except EdgeServerError as error:
            if self._errors_end_it:
                raise
            return stream_request.told(error)

    def _release(self, stream_request: StreamRequest) -> None:
        """Release the request's bytes from the budget."""
        with self._changed:
            size_bytes, stream_request.size_bytes = stream_request.size_bytes, 0
        self._budget.give(size_bytes)

    def _wait_for_room(self) -> bool:
        """Block a decoupled model for a limited time; return whether its response fits."""
        if not self._changed.wait_for(
            lambda: self.over or len(self._at_once) < _MOST_WAITING, self._slow_reader_s
        ):
            self._failure = Unavailable(
                f"no answer was read for {self._slow_reader_s:g} s while {_MOST_WAITING} waited"
            )
        return not (self.over or self._failure)

    def _read(self, requests: Iterator[bytes]) -> None:
        try:
            for data in requests:
                stream_request = StreamRequest(self, len(data))
                if not self._has_room() or not self._budget.take_when_it_fits(
                    stream_request.size_bytes, lambda: self.over
                ):
                    return
                self._start(stream_request, data)
                # A client may pause for hours; and when the client disconnects, gRPC's error keeps
                # this frame until the next full garbage collection.
                del data, stream_request
        except grpc.RpcError:
            # gRPC raises this when the call is over.
            return
        finally:
            with self._changed:
                self._read_to_end = True
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until the stream may accept one more request; return False after its end."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self.over
                    or self._closing
                    or max(len(self._in_order), len(self._open)) < _MOST_WAITING
                )
            )
            return not (self.over or self._closing)

    def _start(self, stream_request: StreamRequest, data: bytes) -> None:
        try:
            self._submit(data, stream_request)
        except EdgeServerError as error:
            self._refuse(stream_request, type(error)(str(error)[:_LONGEST_TEXT]))
        except Exception as error:
            log.exception("grpc ModelStreamInfer: unforeseen error")
            text = f"{type(error).__name__}: {error}"
            self._refuse(stream_request, InternalError(text[:_LONGEST_TEXT]))

    def admit(self, stream_request: StreamRequest) -> None:
        """Give `stream_request` its place among the responses."""
        with self._changed:
            self._open.add(stream_request)
            if not stream_request.decoupled:
                self._in_order.append(stream_request)

    def _refuse(self, stream_request: StreamRequest, error: EdgeServerError) -> None:
        if stream_request not in self._open:
            stream_request.decoupled = False
            self.admit(stream_request)
        stream_request.respond(error, True)

    def _take(self) -> tuple[StreamRequest, ResponseCallback, bool] | None:
        """Wait for the next response to write; return None at the end of the stream.

        Raises:
            EdgeServerError: the stream ends with that status.
        """
        with self._changed:
            self._changed.wait_for(self._has_news)
            if self._failure is not None:
                raise self._failure
            if self.over:
                return None
            taken: tuple[StreamRequest, ResponseCallback, bool] | None = None
            if self._at_once:
                taken = self._at_once.popleft()
            elif self._in_order and self._in_order[0].answered:
                stream_request = self._in_order.popleft()
                answer = stream_request.answer or _without_answer(stream_request)
                taken = stream_request, answer, True
            elif self._closing and not self._read_to_end:
                raise Unavailable(SHUTTING_DOWN)
            self._changed.notify_all()
            return taken

    def _has_news(self) -> bool:
        return bool(
            self.over
            or self._failure
            or self._at_once
            or (self._in_order and self._in_order[0].answered)
            or ((self._read_to_end or self._closing) and not self._open and not self._in_order)
        )


def _without_answer(stream_request: StreamRequest) -> EdgeServerError:
    return InternalError(f"model '{stream_request.model_name}' ended without a response")
