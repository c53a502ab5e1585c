"""Which requests wait in which order, which run together, and in which order responses leave."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.model_configs import config_of
from support.waiting import TIMEOUT_S

from edge_server.errors import Cancelled, InternalError, Unavailable
from edge_server.inference.dynamic_batch import BatchRule, OpenBatch, OrderedResponses, PolicyQueue
from edge_server.inference.execution import Executor, Job
from edge_server.inference.registry import Snapshot
from edge_server.inference.statistics import ModelStatistics
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.scheduling import DynamicBatching, QueuePolicy
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.requests import Respond, ResponseCallback

US = 1000


CONFIG = config_of('name: "m" backend: "identity"')


def ticket(name: str = "", *, priority: int = 0, urgent: bool = False, timeout_us: int = 0) -> Job:
    """A job that is dead once it has an error."""
    request = InferRequest(
        "m", {}, id=name, priority=priority, urgent=urgent, timeout_us=timeout_us
    )
    return Executor(CONFIG, 1, ModelStatistics()).job(request, Snapshot({}))


def names(tickets: list[Job]) -> list[str]:
    return [each.request.id for each in tickets]


def serve(queue: PolicyQueue, now_ns: int) -> list[str]:
    """All that the line would serve at that time, in order."""
    return names(queue.take(len(list(queue.in_order(now_ns)))))


def test_ahead_of_a_request_are_the_urgent_the_higher_levels_and_those_before_it() -> None:
    queue = PolicyQueue(DynamicBatching(priority_levels=3, default_priority_level=2))
    for priority in (1, 2, 2, 3, 3, 3):
        queue.add(ticket(priority=priority), 0)
    queue.add(ticket(urgent=True), 0)
    assert queue.ahead_of(ticket(urgent=True).request) == 1
    ahead = {priority: queue.ahead_of(ticket(priority=priority).request) for priority in range(4)}
    assert ahead == {0: 4, 1: 2, 2: 4, 3: 7}


def test_without_levels_every_priority_is_the_same() -> None:
    queue = PolicyQueue(DynamicBatching())
    for name, priority in (("a", 7), ("b", 0), ("c", 1)):
        queue.add(ticket(name, priority=priority), 0)
    assert serve(queue, 0) == ["a", "b", "c"]


def test_a_full_level_refuses_in_tritons_words_and_the_others_do_not() -> None:
    queue = PolicyQueue(
        DynamicBatching(
            priority_levels=2,
            default_priority_level=2,
            priority_queue_policies={2: QueuePolicy(max_queue_size=1)},
        )
    )
    queue.add(ticket("a"), 0)
    with pytest.raises(Unavailable) as refused:
        queue.add(ticket("b"), 0)
    assert str(refused.value) == "[request id: b] Exceeds maximum queue size"
    queue.add(ticket("c", priority=1), 0)
    assert serve(queue, 0) == ["c", "a"]


def test_the_dead_at_the_head_of_a_full_level_make_room() -> None:
    queue = PolicyQueue(DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=1)))
    gone = ticket("gone")
    queue.add(gone, 0)
    gone.made = Cancelled("")
    queue.add(ticket("new"), 0)
    assert [(job, str(error)) for job, error in queue.take_refused()] == [(gone, "")]
    assert serve(queue, 0) == ["new"]


def test_what_has_waited_too_long_is_refused_in_tritons_words() -> None:
    policy = QueuePolicy(default_timeout_us=10)
    queue = PolicyQueue(DynamicBatching(default_queue_policy=policy))
    queue.add(ticket("old"), 0)
    queue.add(ticket("new"), 5 * US)
    assert serve(queue, 10 * US) == ["new"]
    (refused,) = queue.take_refused()
    assert refused[0].request.id == "old"
    assert isinstance(refused[1], Unavailable)
    assert str(refused[1]) == "Request timeout expired"
    assert queue.take_refused() == []


def test_those_whose_callers_have_gone_do_not_pile_up_behind_one_callers_that_stays() -> None:
    queue = PolicyQueue(DynamicBatching())
    queue.add(ticket("stays"), 0)
    for _ in range(1000):
        gone = ticket("gone")
        queue.add(gone, 0)
        gone.made = Cancelled("")
    queue.drop_dead(0)
    assert len(queue.take_refused()) == 1000
    assert len(queue) == 1
    assert serve(queue, 0) == ["stays"]


POLICIES = (
    QueuePolicy(),  # of urgent ones
    QueuePolicy(max_queue_size=3, default_timeout_us=20, allow_timeout_override=True),
    QueuePolicy(delay_expired=True, max_queue_size=4, default_timeout_us=30),
    QueuePolicy(),
)


class QueueMachine(RuleBasedStateMachine):
    """The line against a list of all who stand in it."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = PolicyQueue(
            DynamicBatching(
                priority_levels=3,
                default_priority_level=3,
                default_queue_policy=POLICIES[0],
                priority_queue_policies={1: POLICIES[1], 2: POLICIES[2]},
            )
        )
        self.now_us = 0
        # In order of arrival: ticket, level, when its time is up.
        self.line: list[tuple[Job, int, float]] = []
        self.gone: set[Job] = set()

    @rule(priority=st.integers(0, 5), urgent=st.booleans(), timeout_us=st.integers(0, 40))
    def add(self, priority: int, urgent: bool, timeout_us: int) -> None:
        new = ticket(priority=priority, urgent=urgent, timeout_us=timeout_us)
        level = 0 if urgent else priority if priority in {1, 2, 3} else 3
        policy = POLICIES[level]
        size_before = self._size(level)
        try:
            self.queue.add(new, self.now_us * US)
        except Unavailable:
            assert policy.max_queue_size
            assert size_before >= policy.max_queue_size
        else:
            lasts_us: float = policy.default_timeout_us or float("inf")
            if policy.allow_timeout_override and 0 < timeout_us < lasts_us:
                lasts_us = timeout_us
            self.line.append((new, level, self.now_us + lasts_us))
        self.take_refusals()
        assert not policy.max_queue_size or self._size(level) <= policy.max_queue_size

    def _size(self, level: int) -> int:
        return sum(1 for _, of, _ in self.line if of == level)

    @rule(us=st.integers(1, 25))
    def pass_time(self, us: int) -> None:
        self.now_us += us

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.line:
            data.draw(st.sampled_from(self.line))[0].made = Cancelled("")

    @rule()
    def settle(self) -> None:
        self.queue.settle(self.now_us * US)
        self.take_refusals()
        # Also of levels that the queue does not reach.
        assert not any(map(self._refusable, self.line))

    @rule(most=st.integers(1, 5))
    def take(self, most: int) -> None:
        walked = []
        for walker in self.queue.in_order(self.now_us * US):
            walked.append(walker)
            if len(walked) == most:
                break
        taken = self.queue.take(len(walked))
        assert taken == walked
        assert all(each.made is None for each in taken)
        servable = [e for e in self.line if e[0].made is None and not self._refusable(e)]
        # Among those whose time is up the order is that of finding it out.
        place = {
            entry[0]: (entry[1], self._up(entry), 0 if self._up(entry) else arrival)
            for arrival, entry in enumerate(servable)
        }
        assert [place[each] for each in taken] == sorted(place.values())[:most]
        self._leave(taken)
        self.take_refusals()

    def _up(self, entry: tuple[Job, int, float]) -> bool:
        return self.now_us >= entry[2]

    def _refusable(self, entry: tuple[Job, int, float]) -> bool:
        return self._up(entry) and not POLICIES[entry[1]].delay_expired

    def take_refusals(self) -> None:
        refused = self.queue.take_refused()
        for job, error in refused:
            (entry,) = [entry for entry in self.line if entry[0] is job]
            assert entry[0].made if isinstance(error, Cancelled) else self._refusable(entry)
        self._leave([job for job, _ in refused])

    def _leave(self, tickets: list[Job]) -> None:
        for each in tickets:
            assert each not in self.gone, "served or refused twice"
            self.gone.add(each)
        self.line = [entry for entry in self.line if entry[0] not in self.gone]

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.queue) == len(self.line)

    def teardown(self) -> None:
        assert set(self.queue.clear()) == {entry[0] for entry in self.line}


