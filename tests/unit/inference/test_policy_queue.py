"""The line serves by urgency, level and arrival; it is bounded, and nothing in it is lost."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import Cancelled, EdgeServerError, Unavailable
from edge_server.inference.dynamic_batch import PolicyQueue
from edge_server.inference.execution import Executor, Job
from edge_server.inference.registry import Snapshot
from edge_server.inference.statistics import ModelStatistics
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.scheduling import DynamicBatching, QueuePolicy
from edge_server.requests import InferRequest

US = 1000


CONFIG = ModelConfig.of(text_format.Parse('name: "m" backend: "identity"', pb.ModelConfig()))


class Ticket(Job):
    """A job that is dead once the test says so."""

    def __init__(self, request: InferRequest) -> None:
        super().__init__(Executor(CONFIG, 1, ModelStatistics()), request, Snapshot({}))
        self.dead: list[EdgeServerError] = []

    def death(self) -> EdgeServerError | None:
        return self.dead[0] if self.dead else None


def ticket(
    name: str = "", *, priority: int = 0, urgent: bool = False, timeout_us: int = 0
) -> Ticket:
    return Ticket(
        InferRequest("m", {}, id=name, priority=priority, urgent=urgent, timeout_us=timeout_us)
    )


def names(tickets: list[Ticket]) -> list[str]:
    return [each.request.id for each in tickets]


def serve(queue: PolicyQueue, now_ns: int) -> list[str]:
    """All that the line would serve at that time, in order."""
    return names(queue.take(len(list(queue.in_order(now_ns)))))


def test_urgent_goes_first_then_level_by_level_each_in_order_of_arrival() -> None:
    queue = PolicyQueue(DynamicBatching(priority_levels=3, default_priority_level=2))
    for name, priority in (("low", 3), ("none", 0), ("two", 2), ("beyond", 4), ("high", 1)):
        queue.add(ticket(name, priority=priority), 0)
    queue.add(ticket("camera", urgent=True, priority=3), 0)
    assert serve(queue, 0) == ["camera", "high", "none", "two", "beyond", "low"]
    assert not queue


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
    gone.dead.append(Cancelled(""))
    queue.add(ticket("new"), 0)
    assert [(job, str(error)) for job, error in queue.take_refused()] == [(gone, "")]
    assert serve(queue, 0) == ["new"]


@pytest.mark.parametrize(
    ("default_us", "override", "request_us", "lasts_us"),
    [
        (0, True, 5, None),
        (10, False, 5, 10),
        (10, True, 0, 10),
        (10, True, 5, 5),
        (10, True, 10, 10),
        (10, True, 20, 10),
    ],
)
def test_a_request_may_shorten_its_time_and_never_lengthen_it(
    default_us: int, override: bool, request_us: int, lasts_us: int | None
) -> None:
    policy = QueuePolicy(default_timeout_us=default_us, allow_timeout_override=override)
    queue = PolicyQueue(DynamicBatching(default_queue_policy=policy))
    queue.add(ticket(timeout_us=request_us), now_ns=7)
    expiry_ns = 7 + (10**9 if lasts_us is None else lasts_us) * US
    queue.settle(expiry_ns - 1)
    assert len(queue) == 1
    queue.settle(expiry_ns)
    assert len(queue) == (1 if lasts_us is None else 0)


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


def test_what_is_delayed_is_served_after_the_unexpired_of_its_level_and_before_lower_ones() -> None:
    policy = QueuePolicy(delay_expired=True, default_timeout_us=10)
    queue = PolicyQueue(
        DynamicBatching(
            priority_levels=2, default_priority_level=2, priority_queue_policies={1: policy}
        )
    )
    queue.add(ticket("late", priority=1), 0)
    queue.add(ticket("later", priority=1), 1)
    queue.add(ticket("fresh", priority=1), 5 * US)
    queue.add(ticket("low", priority=2), 0)
    assert serve(queue, 11 * US) == ["fresh", "late", "later", "low"]


def test_time_limits_hold_at_the_head_of_a_level_that_is_never_reached() -> None:
    queue = PolicyQueue(
        DynamicBatching(
            priority_levels=2,
            default_priority_level=1,
            priority_queue_policies={2: QueuePolicy(default_timeout_us=10)},
        )
    )
    queue.add(ticket("low", priority=2), 0)
    queue.add(ticket("high"), 0)
    queue.settle(10 * US)
    assert [job.request.id for job, _ in queue.take_refused()] == ["low"]
    assert serve(queue, 10 * US) == ["high"]


def test_those_whose_callers_have_gone_do_not_pile_up_behind_one_callers_that_stays() -> None:
    queue = PolicyQueue(DynamicBatching())
    queue.add(ticket("stays"), 0)
    for _ in range(1000):
        gone = ticket("gone")
        queue.add(gone, 0)
        gone.dead.append(Cancelled(""))
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
        self.line: list[tuple[Ticket, int, float]] = []
        self.gone: set[Ticket] = set()

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
            data.draw(st.sampled_from(self.line))[0].dead.append(Cancelled(""))

    @rule()
    def settle(self) -> None:
        self.queue.settle(self.now_us * US)
        self.take_refusals()

    @rule(most=st.integers(1, 5))
    def take(self, most: int) -> None:
        walked = []
        for walker in self.queue.in_order(self.now_us * US):
            walked.append(walker)
            if len(walked) == most:
                break
        taken = self.queue.take(len(walked))
        assert taken == walked
        assert all(not each.dead for each in taken)
        servable = [e for e in self.line if not e[0].dead and not self._refusable(e)]
        # Among those whose time is up the order is that of finding it out.
        place = {
            entry[0]: (entry[1], self._up(entry), 0 if self._up(entry) else arrival)
            for arrival, entry in enumerate(servable)
        }
        assert [place[each] for each in taken] == sorted(place.values())[:most]
        self._leave(taken)
        self.take_refusals()

    def _up(self, entry: tuple[Ticket, int, float]) -> bool:
        return self.now_us >= entry[2]

    def _refusable(self, entry: tuple[Ticket, int, float]) -> bool:
        return self._up(entry) and not POLICIES[entry[1]].delay_expired

    def take_refusals(self) -> None:
        refused = self.queue.take_refused()
        for job, error in refused:
            (entry,) = [entry for entry in self.line if entry[0] is job]
            assert entry[0].dead if isinstance(error, Cancelled) else self._refusable(entry)
        self._leave([job for job, _ in refused])

    def _leave(self, tickets: list[Ticket]) -> None:
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
