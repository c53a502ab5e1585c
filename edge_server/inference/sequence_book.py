"""Which sequence sits where, and which of its requests may run: no threads and no clock."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from edge_server.backends.contract import Tensors
    from edge_server.requests import SequencePlace

T = TypeVar("T")


class Slot(NamedTuple):
    """A seat; the lowest numbers are given away first, so that instances fill evenly."""

    number: int
    instance: int


@dataclass(frozen=True)
class WaitingRequest(Generic[T]):
    """A request that has not begun."""

    item: T
    place: SequencePlace


@dataclass(eq=False)
class Sequence(Generic[T]):
    """The requests of one correlation id, from its START to its END.

    A second START before an END begins anew in the same seat, after what came before it.

    Attributes:
        waiting: in the order in which they came.
        slot: None while it waits for one.
        running: its first request has begun and is not over.
        open: more requests may come.
        over_at: when its last request was over, in s.
        expires_at: when it gives up waiting for a slot, in s.
        states: what the scheduler carries from one of its requests to the next.
    """

    id: int | str
    waiting: deque[WaitingRequest[T]] = field(default_factory=deque)
    slot: Slot | None = None
    running: bool = False
    open: bool = True
    over_at: float = 0.0
    expires_at: float = inf
    states: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Expired(Generic[T]):
    """What a moment's expiry did.

    Attributes:
        items: requests whose sequence waited too long for a slot; they are not in the book now.
        instances: those that may have got something to run.
    """

    items: list[T]
    instances: set[int]


class SequenceBook(Generic[T]):
    """Seats sequences in the slots of instances and keeps each one's requests in order.

    At most one request of a sequence runs at a time. A sequence keeps its slot, and with it its
    instance, from its first request until the one with END is over, or until it is idle for too
    long; it is never idle while a request of it waits or runs. Sequences for which there is no
    slot wait whole, in the order in which they began; whoever asks for that sees to a bound.

    Args:
        slots: of each instance; they are made as they are needed.
        max_idle_s: after its last request was over.
    """

    def __init__(self, instances: int, slots: int, max_idle_s: float) -> None:
        self._max_idle_s = max_idle_s
        self._live: dict[int | str, Sequence[T]] = {}
        self._instances = instances
        # How many may be made yet, and those that have been used and are free: all of them come
        # before the ones to be made.
        self._unmade = instances * slots
        self._made = 0
        self._free: list[Slot] = []
        self._seated: list[dict[int, Sequence[T]]] = [{} for _ in range(instances)]
        self._backlog: deque[Sequence[T]] = deque()
        self._waiting = 0
        self._next_expiry = inf

    @property
    def waiting(self) -> int:
        """How many requests have not begun."""
        return self._waiting

    @property
    def free_slots(self) -> int:
        """How many sequences may begin at once."""
        return len(self._free) + self._unmade

    @property
    def next_expiry(self) -> float:
        """No sequence expires before this moment."""
        return self._next_expiry

    def is_live(self, sequence_id: int | str) -> bool:
        """Whether a request without START may join a sequence of that id."""
        return sequence_id in self._live

    def add(self, item: T, place: SequencePlace, now: float, timeout_s: float = inf) -> Sequence[T]:
        """Take a request in: into its sequence, or into a new one where none is live.

        Args:
            place: with START unless the id is live.
            timeout_s: how long its sequence may wait for a slot.
        """
        sequence = self._live.get(place.id)
        if sequence is None:
            if not place.start:
                raise AssertionError(f"sequence {place.id} is not live, and this is no START")
            sequence = self._live[place.id] = Sequence(place.id)
            slot = self._free_slot()
            if slot is not None:
                self._seat(sequence, slot)
            else:
                self._backlog.append(sequence)
        sequence.waiting.append(WaitingRequest(item, place))
        self._waiting += 1
        if place.end:
            self._shut(sequence)
        if sequence.slot is None:
            sequence.expires_at = min(sequence.expires_at, now + timeout_s)
            self._next_expiry = min(self._next_expiry, sequence.expires_at)
        return sequence

    def ready(self, instance: int) -> dict[int, Sequence[T]]:
        """Slot number → sequence of that instance whose first request may begin."""
        return {
            number: sequence
            for number, sequence in self._seated[instance].items()
            if sequence.waiting and not sequence.running
        }

    def begin(self, sequence: Sequence[T]) -> WaitingRequest[T]:
        """The first request of a ready sequence; it runs until `end`."""
        sequence.running = True
        self._waiting -= 1
        return sequence.waiting.popleft()

    def end(self, sequence: Sequence[T], now: float) -> None:
        """The request that had begun is over."""
        sequence.running = False
        sequence.over_at = now
        self._next_expiry = min(self._next_expiry, now + self._max_idle_s)
        self._free_if_over(sequence)

    def waiting_in(self) -> list[Sequence[T]]:
        """The sequences of which a request waits, with a slot or for one."""
        seated = (s for seats in self._seated for s in seats.values())
        return [s for s in (*seated, *self._backlog) if s.waiting]

    def drop(self, sequence: Sequence[T], index: int = 0) -> list[T]:
        """Take out a request that waits, and with it those of its sequence behind it.

        What follows would run on a state that lacks a step. A later START stays, for it begins
        anew; without one the sequence is over once those before `index` are.
        """
        waiting = list(sequence.waiting)
        end = index + 1
        while end < len(waiting) and not waiting[end].place.start:
            end += 1
        sequence.waiting = deque(waiting[:index] + waiting[end:])
        self._waiting -= end - index
        if end == len(waiting):
            self._shut(sequence)
        if sequence.slot is None and not sequence.waiting:
            self._backlog.remove(sequence)
        self._free_if_over(sequence)
        return [each.item for each in waiting[index:end]]

    def expire(self, now: float) -> Expired[T]:
        """End what is idle for too long, and what waited too long for a slot."""
        expired: Expired[T] = Expired([], set())
        if now < self._next_expiry:
            return expired
        late = [sequence for sequence in self._backlog if sequence.expires_at <= now]
        for sequence in late:
            self._backlog.remove(sequence)
            self._shut(sequence)
            expired.items.extend(self._empty(sequence))
        for instance, seated in enumerate(self._seated):
            for sequence in list(seated.values()):
                if self._idle_until(sequence) <= now:
                    self._shut(sequence)
                    self._free_if_over(sequence)
                    expired.instances.add(instance)
        self._next_expiry = min(
            (
                *(sequence.expires_at for sequence in self._backlog),
                *(self._idle_until(s) for seated in self._seated for s in seated.values()),
            ),
            default=inf,
        )
        return expired

    def clear(self) -> list[T]:
        """Take out every request that waits; every sequence is over when what runs is."""
        items: list[T] = []
        backlog, self._backlog = self._backlog, deque()
        for sequence in [*backlog, *(s for seated in self._seated for s in seated.values())]:
            self._shut(sequence)
            items += self._empty(sequence)
            self._free_if_over(sequence)
        return items

    def _idle_until(self, sequence: Sequence[T]) -> float:
        if sequence.waiting or sequence.running:
            return inf
        return sequence.over_at + self._max_idle_s

    def _shut(self, sequence: Sequence[T]) -> None:
        """Nothing joins it from now on; its id may begin another."""
        if sequence.open:
            sequence.open = False
            del self._live[sequence.id]

    def _empty(self, sequence: Sequence[T]) -> list[T]:
        items = [waiting.item for waiting in sequence.waiting]
        self._waiting -= len(items)
        sequence.waiting.clear()
        return items

    def _free_if_over(self, sequence: Sequence[T]) -> None:
        """Give the slot of a sequence that is over to the one that waits longest."""
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
        if not self._unmade:
            return None
        slot = Slot(*divmod(self._made, self._instances))
        self._made += 1
        self._unmade -= 1
        return slot

    def _seat(self, sequence: Sequence[T], slot: Slot) -> None:
        sequence.slot = slot
        self._seated[slot.instance][slot.number] = sequence
