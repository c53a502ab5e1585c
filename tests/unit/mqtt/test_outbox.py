"""Outbox: bounded by the number of topics, newest live sample and latest state win."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edge_server.mqtt.outbox import Outbox

TOPICS = st.sampled_from(["a", "b", "c"])


class OutboxAgainstModel(RuleBasedStateMachine):
    """Any order of calls, against plain dictionaries that say what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox: Outbox[int] = Outbox()
        self.offered = self.taken = 0
        self.live: dict[str, int] = {}
        self.state: dict[str, bytes] = {}
        self.due: set[str] = set()

    @rule(topic=TOPICS)
    def put_live(self, topic: str) -> None:
        self.offered += 1
        assert self.outbox.put_live(topic, self.offered) == (topic not in self.live)
        self.live[topic] = self.offered

    @rule()
    def take_live(self) -> None:
        taken = self.outbox.take_live()
        if taken is None:
            assert not self.live
            return
        self.taken += 1
        assert self.live.pop(taken[0]) == taken[1], "not the newest of its topic"

    @rule(topic=TOPICS, payload=st.sampled_from([b"1", b"2", b""]))
    def put_state(self, topic: str, payload: bytes) -> None:
        news = self.state.get(topic) != payload
        assert self.outbox.put_state(topic, payload) == news
        self.state[topic] = payload
        if news:
            self.due.add(topic)

    @rule()
    def take_state(self) -> None:
        taken = self.outbox.take_state()
        if taken is None:
            assert not self.due
            return
        self.due.remove(taken[0])
        assert self.state[taken[0]] == taken[1], "not the latest of its topic"
        if not taken[1]:
            del self.state[taken[0]]

    @rule()
    def connected(self) -> None:
        self.outbox.connected()
        self.due = set(self.state)

    @rule(topic=TOPICS)
    def knows(self, topic: str) -> None:
        assert self.outbox.knows(topic) == (topic in self.state)

    @invariant()
    def nothing_is_unaccounted_for(self) -> None:
        assert self.outbox.waiting == len(self.live) + len(self.due) <= 6
        assert self.offered == self.taken + self.outbox.dropped + len(self.live)


TestOutboxAgainstModel = OutboxAgainstModel.TestCase


def test_a_busy_topic_does_not_starve_another() -> None:
    outbox: Outbox[int] = Outbox()
    outbox.put_live("busy", 1)
    outbox.put_live("quiet", 1)
    outbox.put_live("busy", 2)
    assert outbox.take_live() == ("busy", 2)
    outbox.put_live("busy", 3)
    assert outbox.take_live() == ("quiet", 1)


def test_state_is_published_in_the_order_it_was_first_put() -> None:
    outbox: Outbox[int] = Outbox()
    outbox.put_state("status", b"online")
    outbox.put_state("model", b"LOADING")
    assert [outbox.take_state(), outbox.take_state()] == [
        ("status", b"online"),
        ("model", b"LOADING"),
    ]
    outbox.put_state("model", b"READY")
    outbox.connected()
    assert [outbox.take_state(), outbox.take_state(), outbox.take_state()] == [
        ("status", b"online"),
        ("model", b"READY"),
        None,
    ]
