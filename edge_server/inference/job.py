"""The job that schedulers queue, batch and hand to an executor."""

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
        inputs: the model's inputs; a scheduler may add its own tensors to the request's.
        outputs: names of the outputs wanted from the model; a scheduler may add its own.
        batch_size: 0 where the model does not batch.
        queued_at_ns: `time.monotonic_ns()`.
        made: called with all outputs of the model before the caller gets its response; an
            `EdgeServerError` that it raises becomes the response.
        padding: the job only fills a row of a batch: it has no response and is not counted.
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
        """Return the error of a cancelled or overdue request; None while the caller waits."""
        if self.request.cancelled:
            return Cancelled("")
        deadline = self.request.deadline
        if deadline is not None and time.monotonic() >= deadline:
            return DeadlineExceeded("the request's deadline passed before an instance was idle")
        return None
