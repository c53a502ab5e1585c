"""What the sequence batcher keeps: slots, the order of requests, and the tensors that it adds."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from edge_server.errors import InternalError, InvalidRequest, ModelConfigError
from edge_server.model_config.files import INITIAL_STATE_DIRECTORY, reading
from edge_server.model_config.scheduling import ControlKind
from edge_server.tensors import DataType, Tensor, first_tensor, shape_fits, shape_text, zeros

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from pathlib import Path

    from edge_server.backends.contract import Tensors
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.scheduling import SequenceControl, SequenceState
    from edge_server.requests import SequencePlace

T = TypeVar("T")


class Slot(NamedTuple):
    # The lowest numbers are given out first, so that instances fill evenly.
    number: int
    instance: int


@dataclass(frozen=True)
class WaitingRequest(Generic[T]):
    item: T
    place: SequencePlace


@dataclass(eq=False)
class BookedSequence(Generic[T]):
    """The requests of one correlation id, from its START to its END; a second START before an END
    begins anew in the same slot, after the earlier requests. A `generated` id is the server's
    own."""

    id: int | str
    waiting: deque[WaitingRequest[T]] = field(default_factory=deque)
    slot: Slot | None = None
    running: bool = False
    open: bool = True
    generated: bool = False
    over_at: float = 0.0
    expires_at: float = inf
    states: Tensors = field(default_factory=dict)


class SequenceBook(Generic[T]):
    """Assigns sequences to the slots of instances and keeps each one's requests in order.

    At most one request of a sequence runs at a time. A sequence keeps its slot, and with it its
    instance, from its first request until the one with END is over, or until it is idle for too
    long. Sequences without a slot wait as a whole, in the order in which they began; the caller
    bounds their number."""

    def __init__(self, instances: int, slots: int, max_idle_s: float) -> None:
        self._max_idle_s = max_idle_s
        self._live: dict[int | str, BookedSequence[T]] = {}
        self._instances = instances
        self._slots = instances * slots
        # The number of slots made so far, and the free ones among them, which come before new ones.
        self._made = 0
        self._free: list[Slot] = []
        self._seated: list[dict[int, BookedSequence[T]]] = [{} for _ in range(instances)]
        self._backlog: deque[BookedSequence[T]] = deque()
        # The number of requests that have not begun.
        self.waiting = 0
        # A lower bound of the next expiry of any sequence.
        self.next_expiry = inf

    def is_live(self, sequence_id: int | str) -> bool:
        return sequence_id in self._live

    def is_taken(self, place: SequencePlace) -> bool:
        """Whether another's live sequence has the id of `place` from the server."""
        live = self._live.get(place.id)
        return live is not None and (live.generated or place.generated)

    def add(
        self, item: T, place: SequencePlace, now: float, timeout_s: float = inf
    ) -> BookedSequence[T]:
        """Add a request to its sequence, or at START to a new one, which may wait `timeout_s` for a
        slot.
        """
        sequence = self._live.get(place.id)
        if sequence is None:
            sequence = BookedSequence(place.id, generated=place.generated)
            self._live[place.id] = sequence
            slot = self._free_slot()
            if slot is not None:
                self._seat(sequence, slot)
            else:
                self._backlog.append(sequence)
        sequence.waiting.append(WaitingRequest(item, place))
        self.waiting += 1
        if place.end:
            self._shut(sequence)
        if sequence.slot is None:
            sequence.expires_at = min(sequence.expires_at, now + timeout_s)
            self.next_expiry = min(self.next_expiry, sequence.expires_at)
        return sequence

    def ready(self, instance: int) -> dict[int, BookedSequence[T]]:
        """Slot number → sequence of that instance whose first request may begin."""
        return {
            number: sequence
            for number, sequence in self._seated[instance].items()
            if sequence.waiting and not sequence.running
        }

    def begin(self, sequence: BookedSequence[T]) -> WaitingRequest[T]:
        """Take the first request of a ready sequence; the request runs until `end`."""
        sequence.running = True
        self.waiting -= 1
        return sequence.waiting.popleft()

    def end(self, sequence: BookedSequence[T], now: float) -> None:
        sequence.running = False
        sequence.over_at = now
        self.next_expiry = min(self.next_expiry, now + self._max_idle_s)
        self._free_if_over(sequence)

    def again(self, sequence: BookedSequence[T], item: T, place: SequencePlace) -> None:
        sequence.waiting.append(WaitingRequest(item, place))
        self.waiting += 1

    def close(self, sequence: BookedSequence[T]) -> None:
        self._shut(sequence)
        self._free_if_over(sequence)

    def waiting_in(self) -> list[BookedSequence[T]]:
        seated = (s for seats in self._seated for s in seats.values())
        return [s for s in (*seated, *self._backlog) if s.waiting]

    def drop(self, sequence: BookedSequence[T], index: int = 0) -> list[T]:
        """Remove and return a waiting request and those of its sequence behind it, which would run
        on a state that lacks a step. A later START stays, because it begins anew; without one the
        sequence is over once the requests before `index` are."""
        waiting = list(sequence.waiting)
        end = index + 1
        while end < len(waiting) and not waiting[end].place.start:
            end += 1
        sequence.waiting = deque(waiting[:index] + waiting[end:])
        self.waiting -= end - index
        if end == len(waiting):
            self._shut(sequence)
        if sequence.slot is None and not sequence.waiting:
            self._backlog.remove(sequence)
        self._free_if_over(sequence)
        return [each.item for each in waiting[index:end]]

    def expire(self, now: float) -> tuple[list[T], set[int]]:
        """End sequences that were idle, or waited for a slot, for too long.

        Returns the requests of the latter, and the instances that may have got a request to run.
        """
        items: list[T] = []
        instances: set[int] = set()
        if now < self.next_expiry:
            return items, instances
        late = [sequence for sequence in self._backlog if sequence.expires_at <= now]
        for sequence in late:
            self._backlog.remove(sequence)
            self._shut(sequence)
            items += self._empty(sequence)
        for instance, seated in enumerate(self._seated):
            for sequence in list(seated.values()):
                if self._idle_until(sequence) <= now:
                    self._shut(sequence)
                    self._free_if_over(sequence)
                    instances.add(instance)
        self.next_expiry = min(
            (
                *(sequence.expires_at for sequence in self._backlog),
                *(self._idle_until(s) for seated in self._seated for s in seated.values()),
            ),
            default=inf,
        )
        return items, instances

    def clear(self) -> list[T]:
        """Remove every waiting request; each sequence is over when its running request is."""
        items: list[T] = []
        backlog, self._backlog = self._backlog, deque()
        for sequence in [*backlog, *(s for seated in self._seated for s in seated.values())]:
            self._shut(sequence)
            items += self._empty(sequence)
            self._free_if_over(sequence)
        return items

    def _idle_until(self, sequence: BookedSequence[T]) -> float:
        if sequence.waiting or sequence.running:
            return inf
        return sequence.over_at + self._max_idle_s

    def _shut(self, sequence: BookedSequence[T]) -> None:
        if sequence.open:
            sequence.open = False
            del self._live[sequence.id]

    def _empty(self, sequence: BookedSequence[T]) -> list[T]:
        items = [waiting.item for waiting in sequence.waiting]
        self.waiting -= len(items)
        sequence.waiting.clear()
        return items

    def _free_if_over(self, sequence: BookedSequence[T]) -> None:
        """Give the slot of a finished sequence to the one that has waited longest."""
        slot = sequence.slot
        if slot is None or sequence.open or sequence.waiting or sequence.running:
            return
        sequence.slot = None
        del self._seated[slot.instance][slot.number]
        if self._backlog:
            self._seat(self._backlog.popleft(), slot)
        else:
            heapq.heappush(self._free, slot)

    def _free_slot(self) -> Slot | None:
        if self._free:
            return heapq.heappop(self._free)
        if self._made == self._slots:
            return None
        self._made += 1
        return Slot(*divmod(self._made - 1, self._instances))

    def _seat(self, sequence: BookedSequence[T], slot: Slot) -> None:
        sequence.slot = slot
        self._seated[slot.instance][slot.number] = sequence


