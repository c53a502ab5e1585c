"""The rules for `dynamic_batching` and `response_cache`; the texts are Triton's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def batching_faults(message: Any) -> Iterator[str]:
    """Yield the faults of a completed configuration's dynamic batcher, where it has one."""
    if message.WhichOneof("scheduling_choice") != "dynamic_batching":
        return
    model, batching = message.name, message.dynamic_batching
    yield from preferred_size_faults("dynamic", batching.preferred_batch_size, message)
    levels = batching.priority_levels
    if levels:
        if not 1 <= batching.default_priority_level <= levels:
            yield f"default priority level must be in range [1, {levels}] for {model}"
        if not all(1 <= level <= levels for level in batching.priority_queue_policy):
            yield (
                f"priority queue policy must have priority level in range [1, {levels}] for {model}"
            )
    if batching.preserve_ordering:
        if levels > 1:
            yield (
                f"Only one priority level is allowed when 'preserve_ordering' is true for {model}"
            )
        policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
        if any(map(_delays, policies)):
            yield (
                "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is "
                f"true for {model}"
            )


def _delays(policy: Any) -> bool:
    # Without a timeout on the model no request ever expires.
    delay = policy.timeout_action == pb.ModelQueuePolicy.DELAY
    return bool(delay and policy.default_timeout_microseconds)


def preferred_size_faults(batcher: str, sizes: Sequence[int], message: Any) -> Iterator[str]:
    """Yield the faults of the preferred batch sizes of a `dynamic` or `sequence` batcher."""
    what = "dynamic batching preferred size"
    if batcher == "sequence":
        what = "sequence batching preferred batch size"
    if any(size < 1 for size in sizes):
        yield f"{what} must be positive for {message.name}"
    if any(size > message.max_batch_size for size in sizes):
        yield f"{what} must be <= max batch size for {message.name}"


def cache_faults(message: Any) -> Iterator[str]:
    """Refuse the cache for responses that depend on more than the request's inputs."""
    if not message.response_cache.enable:
        return
    support = f"Response Cache does not currently support model {message.name} with"
    remedy = "Please disable the response cache."
    if message.WhichOneof("scheduling_choice") == "sequence_batching":
        yield f"{support} sequence batching scheduler. {remedy}"
    if message.model_transaction_policy.decoupled:
        yield f"{support} 'decoupled' transaction policy. {remedy}"