TestQueueMachine = QueueMachine.TestCase


NOW_NS = 1_000_000_000


def config(max_batch_size: int) -> ModelConfig:
    return config_of(f"""
            name: "m" backend: "identity" max_batch_size: {max_batch_size}
            input {{ name: "a" data_type: TYPE_FP32 dims: -1 }}
            input {{ name: "b" data_type: TYPE_FP32 dims: -1 optional: true }}
            output {{ name: "c" data_type: TYPE_FP32 dims: -1 }}
            """)


def job(
    rows: int = 1, columns: int = 2, age_us: int = 0, max_batch_size: int = 8, with_b: bool = False
) -> Job:
    tensor = Tensor(np.zeros((rows, columns), np.float32))
    inputs = {"a": tensor, "b": tensor} if with_b else {"a": tensor}
    executor = Executor(config(max_batch_size), 1, ModelStatistics())
    made = executor.job(InferRequest("m", inputs), Snapshot({}))
    made.queued_at_ns = NOW_NS - age_us * US
    return made


def batch(batching: DynamicBatching, *line: Job, max_batch_size: int = 8) -> OpenBatch:
    return BatchRule(config(max_batch_size), batching).batch(line, NOW_NS)


def test_without_delay_all_that_fits_goes_at_once() -> None:
    assert batch(DynamicBatching(), job(3), job(1), job(2)) == OpenBatch(3, NOW_NS)


