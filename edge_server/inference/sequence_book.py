"""The book of sequences: slots and the requests that may run; no threads and no clock."""

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
    """A slot; the lowest numbers are given out first, so that instances fill evenly."""

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

    A second START before an END begins anew in the same slot, after the earlier requests.

    Attributes:
        waiting: in order of arrival.
        slot: None while the sequence waits for one.
        running: its first request has begun and is not over.
        open: more requests may come.
        over_at: when its last request was over, in s.
        expires_at: when the sequence gives up waiting for a slot, in s.
        states: state tensors that the scheduler carries from one request to the next.
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
    """The result of `SequenceBook.expire`.

    Attributes:
        items: requests of sequences that waited too long for a slot; the book has dropped them.
        instances: instances that may have got a request to run.
    """

    items: list[T]
    instances: set[int]


class SequenceBook(Generic[T]):
    """Assigns sequences to the slots of instances and keeps each one's requests in order.

    At most one request of a sequence runs at a time. A sequence keeps its slot, and with it its
    instance, from its first request until the one with END is over, or until it is idle for too
    long; a sequence with a waiting or running request is never idle. Sequences without a slot wait
    as a whole, in the order in which they began; the caller bounds their number.

    Args:
        slots: number per instance; slots are made on demand.
        max_idle_s: time after the sequence's last request was over.
    """

    def __init__(self, instances: int, slots: int, max_idle_s: float) -> None:
        self._max_idle_s = max_idle_s
        self._live: dict[int | str, Sequence[T]] = {}
        self._instances = instances
        # The number of slots still to be made, and the free slots that have been used: all of the
        # latter come before new ones.
        self._unmade = instances * slots
        self._made = 0
        self._free: list[Slot] = []
        self._seated: list[dict[int, Sequence[T]]] = [{} for _ in range(instances)]
        self._backlog: deque[Sequence[T]] = deque()
        self._waiting = 0
        self._next_expiry = inf

    @property
    def waiting(self) -> int:
        """The number of requests that have not begun."""
        return self._waiting

    @property
    def free_slots(self) -> int:
        """The number of sequences that may begin at once."""
        return len(self._free) + self._unmade

    @property
    def next_expiry(self) -> float:
        """A lower bound of the next expiry of any sequence."""
        return self._next_expiry

    def is_live(self, sequence_id: int | str) -> bool:
        """Whether a request without START may join a sequence of that id."""
        return sequence_id in self._live

    def add(self, item: T, place: SequencePlace, now: float, timeout_s: float = inf) -> Sequence[T]:
        """Add a request to its sequence, or to a new one where none is live.

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
        """Take the first request of a ready sequence; the request runs until `end`."""
        sequence.running = True
        self._waiting -= 1
        return sequence.waiting.popleft()

    def end(self, sequence: Sequence[T], now: float) -> None:
        """End the running request of `sequence`."""
        sequence.running = False
        sequence.over_at = now
        self._next_expiry = min(self._next_expiry, now + self._max_idle_s)
        self._free_if_over(sequence)

    def waiting_in(self) -> list[Sequence[T]]:
        """The sequences with a waiting request, whether they have a slot or not."""
        seated = (s for seats in self._seated for s in seats.values())
        return [s for s in (*seated, *self._backlog) if s.waiting]

    def drop(self, sequence: Sequence[T], index: int = 0) -> list[T]:
        """Remove a waiting request and those of its sequence behind it, and return them.

        The later requests would run on a state that lacks a step. A later START stays, because it
        begins anew; without one the sequence is over once the requests before `index` are.
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
        """End sequences that were idle, or waited for a slot, for too long."""
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
        """Remove every waiting request; each sequence is over when its running request is."""
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
        """Close the sequence to new requests; its id may begin another."""
        if sequence.open:
            sequence.open = False
            del self._live[sequence.id]

    def _empty(self, sequence: Sequence[T]) -> list[T]:
        items = [waiting.item for waiting in sequence.waiting]
        self._waiting -= len(items)
        sequence.waiting.clear()
        return items

    def _free_if_over(self, sequence: Sequence[T]) -> None:
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
        if not self._unmade:
            return None
        slot = Slot(*divmod(self._made, self._instances))
        self._made += 1
        self._unmade -= 1
        return slot

    def _seat(self, sequence: Sequence[T], slot: Slot) -> None:
        sequence.slot = slot
        self._seated[slot.instance][slot.number] = sequence
