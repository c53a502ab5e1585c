"""Sequences keep their slot and their order; what waits is never lost, nor refused twice."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge_server.inference.sequence_book import BookedSequence, SequenceBook
from edge_server.requests import SequencePlace

INSTANCES, SLOTS, IDLE_S = 2, 2, 10.0

START, NEXT, END, ONLY = (
    SequencePlace(7, start=True),
    SequencePlace(7),
    SequencePlace(7, end=True),
    SequencePlace(7, start=True, end=True),
)


def begun(book: SequenceBook[str], instance: int = 0) -> list[str]:
    return [book.begin(sequence).item for sequence in book.ready(instance).values()]


def free_slots(book: SequenceBook[Any]) -> int:
    return len(book._free) + book._slots - book._made


def start(book: SequenceBook[str], *ids: int, now: float = 0.0) -> list[BookedSequence[str]]:
    return [book.add(f"{i}", SequencePlace(i, start=True), now) for i in ids]


def test_a_request_begins_when_the_one_before_it_is_over() -> None:
    book: SequenceBook[str] = SequenceBook(1, 1, IDLE_S)
    sequence = book.add("a", START, 0)
    book.add("b", NEXT, 0)
    assert begun(book) == ["a"]
    assert begun(book) == []
    book.end(sequence, 0)
    assert begun(book) == ["b"]


def test_sequences_spread_over_instances_before_they_share_one() -> None:
    book: SequenceBook[str] = SequenceBook(2, 2, IDLE_S)
    slots = [sequence.slot for sequence in start(book, 1, 2, 3)]
    assert [slot.instance for slot in slots if slot] == [0, 1, 0]
    assert [slot.number for slot in slots if slot] == [0, 0, 1]


def test_an_end_frees_the_slot_for_the_sequence_that_waits_longest() -> None:
    book: SequenceBook[str] = SequenceBook(1, 1, IDLE_S)
    first = book.add("a", ONLY, 0)
    second, third = start(book, 1, 2)
    assert (second.slot, third.slot) == (None, None)
    assert begun(book) == ["a"]
    book.end(first, 0)
    assert second.slot is not None
    assert third.slot is None
    assert begun(book) == ["1"]


def test_a_start_on_a_live_id_runs_in_the_same_slot_after_what_came_before() -> None:
    book: SequenceBook[str] = SequenceBook(1, 2, IDLE_S)
    sequence = book.add("a", START, 0)
    assert book.add("b", START, 0) is sequence
    assert begun(book) == ["a"]
    book.end(sequence, 0)
    assert begun(book) == ["b"]


def test_an_id_may_begin_anew_while_its_ended_sequence_still_runs() -> None:
    book: SequenceBook[str] = SequenceBook(1, 2, IDLE_S)
    ended = book.add("a", ONLY, 0)
    assert not book.is_live(7)
    assert book.add("b", START, 0) is not ended


def test_idle_begins_when_the_last_response_is_given() -> None:
    book: SequenceBook[str] = SequenceBook(1, 1, IDLE_S)
    sequence = book.add("a", START, 0)
    book.expire(100)
    assert book.is_live(7)
    begun(book)
    book.expire(200)
    assert book.is_live(7)
    book.end(sequence, 200)
    book.expire(200 + IDLE_S - 1)
    assert book.is_live(7)
    assert book.expire(200 + IDLE_S)[1] == {0}
    assert not book.is_live(7)
    (later,) = start(book, 8)
    assert later.slot is not None


def test_a_sequence_without_a_slot_waits_no_longer_than_its_requests_timeout() -> None:
    book: SequenceBook[str] = SequenceBook(1, 1, IDLE_S)
    start(book, 1)
    book.add("a", START, 0, timeout_s=5)
    book.add("b", NEXT, 1)
    assert book.expire(4)[0] == []
    assert book.expire(5)[0] == ["a", "b"]
    assert not book.is_live(7)
    assert book.waiting == 1


def test_a_timeout_ends_with_the_wait_for_a_slot() -> None:
    book: SequenceBook[str] = SequenceBook(1, 1, IDLE_S)
    book.add("a", START, 0, timeout_s=5)
    assert book.expire(6)[0] == []


def test_a_dropped_request_takes_its_sequence_with_it_and_frees_the_slot() -> None:
    book: SequenceBook[str] = SequenceBook(1, 1, IDLE_S)
    sequence = book.add("a", START, 0)
    book.add("b", NEXT, 0)
    (other,) = start(book, 1)
    assert book.drop(sequence) == ["a", "b"]
    assert not book.is_live(7)
    assert other.slot is not None


def test_a_dropped_request_spares_the_sequence_that_starts_after_it() -> None:
    book: SequenceBook[str] = SequenceBook(1, 1, IDLE_S)
    sequence = book.add("a", START, 0)
    book.add("b", NEXT, 0)
    book.add("c", START, 0)
    assert book.drop(sequence) == ["a", "b"]
    assert book.is_live(7)
    assert begun(book) == ["c"]


def test_clear_takes_out_what_waits_and_leaves_what_runs() -> None:
    book: SequenceBook[str] = SequenceBook(1, 1, IDLE_S)
    sequence = book.add("a", START, 0)
    begun(book)
    book.add("b", NEXT, 0)
    start(book, 1)
    assert book.clear() == ["1", "b"]
    assert book.waiting == 0
    book.end(sequence, 0)
    assert begun(book) == []


@dataclass(eq=False)
class Item:
    """A request as the machine below sees it: `group` is what a START has begun."""

    group: int
    number: int


class Book(RuleBasedStateMachine):
    """Callers, instances and time do what they like; the book's promises hold."""

    def __init__(self) -> None:
        super().__init__()
        self.book: SequenceBook[Item] = SequenceBook(INSTANCES, SLOTS, IDLE_S)
        self.now = 0.0
        self.groups = 0
        self.numbers = 0
        self.group_of: dict[int, int] = {}
        self.waiting: set[Item] = set()
        self.running: dict[BookedSequence[Item], Item] = {}
        self.begun: dict[int, list[int]] = defaultdict(list)
        self.instance_of: dict[int, int] = {}
        self.dropped: dict[int, int] = {}

    @rule(
        corrid=st.integers(1, 7),
        start=st.booleans(),
        end=st.booleans(),
        timeout_s=st.sampled_from([float("inf"), 3.0]),
    )
    def add(self, corrid: int, start: bool, end: bool, timeout_s: float) -> None:
        self.expire()
        start = start or not self.book.is_live(corrid)
        if start:
            self.groups += 1
            self.group_of[corrid] = self.groups
        self.numbers += 1
        item = Item(self.group_of[corrid], self.numbers)
        self.waiting.add(item)
        self.book.add(item, SequencePlace(corrid, start, end), self.now, timeout_s)

    @rule(instance=st.integers(0, INSTANCES - 1), data=st.data())
    def begin(self, instance: int, data: st.DataObject) -> None:
        ready = list(self.book.ready(instance).values())
        if not ready:
            return
        sequence = data.draw(st.sampled_from(ready))
        item = self.book.begin(sequence).item
        assert sequence not in self.running, "two requests of a sequence at once"
        assert item in self.waiting, "begun twice, or after it was refused"
        first_dropped = self.dropped.get(item.group, item.number)
        assert item.number <= first_dropped, "begun after an earlier one was dropped"
        self.waiting.remove(item)
        self.running[sequence] = item
        self.begun[item.group].append(item.number)
        assert self.instance_of.setdefault(item.group, instance) == instance, "moved"

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.running)))
        del self.running[sequence]
        self.book.end(sequence, self.now)

    @rule(instance=st.integers(0, INSTANCES - 1), data=st.data())
    def drop(self, instance: int, data: st.DataObject) -> None:
        ready = list(self.book.ready(instance).values())
        if ready:
            items = self.book.drop(data.draw(st.sampled_from(ready)))
            assert len({item.group for item in items}) == 1, "dropped more than one sequence"
            self.refused(items)

    @precondition(lambda self: self.book.waiting_in())
    @rule(data=st.data())
    def drop_anywhere(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.book.waiting_in()))
        index = data.draw(st.integers(0, len(sequence.waiting) - 1))
        group = sequence.waiting[index].item.group
        items = self.book.drop(sequence, index)
        assert {item.group for item in items} == {group}, "dropped more than one sequence"
        self.refused(items)

    @rule(seconds=st.floats(0, 12))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.expire()

    def expire(self) -> None:
        self.refused(self.book.expire(self.now)[0])

    def refused(self, items: list[Item]) -> None:
        for item in items:
            assert item in self.waiting, "refused twice, or after it began"
            self.waiting.remove(item)
            first = self.dropped.get(item.group, item.number)
            self.dropped[item.group] = min(first, item.number)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.book.waiting == len(self.waiting)

    @invariant()
    def order_is_kept(self) -> None:
        assert all(numbers == sorted(numbers) for numbers in self.begun.values())

    @invariant()
    def slots_are_never_shared(self) -> None:
        seated = [sequence for slots in self.book._seated for sequence in slots.values()]
        assert len(seated) == len(set(map(id, seated)))
        assert len(seated) + free_slots(self.book) == INSTANCES * SLOTS
        assert not (self.book._backlog and free_slots(self.book)), "a slot is free, and one waits"

    @invariant()
    def no_expiry_is_missed(self) -> None:
        for slots in self.book._seated:
            for sequence in slots.values():
                idle = not (sequence.waiting or sequence.running)
                assert not idle or self.book.next_expiry <= sequence.over_at + IDLE_S

    def teardown(self) -> None:
        """What waits can be run to its end, and then everything is free."""
        for sequence in list(self.running):
            self.book.end(sequence, self.now)
        self.running.clear()
        while self.waiting:
            ready = [s for i in range(INSTANCES) for s in self.book.ready(i).values()]
            if not ready:
                self.now += IDLE_S
                before = len(self.waiting), len(self.book._backlog)
                self.expire()
                assert before != (len(self.waiting), len(self.book._backlog)), "stuck"
            for sequence in ready:
                self.waiting.remove(self.book.begin(sequence).item)
                self.book.end(sequence, self.now)
        self.now += IDLE_S
        self.expire()
        assert free_slots(self.book) == INSTANCES * SLOTS
        assert self.book._live == {}


TestBook = Book.TestCase
TestBook.settings = settings(stateful_step_count=40, deadline=None)