def test_requests_are_never_split() -> None:
    assert batch(DynamicBatching(), job(5), job(4)).count == 1


def test_another_shape_or_another_set_of_inputs_ends_the_batch() -> None:
    assert batch(DynamicBatching(), job(), job(columns=3), job()).count == 1
    assert batch(DynamicBatching(), job(), job(with_b=True), job()).count == 1
    assert batch(DynamicBatching(), job(with_b=True), job(with_b=True)).count == 2


def test_the_shapes_of_ragged_inputs_may_differ_within_a_batch() -> None:
    message = config(8).message
    message.input[0].allow_ragged_batch = True
    rule = BatchRule(ModelConfig.of(message), DynamicBatching())
    assert rule.batch([job(), job(columns=3), job()], NOW_NS).count == 3
    assert rule.batch([job(), job(columns=3), job(with_b=True)], NOW_NS).count == 2


def test_a_model_without_batches_runs_requests_one_by_one() -> None:
    line = [job(max_batch_size=0), job(max_batch_size=0)]
    found = BatchRule(config(0), DynamicBatching(max_queue_delay_us=50)).batch(line, NOW_NS)
    assert found == OpenBatch(1, NOW_NS)


def test_the_oldest_waits_for_company_no_longer_than_the_delay() -> None:
    batching = DynamicBatching(max_queue_delay_us=50)
    assert batch(batching, job(age_us=10), job()) == OpenBatch(2, NOW_NS + 40 * US)
    assert batch(batching, job(age_us=50), job()).due_ns <= NOW_NS
    # It may stand further back, where somebody has overtaken it.
    assert batch(batching, job(), job(age_us=60)) == OpenBatch(2, NOW_NS - 10 * US)


def test_a_preferred_size_goes_at_once_and_the_largest_one_reached_counts() -> None:
    batching = DynamicBatching(preferred_batch_sizes=(2, 4), max_queue_delay_us=50)
    assert batch(batching, job(), job()) == OpenBatch(2, NOW_NS)
    assert batch(batching, *[job()] * 5) == OpenBatch(4, NOW_NS)
    assert batch(batching, job()).due_ns > NOW_NS
    # Past the delay nobody is left behind for the sake of a size.
    assert batch(batching, *[job(age_us=50)] * 3).count == 3


def test_a_caller_that_cannot_get_company_does_not_wait_for_it() -> None:
    batching = DynamicBatching(max_queue_delay_us=50)
    assert batch(batching, job(), job(columns=3)) == OpenBatch(1, NOW_NS)
    assert batch(batching, job(8)) == OpenBatch(1, NOW_NS)
    batching = DynamicBatching(preferred_batch_sizes=(4,), max_queue_delay_us=50)
    assert batch(batching, job(3), job(3)) == OpenBatch(2, NOW_NS)


