"""What schedulers queue, batch and hand to an executor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from edge_server.errors import Cancelled, DeadlineExceeded, EdgeServerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.backends.contract import Tensors
    from edge_server.inference.snapshot import Snapshot
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import InferRequest, Respond


class Job:
    """One checked request on its way to an instance.

    Attributes:
        inputs: what the model gets; a scheduler may put its own tensors beside the request's.
        outputs: what is wanted of the model; likewise.
        batch_size: 0 where the model does not batch.
        queued_at_ns: `time.monotonic_ns()`.
        made: hears everything that the model made for it before its caller is answered; an
            `EdgeServerError` that it raises is the answer.
        padding: it only fills a row of a batch: nobody is answered and nothing is counted.
    """

    __slots__ = (
        "batch_size",
        "inputs",
        "made",
        "outputs",
        "padding",
        "queued_at_ns",
        "request",
        "respond",
        "snapshot",
    )

    def __init__(
        self, config: ModelConfig, request: InferRequest, snapshot: Snapshot, respond: Respond
    ) -> None:
        self.request = request
        self.snapshot = snapshot
        self.respond = respond
        self.inputs: Tensors = request.inputs
        self.outputs = frozenset(request.outputs) if request.outputs else config.output_names
        batched = config.max_batch_size > 0 and request.inputs
        self.batch_size = next(iter(request.inputs.values())).shape[0] if batched else 0
        self.queued_at_ns = time.monotonic_ns()
        if request.trace is not None:
            request.trace.mark("QUEUE_START", self.queued_at_ns)
        self.made: Callable[[Tensors], None] | None = None
        self.padding = False

    def death(self) -> EdgeServerError | None:
        """Why nobody waits for this any more; None where somebody does."""
        if self.request.cancelled:
            return Cancelled("")
        deadline = self.request.deadline
        if deadline is not None and time.monotonic() >= deadline:
            return DeadlineExceeded("the request's deadline passed before an instance was idle")
        return None
