"""The scheduling and warm-up parts of config.pbtxt in typed form."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.model_config.parse import datatype_of
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class QueuePolicy:
    """Time and size limits of the queue of one priority level; a time or size of 0 is none (then
    `MOST_WAITING` in `inference/line.py` counts). An expired request waits on behind all others
    where `delay_expired`; with `allow_timeout_override` it may ask for less time."""

    delay_expired: bool = False
    default_timeout_us: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclass(frozen=True)
class DynamicBatching:
    """The dynamic batcher, which runs requests of several callers together.

    Attributes:
        preferred_batch_sizes: a batch of the largest size reached runs at once, without delay.
        max_queue_delay_us: how long the oldest request waits for others to join it.
        priority_levels: 0 where there are none; 1 is the highest.
        default_priority_level: of a request that names none, or one that does not exist."""

    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policies: Mapping[int, QueuePolicy] = field(
        default_factory=lambda: MappingProxyType({})
    )


class ControlKind(Enum):
    """The meaning of a sequence batcher's control input."""

    START = "CONTROL_SEQUENCE_START"
    READY = "CONTROL_SEQUENCE_READY"
    END = "CONTROL_SEQUENCE_END"
    CORRID = "CONTROL_SEQUENCE_CORRID"


@dataclass(frozen=True)
class SequenceControl:
    """One control input, which requests do not carry and the scheduler adds: with the values for no
    and yes, None for CORRID, which carries the id."""

    input_name: str
    kind: ControlKind
    datatype: DataType
    false_true: tuple[float, float] | None


@dataclass(frozen=True)
class SequenceState:
    """A tensor that the scheduler carries from one request of a sequence to the next; -1 in
    `shape`, which has no batch dimension, is any size. `initial_file` is below the model's
    `initial_state/`; None is zeros."""

    input_name: str
    output_name: str
    datatype: DataType
    shape: tuple[int, ...]
    initial_shape: tuple[int, ...]
    initial_file: str | None = None


@dataclass(frozen=True)
class SequenceBatching:
    """The sequence batcher: requests of one sequence reach the same instance, in order.

    Attributes:
        max_candidate_sequences, preferred_batch_sizes: of the oldest strategy, which batches
            sequences dynamically, the longest waiting one first; 0 is direct: a sequence owns a
            slot of a batch until its end, and `minimum_slot_utilization` counts.
        iterative: a request is a sequence of runs, which its model ends."""

    max_sequence_idle_us: int
    controls: tuple[SequenceControl, ...]
    states: tuple[SequenceState, ...]
    max_queue_delay_us: int
    max_candidate_sequences: int = 0
    preferred_batch_sizes: tuple[int, ...] = ()
    minimum_slot_utilization: float = 0.0
    iterative: bool = False


@dataclass(frozen=True)
class WarmupInput:
    """One input of a warm-up sample, without the batch dimension: `random`, or of a `file` below
    the model's `warmup/`, else of zeros."""

    datatype: DataType
    shape: tuple[int, ...]
    random: bool = False
    file: str | None = None


@dataclass(frozen=True)
class Warmup:
    """One sample of `model_warmup`, which a model runs `count` times before it is READY; with a
    `batch_size` of 0 its inputs have no batch dimension."""

    name: str
    batch_size: int
    count: int
    inputs: Mapping[str, WarmupInput]


def dynamic_batching_of(message: Any) -> DynamicBatching | None:
    if message.WhichOneof("scheduling_choice") != "dynamic_batching":
        return None
    batching = message.dynamic_batching
    return DynamicBatching(
        preferred_batch_sizes=tuple(sorted(batching.preferred_batch_size)),
        max_queue_delay_us=batching.max_queue_delay_microseconds,
        preserve_ordering=batching.preserve_ordering,
        priority_levels=batching.priority_levels,
        default_priority_level=batching.default_priority_level,
        default_queue_policy=_queue_policy(batching.default_queue_policy),
        priority_queue_policies={
            level: _queue_policy(policy) for level, policy in batching.priority_queue_policy.items()
        },
    )


def sequence_batching_of(message: Any) -> SequenceBatching | None:
    if message.WhichOneof("scheduling_choice") != "sequence_batching":
        return None
    batching = message.sequence_batching
    strategy = batching.oldest if batching.HasField("oldest") else batching.direct
    return SequenceBatching(
        max_sequence_idle_us=batching.max_sequence_idle_microseconds,
        controls=tuple(
            _control(tensor.name, control)
            for tensor in batching.control_input
            for control in tensor.control
        ),
        states=tuple(map(_state, batching.state)),
        max_queue_delay_us=strategy.max_queue_delay_microseconds,
        max_candidate_sequences=batching.oldest.max_candidate_sequences,
        preferred_batch_sizes=tuple(sorted(batching.oldest.preferred_batch_size)),
        minimum_slot_utilization=batching.direct.minimum_slot_utilization,
        iterative=batching.iterative_sequence,
    )


def warmups_of(message: Any) -> tuple[Warmup, ...]:
    return tuple(
        Warmup(
            sample.name,
            sample.batch_size,
            sample.count or 1,
            {
                name: WarmupInput(
                    valid_datatype(tensor.data_type),
                    tuple(tensor.dims),
                    tensor.WhichOneof("input_data_type") == "random_data",
                    tensor.input_data_file or None,
                )
                for name, tensor in sample.inputs.items()
            },
        )
        for sample in message.model_warmup
    )


def _queue_policy(message: Any) -> QueuePolicy:
    return QueuePolicy(
        delay_expired=message.timeout_action == pb.ModelQueuePolicy.DELAY,
        default_timeout_us=message.default_timeout_microseconds,
        allow_timeout_override=message.allow_timeout_override,
        max_queue_size=message.max_queue_size,
    )


def _control(input_name: str, control: Any) -> SequenceControl:
    kind = ControlKind(pb.ModelSequenceBatching.Control.Kind.Name(control.kind))
    if kind is ControlKind.CORRID:
        return SequenceControl(input_name, kind, valid_datatype(control.data_type), None)
    for values, datatype in (
        (control.int32_false_true, DataType.INT32),
        (control.fp32_false_true, DataType.FP32),
        (control.bool_false_true, DataType.BOOL),
    ):
        if values:
            return SequenceControl(input_name, kind, datatype, (values[0], values[1]))
    raise AssertionError(f"{input_name}: validation lets no control without values through")


def _state(state: Any) -> SequenceState:
    shape = tuple(state.dims)
    initial_shape, file = tuple(1 if size == -1 else size for size in shape), None
    if state.initial_state:
        initial_shape = tuple(state.initial_state[0].dims)
        file = state.initial_state[0].data_file or None
    datatype = valid_datatype(state.data_type)
    return SequenceState(state.input_name, state.output_name, datatype, shape, initial_shape, file)


def valid_datatype(number: int) -> DataType:
    datatype = datatype_of(number)
    if datatype is None:
        raise AssertionError(f"{number}: validation lets no such data type through")
    return datatype