def test_an_empty_line_has_no_batch() -> None:
    assert batch(DynamicBatching()).count == 0


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 8), st.integers(1, 2), st.booleans(), st.integers(0, 100)),
        min_size=1,
        max_size=12,
    ),
    preferred=st.frozensets(st.integers(1, 8), max_size=3),
    delay_us=st.sampled_from([0, 1, 40, 200]),
)
def test_every_batch_keeps_the_rules(
    sizes: list[tuple[int, int, bool, int]], preferred: frozenset[int], delay_us: int
) -> None:
    line = [job(rows, columns, age_us, with_b=with_b) for rows, columns, with_b, age_us in sizes]
    batching = DynamicBatching(tuple(sorted(preferred)), delay_us)
    found = BatchRule(config(8), batching).batch(iter(line), NOW_NS)
    taken = line[: found.count]
    total = sum(each.batch_size for each in taken)
    assert taken
    assert total <= 8
    assert len({(frozenset(each.inputs), each.inputs["a"].shape[1]) for each in taken}) == 1
    oldest_ns = min(each.queued_at_ns for each in taken)
    assert found.due_ns <= max(NOW_NS, oldest_ns + delay_us * US)
    if found.due_ns > NOW_NS:
        # It waits: for company that may still come, of all those that are there, for less than
        # the delay, and short of every size that would let it go.
        assert taken == line
        assert total not in (preferred or {8})
        assert total < max(preferred or {8})
    elif total in preferred:
        longer = [sum(e.batch_size for e in line[:n]) for n in range(found.count + 1, len(line))]
        reached = {size for size in longer if size in preferred and size <= 8}
        alike = all(
            (frozenset(e.inputs), e.inputs["a"].shape[1])
            == (frozenset(line[0].inputs), line[0].inputs["a"].shape[1])
            for e in line
        )
        assert not (alike and reached), "a larger preferred size was there"


def test_the_queue_is_not_read_further_than_the_batch_may_go() -> None:
    def line() -> Iterator[Job]:
        yield from [job(4), job(4)]
        raise AssertionError("read on")

    assert BatchRule(config(8), DynamicBatching()).batch(line(), NOW_NS).count == 2


def named(sent: list[tuple[int, bool]], number: int) -> Respond:
    def respond(response: ResponseCallback, final: bool) -> None:
        sent.append((number, final))

    return respond


@given(data=st.data(), lengths=st.lists(st.integers(1, 3), min_size=1, max_size=6))
def test_every_response_is_sent_once_and_in_order(data: st.DataObject, lengths: list[int]) -> None:
    sent: list[tuple[int, bool]] = []
    order = OrderedResponses()
    places = [order.place(named(sent, number)) for number in range(len(lengths))]
    left = dict(enumerate(lengths))
    while left:
        number = data.draw(st.sampled_from(sorted(left)))
        left[number] -= 1
        final = left[number] == 0
        places[number](None, final)
        if final:
            del left[number]
    assert sent == [(n, k == length - 1) for n, length in enumerate(lengths) for k in range(length)]


def test_the_first_in_order_is_sent_at_once() -> None:
    sent: list[tuple[int, bool]] = []
    order = OrderedResponses()
    first, second = order.place(named(sent, 1)), order.place(named(sent, 2))
    second(InternalError("x"), True)
    assert sent == []
    first(None, False)
    assert sent == [(1, False)]
    first(None, True)
    assert sent == [(1, False), (1, True), (2, True)]


def test_a_callback_may_submit_again() -> None:
    sent: list[tuple[int, bool]] = []
    order = OrderedResponses()

    def ask_again(response: ResponseCallback, final: bool) -> None:
        order.place(named(sent, 2))(None, True)
        sent.append((1, True))

    order.place(ask_again)(None, True)
    assert sent == [(1, True), (2, True)]


def test_many_threads_respond_and_the_order_holds() -> None:
    sent: list[tuple[int, bool]] = []
    order = OrderedResponses()
    places = [order.place(named(sent, number)) for number in range(400)]

    def response(own: list[Respond]) -> None:
        for place in own:
            place(None, True)

    threads = [threading.Thread(target=response, args=(places[n::4][::-1],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert [number for number, _ in sent] == list(range(400))


def test_a_callback_that_raises_delays_no_other_response(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[tuple[int, bool]] = []
    order = OrderedResponses()

    def raises(response: ResponseCallback, final: bool) -> None:
        raise ValueError("raises")

    places = [order.place(raises), order.place(named(sent, 2)), order.place(raises)]
    for place in reversed(places):
        place(None, True)
    assert sent == [(2, True)]
    order.place(named(sent, 4))(None, True)
    assert sent == [(2, True), (4, True)]
    assert caplog.text.count("ValueError: raises") == 2