class Head(NamedTuple):
    """The first request of a sequence that may run; those of equal `form` can be joined."""

    slot: int
    came_at: float
    form: Hashable


class Choice(NamedTuple):
    """The rows of a batch, None for one of padding; or, without any, how long to wait for further
    requests.
    """

    batch: Sequence[Head | None]
    wait_s: float = 0.0


@dataclass(frozen=True)
class DirectStrategy:
    """Gives each sequence a batch row for its lifetime. The batch extends to the highest row with a
    request; rows without one are padding, as are those whose request cannot be joined with the
    oldest. While a smaller share of the rows than `min_utilization` has a request, the oldest one
    waits for others, at most `delay_s`."""

    rows: int
    min_utilization: float
    delay_s: float

    def choose(self, heads: Sequence[Head], now: float) -> Choice:
        oldest = min(heads, key=lambda head: head.came_at)
        if len(heads) < self.min_utilization * self.rows:
            wait_s = oldest.came_at + self.delay_s - now
            if wait_s > 0:
                return Choice((), wait_s)
        rows = {head.slot: head for head in heads if head.form == oldest.form}
        return Choice([rows.get(row) for row in range(max(rows) + 1)])


@dataclass(frozen=True)
class OldestStrategy:
    """Runs the oldest requests together, in any row. A batch that reaches the largest possible
    preferred size runs at once; so does one that cannot grow. Any other waits until its oldest
    request has waited `delay_s`. Batches of one instance run oldest first, so responses leave in
    order, whether `preserve_ordering` is set or not."""

    max_batch: int
    preferred: tuple[int, ...]
    delay_s: float

    def choose(self, heads: Sequence[Head], now: float) -> Choice:
        by_age = sorted(heads, key=lambda head: head.came_at)
        first = by_age[0]
        batch = list(takewhile(lambda head: head.form == first.form, by_age))[: self.max_batch]
        preferred = max((size for size in self.preferred if size <= len(batch)), default=0)
        if preferred:
            return Choice(batch[:preferred])
        can_grow = len(batch) == len(heads) < self.max_batch
        wait_s = first.came_at + self.delay_s - now
        if can_grow and wait_s > 0:
            return Choice((), wait_s)
        return Choice(batch)


