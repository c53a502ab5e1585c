"""What goes through the one door, and what comes back.

One of each is made for every request: structs of msgspec, which are made in a tenth of the time
that a frozen dataclass takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from edge_server.errors import EdgeServerError

if TYPE_CHECKING:
    from edge_server.tensors import Tensor

Parameter = bool | int | float | str
Parameters = Mapping[str, Parameter]
NO_PARAMETERS: Parameters = MappingProxyType({})


class SequencePlace(msgspec.Struct, frozen=True):
    """Where a request stands in its sequence.

    Attributes:
        id: the correlation id; 0 and the empty string are none.
        start: it is the first of its sequence.
        end: it is the last.
    """

    id: int | str
    start: bool = False
    end: bool = False


class Cancellation(Protocol):
    """Whether the caller still wants its answer."""

    @property
    def cancelled(self) -> bool: ...

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the caller has gone, at once if it has; it may also be called
        when the caller has got its answer, and on any thread."""
        ...


class Trace(Protocol):
    """The moments of one request in one model; only a request that is traced has one.

    Names are Triton's. Every method may be called from any thread, returns at once and never
    raises.
    """

    def begin(self, model_version: int, respond: Respond) -> Respond:
        """The request goes to that version; what to call instead of `respond` from now on."""
        ...

    def mark(self, name: str, at_ns: int | None = None) -> None:
        """Keep a moment, `time.monotonic_ns()`; None is now."""
        ...

    def end(self) -> None:
        """The request is over: it was not taken, or has its last answer, which sees to that."""
        ...

    def child(self, model_name: str, request_id: str) -> Trace | None:
        """For a request that this one makes to another model; None where it has made too many."""
        ...


class InferRequest(msgspec.Struct, frozen=True, eq=False):
    """One inference, whoever asks for it.

    Attributes:
        model_version: as the protocol spells it; empty is the latest that is ready.
        inputs: full shapes, batch dimension included.
        outputs: names that are wanted; none means all.
        id: the caller's own, echoed.
        deadline: `time.monotonic()` after which nobody waits for the answer; None is never.
        urgent: goes before requests that are not: live frames before clients.
        priority: 1 is the highest; 0 leaves it to the model's configuration.
        timeout_us: how long it may queue where the model lets requests say so; 0 says nothing.
        sequence: for models that keep state between requests.
        parameters: the caller's own, for models that read them; the protocol's are not in it.
        cancellation: None is never cancelled.
        trace: None where its moments are not kept.
        on_device: the answer's tensors may stay where the model made them, on a GPU; without it
            they are on the host.
        replayed: another version has answered it already, and this answer is only compared with
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
        """Triton's `[request id: x] ` before the texts that carry it."""
        return f"[request id: {self.id or '<id_unknown>'}] "

    @property
    def cancelled(self) -> bool:
        return self.cancellation is not None and self.cancellation.cancelled


class StepTiming(NamedTuple):
    """How long one model computed for one request."""

    model_name: str
    backend: str
    duration_ns: int


class InferResponse(msgspec.Struct, frozen=True, eq=False):
    """One answer to an `InferRequest`.

    Attributes:
        outputs: in the order of the request, or of the configuration where it named none.
        timings: one per model that ran, in order; an ensemble has several.
        parameters: what the model says beside its tensors.
    """

    model_name: str
    model_version: str
    id: str
    outputs: Mapping[str, Tensor]
    timings: tuple[StepTiming, ...] = ()
    parameters: Parameters = NO_PARAMETERS


# Takes one answer of a request, and whether it was the last. An error is always the last; None is
# nothing but the end, which only a decoupled model may say. Called on any thread, never twice at
# once for one request. It returns at once, unless it holds a decoupled model back: a stream does so
# for some seconds while its client does not read, an ensemble with `max_inflight_requests` while
# its later steps are behind.
ResponseCallback = InferResponse | EdgeServerError | None
Respond = Callable[[ResponseCallback, bool], None]
