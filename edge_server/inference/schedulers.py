"""What schedulers share: waiting for a response that comes later, and wrapping a scheduler."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from edge_server.errors import Cancelled, DeadlineExceeded, EdgeServerError, InternalError

if TYPE_CHECKING:
    from edge_server.inference.snapshot import LoadedModel, RetainedSnapshot, Scheduler, Snapshot
    from edge_server.requests import InferRequest, InferResponse, Respond, ResponseCallback, Trace


def infer_by_submit(
    scheduler: Scheduler, request: InferRequest, snapshot: Snapshot
) -> InferResponse:
    """`Scheduler.infer` for a scheduler that queues: submit `request` and wait for its response.

    A caller that leaves early, at its deadline or cancelled, leaves the request in the queue, or
    running: the snapshot stays leased until the final response.

    Raises:
        EdgeServerError: see `Scheduler.infer`.
    """
    future = ResponseFuture(snapshot.retain())
    try:
        scheduler.submit(request, snapshot, future)
    except BaseException:
        future.end()
        raise
    return future.wait(request)


class ResponseFuture:
    """A `Respond` that keeps the last response, and a thread that waits for it."""

    __slots__ = ("_lease", "_over", "_response")

    def __init__(self, lease: RetainedSnapshot | None = None) -> None:
        self._lease = lease
        self._response: ResponseCallback = None
        self._over = threading.Event()

    def __call__(self, response: ResponseCallback, final: bool) -> None:
        if response is not None:
            self._response = response
        if final:
            self.end()

    def end(self) -> None:
        """Release the lease and end the wait: no response comes any more."""
        if self._lease is not None:
            self._lease.release()
        self._over.set()

    def wait(self, request: InferRequest) -> InferResponse:
        """Return the response to `request`; raise as `Scheduler.infer`."""
        if request.cancellation is not None and not self._over.is_set():
            # Also called once the request has its response, and then without effect.
            request.cancellation.when_cancelled(self._over.set)
        left_s = None if request.deadline is None else request.deadline - time.monotonic()
        if not self._over.wait(left_s):
            raise DeadlineExceeded("the request's deadline passed before its response")
        response = self._response
        if isinstance(response, EdgeServerError):
            raise response
        if response is not None:
            return response
        if request.cancelled:
            raise Cancelled("the caller cancelled the request")
        raise InternalError(f"model '{request.model_name}' ended without a response")


class SchedulerWrapper:
    """A scheduler that does something before or after the scheduler `beneath` it.

    Attributes:
        beneath: closed with the wrapper.
    """

    def __init__(self, beneath: Scheduler) -> None:
        self.beneath = beneath

    def infer(self, request: InferRequest, snapshot: Snapshot) -> InferResponse:
        """See `Scheduler.infer`."""
        return self.beneath.infer(request, snapshot)

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        """See `Scheduler.submit`."""
        self.beneath.submit(request, snapshot, respond)

    def pending(self) -> int:
        return self.beneath.pending()

    def running_since(self) -> float:
        return self.beneath.running_since()

    def close(self) -> None:
        self.beneath.close()


class TracedScheduler(SchedulerWrapper):
    """Records one request and its responses in the request's trace.

    The trace ends with the last response of the model, also where the caller has left before it.
    """

    def __init__(self, loaded: LoadedModel, trace: Trace) -> None:
        super().__init__(loaded.scheduler)
        self._trace = trace
        self._version = loaded.version

    def infer(self, request: InferRequest, snapshot: Snapshot) -> InferResponse:
        return infer_by_submit(self, request, snapshot)

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        trace = self._trace

        def pass_on(response: ResponseCallback, final: bool) -> None:
            # Before `respond`, which may mark later timestamps itself.
            error = str(response) if isinstance(response, EdgeServerError) else ""
            trace.responded(final=final, error=error)
            respond(response, final)

        trace.begin(self._version)
        try:
            self.beneath.submit(request, snapshot, pass_on)
        except BaseException as error:
            # Refused: there is no response.
            trace.end(str(error))
            raise


def innermost(scheduler: Scheduler) -> Scheduler:
    """The scheduler that runs the model, beneath the wrappers that watch and cache."""
    while isinstance(scheduler, SchedulerWrapper):
        scheduler = scheduler.beneath
    return scheduler
