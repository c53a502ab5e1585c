"""Requests and responses of the data plane.

Both are made for every request, hence msgspec structs: constructing one takes a tenth of the time
of a frozen dataclass.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from edge_server.errors import Cancelled, DeadlineExceeded, EdgeServerError, InternalError

if TYPE_CHECKING:
    from edge_server.tensors import Tensor

log = logging.getLogger(__name__)

T = TypeVar("T")
Parameter = bool | int | float | str
Parameters = Mapping[str, Parameter]
NO_PARAMETERS: Parameters = MappingProxyType({})


class SequencePlace(msgspec.Struct, frozen=True):
    """The position of a request in its sequence, by its correlation id; 0 and the empty string mean
    no sequence. An id that is `generated` is the server's, for a request that came without one.
    """

    id: int | str
    start: bool = False
    end: bool = False
    generated: bool = False


class Cancellation(Protocol):
    """Whether the caller has cancelled its request."""

    @property
    def cancelled(self) -> bool: ...

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the caller has cancelled, at once if it already has; on any thread,
        and maybe after the caller got its response.
        """
        ...


class Trace(Protocol):
    """The timestamps of one request in one model; only traced requests have one.

    Names are Triton's. Every method may be called from any thread, returns at once and never
    raises.
    """

    def begin(self, model_version: int) -> None: ...

    def responded(self, *, final: bool, error: str = "") -> None:
        """Record a response, or an error, before its caller gets it; the final one ends the
        trace."""
        ...

    def mark(self, name: str, at_ns: int | None = None) -> None:
        """Record a timestamp, `time.monotonic_ns()`; None is now."""
        ...

    def end(self, error: str = "") -> None:
        """End the trace of a refused request, which has no response."""
        ...

    def child(self, model_name: str, request_id: str) -> Trace | None:
        """Return the trace of a nested request to another model; None above their limit."""
        ...


class InferRequest(msgspec.Struct, frozen=True, eq=False):
    """One inference request, from a camera, a client or a model.

    Attributes:
        model_version: as the protocol spells it; empty is the highest READY version.
        inputs: tensors of full shape, batch dimension included.
        outputs: names of the requested outputs; empty means all.
        id: the caller's own id, echoed in the response.
        deadline: `time.monotonic()` after which the caller drops the response; None is never.
        urgent: runs before requests that are not: live frames before clients.
        priority: 1 is the highest; 0 means the default of the model's configuration.
        timeout_us: time limit in the queue, where the model allows requests to set one; 0 is unset.
        sequence: for models that keep state between requests.
        parameters: the caller's own, for models that read them; without the protocol's parameters.
        cancellation: None is never cancelled.
        trace: None where the request is not traced.
        on_device: the response's tensors may stay on the GPU where the model made them; otherwise
            they are on the host.
        replayed: another version has already responded, and this response is only compared with
            that one: no statistics count it.
    """

    model_name: str
    inputs: Mapping[str, Tensor]
    model_version: str = ""
    outputs: tuple[str, ...] = ()
    id: str = ""
    deadline: float | None = None
    urgent: bool = False
    priority: int = 0
    timeout_us: int = 0
    sequence: SequencePlace | None = None
    parameters: Parameters = NO_PARAMETERS
    cancellation: Cancellation | None = None
    trace: Trace | None = None
    on_device: bool = False
    replayed: bool = False

    @property
    def log_prefix(self) -> str:
        return log_prefix(self.id)

    @property
    def cancelled(self) -> bool:
        return self.cancellation is not None and self.cancellation.cancelled


def log_prefix(request_id: str) -> str:
    """Triton's `[request id: x] ` prefix of the error texts that carry it."""
    return f"[request id: {request_id or '<id_unknown>'}] "


class StepTiming(msgspec.Struct, frozen=True, gc=False):
    """The compute time of one model for one request."""

    model_name: str
    backend: str
    duration_ns: int


class InferResponse(msgspec.Struct, frozen=True, eq=False):
    """One response to an `InferRequest`.

    Attributes:
        outputs: in the order of the request, or of the configuration where the request names none.
        timings: one per model that ran, in order; an ensemble has several.
        parameters: the model's response parameters beside its tensors.
    """

    model_name: str
    model_version: str
    id: str
    outputs: Mapping[str, Tensor]
    timings: tuple[StepTiming, ...] = ()
    parameters: Parameters = NO_PARAMETERS


# Takes one response to a request, and whether that response is the last. An error is always the
# last; None marks only the end, and only decoupled models may send it. Called on any thread, never
# concurrently for one request. The callback returns at once, unless it holds a decoupled model
# back: a stream does so for some seconds while its client does not read, an ensemble with
# `max_inflight_requests` while its later steps are behind.
ResponseCallback = InferResponse | EdgeServerError | None
Respond = Callable[[ResponseCallback, bool], None]


class RetainedSnapshot(Protocol):
    """The right to use the models of a snapshot until `release`, which is called once."""

    def release(self) -> None: ...


class Reply(Generic[T]):
    """The responses to one request: its `respond`, which holds a lease until the last of them.

    A reply passes responses on to `then`, or keeps the last one for the thread that waits; what
    comes after the last one is dropped. An exception from `then` is logged, and reaches neither the
    model nor other callers.

    Attributes:
        response: the last one that was kept.
        count: the number of those kept.
    """

    __slots__ = ("_ended", "_lease", "_over", "_then", "count", "response")

    def __init__(
        self,
        lease: RetainedSnapshot | None = None,
        then: Callable[[T | EdgeServerError | None, bool], None] | None = None,
    ) -> None:
        self._lease = lease
        self._then = then
        self._ended = False
        self._over = threading.Event()
        self.response: T | EdgeServerError | None = None
        self.count = 0

    def __call__(
        self,
        response: T | EdgeServerError | None,
        final: bool,
        parameters: Parameters = NO_PARAMETERS,  # noqa: ARG002 - of an instance's responses
    ) -> None:
        if self._ended:
            return
        self._ended = final
        if final and self._lease is not None:
            self._lease.release()
        try:
            self._take(response, final)
        except Exception:
            log.exception("a response could not be given")
        if final:
            self._over.set()

    def _take(self, response: T | EdgeServerError | None, final: bool) -> None:
        if self._then is not None:
            self._then(response, final)
        elif response is not None:
            self.response = response
            self.count += 1

    def is_over(self, timeout_s: float) -> bool:
        """Whether the last response comes in that time."""
        return self._over.wait(timeout_s)

    def wait(self, request: InferRequest) -> T:
        """Return the response to `request`, or raise the error that the model responded with.

        Raises: DeadlineExceeded, Cancelled: none came before the deadline or the caller's
        cancellation.
        """
        if request.cancellation is not None and not self._over.is_set():
            # Also called once the request has its response, and then without effect.
            request.cancellation.when_cancelled(self._over.set)
        left_s = None if request.deadline is None else request.deadline - time.monotonic()
        if not self._over.wait(left_s):
            raise DeadlineExceeded("the request's deadline passed before its response")
        if self.response is None and request.cancelled:
            raise Cancelled("the caller cancelled the request")
        if self.response is None:
            raise InternalError(f"model '{request.model_name}' ended without a response")
        return self._kept(self.response)

    def only(self) -> T:
        """Return the single response; raise the error that came, or that there is not one."""
        if self.response is None or (
            self.count > 1 and not isinstance(self.response, EdgeServerError)
        ):
            raise InternalError(f"{self.count} responses, not one")
        return self._kept(self.response)

    @staticmethod
    def _kept(response: T | EdgeServerError) -> T:
        if isinstance(response, EdgeServerError):
            raise response
        return response
