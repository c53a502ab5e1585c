"""What goes through the one door, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.tensors import Tensor


@dataclass(frozen=True, eq=False)
class InferRequest:
    """One inference, whoever asks for it.

    Attributes:
        model_version: as the protocol spells it; empty is the latest that is ready.
        inputs: full shapes, batch dimension included.
        outputs: names that are wanted; none means all.
        id: the caller's own, echoed.
        deadline: `time.monotonic()` after which nobody waits for the answer; None is never.
        urgent: goes before requests that are not: live frames before clients.
    """

    model_name: str
    inputs: Mapping[str, Tensor]
    model_version: str = ""
    outputs: tuple[str, ...] = ()
    id: str = ""
    deadline: float | None = None
    urgent: bool = False

    @property
    def log_prefix(self) -> str:
        """Triton's `[request id: x] ` before the texts that carry it."""
        return f"[request id: {self.id or '<id_unknown>'}] "


@dataclass(frozen=True)
class StepTiming:
    """How long one model computed for one request."""

    model_name: str
    backend: str
    duration_ns: int


@dataclass(frozen=True, eq=False)
class InferResponse:
    """The answer to one `InferRequest`.

    Attributes:
        outputs: in the order of the request, or of the configuration where it named none.
        timings: one per model that ran, in order; an ensemble has several.
    """

    model_name: str
    model_version: str
    id: str
    outputs: Mapping[str, Tensor]
    timings: tuple[StepTiming, ...] = field(default=())