class SequenceControls:
    """Makes a model's control tensors: of shape [1, 1] where it batches, [1] where it does not.
    `largest_id` is the largest that INT64 and the model's CORRID input can hold."""

    def __init__(self, config: ModelConfig, controls: tuple[SequenceControl, ...]) -> None:
        self._model = config.name
        self._shape = (1, 1) if config.max_batch_size > 0 else (1,)
        self._flags = [
            (
                control.input_name,
                control.kind,
                [Tensor(np.full(self._shape, value, control.datatype.numpy)) for value in values],
            )
            for control in controls
            if (values := control.false_true) is not None
        ]
        self._ids = [control for control in controls if control.kind is ControlKind.CORRID]
        numbers = [each.datatype.numpy for each in self._ids if each.datatype is not DataType.BYTES]
        self.largest_id = min([2**63 - 1, *(int(np.iinfo(each).max) for each in numbers)])

    def check(self, sequence_id: int | str) -> None:
        for control in self._ids:
            self._id_tensor(control, sequence_id)

    def of(self, place: SequencePlace | None) -> dict[str, Tensor]:
        """The control tensors of a request; None is a row without one: nothing starts, is ready or
        ends.
        """
        flags = {
            ControlKind.START: place is not None and place.start,
            ControlKind.READY: place is not None,
            ControlKind.END: place is not None and place.end,
        }
        tensors = {name: values[flags[kind]] for name, kind, values in self._flags}
        for control in self._ids:
            tensors[control.input_name] = self._id_tensor(
                control, None if place is None else place.id
            )
        return tensors

    def _id_tensor(self, control: SequenceControl, sequence_id: int | str | None) -> Tensor:
        dtype = control.datatype.numpy
        if control.datatype is DataType.BYTES:
            text = "" if sequence_id is None else str(sequence_id)
            return Tensor(np.array([text.encode()], dtype).reshape(self._shape))
        number = 0 if sequence_id is None else sequence_id
        must = f"inference request for sequence {number} to model '{self._model}' must specify"
        if isinstance(number, str):
            raise InvalidRequest(
                f"{must} an integer as correlation ID: its input '{control.input_name}' takes "
                f"{control.datatype.value}"
            )
        limits = np.iinfo(dtype)
        if not limits.min <= number <= limits.max:
            raise InvalidRequest(
                f"{must} a correlation ID that fits {control.datatype.value}, the type of its "
                f"input '{control.input_name}'"
            )
        return Tensor(np.full(self._shape, number, dtype))


class SequenceStates:
    """The states of a model: output tensors of one request that are inputs of the next one."""

    def __init__(
        self, config: ModelConfig, states: tuple[SequenceState, ...], directory: Path
    ) -> None:
        self._config = config
        self._states = states
        self._batch = (1,) if config.max_batch_size > 0 else ()
        self.initial: Tensors = {
            state.input_name: self._initial(state, directory) for state in states
        }
        self.output_names = frozenset(state.output_name for state in states)

    def after(self, made: Tensors) -> Tensors:
        """The states for the sequence's next request, from the outputs of this run.

        Raises: InternalError: a state is missing, or is not of the configured type and shape.
        """
        return {state.input_name: self._next(state, made) for state in self._states}

    def _next(self, state: SequenceState, made: Tensors) -> Tensor:
        where = f"model '{self._config.name}': state output '{state.output_name}'"
        tensor = made.get(state.output_name)
        if tensor is None:
            raise InternalError(f"{where} is missing; it gave: {', '.join(made)}")
        expected = (*self._batch, *state.shape)
        if tensor.datatype is not state.datatype or not shape_fits(tensor.shape, expected):
            raise InternalError(
                f"{where} is {tensor.datatype.value} {shape_text(tensor.shape)}, expected "
                f"{state.datatype.value} {shape_text(expected)}"
            )
        # A copy: a row of a batch would keep the whole batch alive as long as the sequence.
        return Tensor(tensor.array.copy())

    def _initial(self, state: SequenceState, directory: Path) -> Tensor:
        shape = state.initial_shape
        array = zeros(state.datatype, shape)
        if state.initial_file is not None:
            path = directory / INITIAL_STATE_DIRECTORY / state.initial_file
            with reading(path):
                raw = path.read_bytes()
            data, expected = first_tensor(raw, state.datatype, shape)
            if data is None or expected != len(raw):
                raise ModelConfigError(
                    f"{path}: holds {len(raw)} bytes, {state.datatype.config_name} "
                    f"{shape_text(shape)} needs {expected}"
                )
            array = data
        return Tensor(array.reshape((*self._batch, *shape)))
