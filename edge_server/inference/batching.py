"""The batching rule: which queued requests run together, and when; no clock and no thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_server.backends.contract import Tensors
    from edge_server.inference.execution import Job
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.scheduling import DynamicBatching


@dataclass(frozen=True)
class OpenBatch:
    """The next batch as of now.

    Attributes:
        count: number of requests it takes from the head of the queue; 0 for an empty batch.
        due_ns: when the batch runs if no request joins before; in the past where it is overdue.
    """

    count: int
    due_ns: int


class BatchRule:
    """Requests join a batch in order until one does not fit.

    A batch is due when it reaches a preferred size, cannot grow, or its oldest request has waited
    for the maximum delay. A request fits if it has the same inputs, with the same shapes except for
    the batch dimension, and the batch stays within `max_batch_size`. Requests are never split.
    """

    def __init__(self, config: ModelConfig, batching: DynamicBatching) -> None:
        self._max_size = max(1, config.max_batch_size)
        self._preferred = frozenset(batching.preferred_batch_sizes or [self._max_size])
        self._most_preferred = max(self._preferred)
        self._delay_ns = 1000 * batching.max_queue_delay_us
        # With fixed shapes and required inputs only, the request check has compared the requests.
        self._alike_by_config = all(
            not spec.optional and -1 not in spec.shape for spec in config.inputs
        )

    def batch(self, line: Iterable[Job], now_ns: int) -> OpenBatch:
        """The batch at the head of `line` at `now_ns` (`time.monotonic_ns()`)."""
        first: Job | None = None
        count = size = preferred_count = 0
        oldest_ns = now_ns
        can_grow = True
        for job in line:
            job_size = max(1, job.batch_size)
            if first is None:
                first = job
            elif size + job_size > self._max_size or not self._alike(first, job):
                can_grow = False
                break
            count += 1
            size += job_size
            oldest_ns = min(oldest_ns, job.queued_at_ns)
            if size in self._preferred:
                preferred_count = count
            if size >= self._max_size:
                break
        due_ns = oldest_ns + self._delay_ns
        if self._delay_ns and due_ns <= now_ns:
            return OpenBatch(count, due_ns)
        if preferred_count:
            return OpenBatch(preferred_count, now_ns)
        if not can_grow or size >= self._most_preferred:
            return OpenBatch(count, now_ns)
        return OpenBatch(count, due_ns)

    def _alike(self, one: Job, other: Job) -> bool:
        return self._alike_by_config or _alike(one.inputs, other.inputs)


def _alike(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        tensor.shape[1:] == other[name].shape[1:] for name, tensor in one.items()
    )
