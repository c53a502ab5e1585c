"""Lanes move to another broker, which gets every state; the one before gets the farewell."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from edge_server.board.board import Identity
from edge_server.mqtt import link as linking
from edge_server.mqtt.publisher import Publisher
from edge_server.settings import Mqtt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from edge_server.mqtt.outbox import Wake

IDENTITY = Identity("truck-7", "1", "boot", "client")
STATUS = "edge/v1/truck-7/status"
META = "edge/v1/truck-7/meta"
WAIT_S = 30.0


class Brokers:
    """Brokers by their host, and the states that each has got."""

    def __init__(self) -> None:
        self.logged_in: dict[str, Any] = {}  # the connections by their hosts
        self.states: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        self.changed = threading.Condition()

    def put(self, host: str, topic: str, payload: bytes) -> None:
        with self.changed:
            state = json.loads(payload or b"{}").get("state", "")
            self.states[host].append((topic, state))
            self.changed.notify_all()

    def wait(self, fits: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(fits, WAIT_S), self.states

    def last(self, host: str) -> str:
        return [state for topic, state in self.states[host] if topic == STATUS][-1]


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> Brokers:
    made = Brokers()

    class Connection:
        """Is accepted at once by a broker that is there, and acknowledges at once."""

        ready = True
        end = None
        refused = taken_over = False
        receive_maximum = 65535
        live_in_flight = in_flight = 0
        answered = closed = acknowledged = flooded = False

        def __init__(self, mqtt: Mqtt, client_id: str, **_: object) -> None:
            self.host = mqtt.host

        def open(self) -> None:
            with made.changed:
                before = made.logged_in.get(self.host)
                made.logged_in[self.host] = self
                assert before is None or before.closed, "it would end the other's connection"

        def step(self, wake: Wake, timeout_s: float) -> None:
            wake.wait(timeout_s)

        def fail(self, error: Exception) -> None:
            raise error

        def subscribe(self, filters: object) -> None:
            pass

        def publish_state(self, topic: str, payload: bytes) -> None:
            made.put(self.host, topic, payload)

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(linking, "Connection", Connection)
    monkeypatch.setattr(linking, "_STEP_S", 0.01)
    return made


@pytest.fixture
def publisher(brokers: Brokers) -> Iterator[Publisher]:
    made = Publisher(Mqtt("a"), IDENTITY)
    made.start()
    made.publish_online()
    brokers.wait(lambda: (STATUS, "online") in brokers.states["a"])
    yield made
    workers = made.workers()
    made.stop()
    assert [worker.failure for worker in workers] == [None] * len(workers)


def test_the_old_broker_gets_the_farewell_and_the_new_one_every_state(
    publisher: Publisher, brokers: Brokers
) -> None:
    publisher.publish_model_state("m", "READY")
    publisher._feed.contest = "another client of this broker has the device's id"
    assert publisher.change(Mqtt("b")) == "moves from a:1883 to b:1883"
    assert brokers.last("a") == "offline"
    assert not publisher.contested
    brokers.wait(lambda: (STATUS, "online") in brokers.states["b"])
    brokers.wait(lambda: len(brokers.states["b"]) == 3)
    topics = {topic.removeprefix("edge/v1/truck-7/") for topic, _ in brokers.states["b"]}
    assert topics == {"status", "meta", "models/m/state"}
    publisher.publish_model_state("m", "UNAVAILABLE")
    changed = ("edge/v1/truck-7/models/m/state", "UNAVAILABLE")
    brokers.wait(lambda: changed in brokers.states["b"])
    assert changed not in brokers.states["a"]


def test_the_birth_is_that_of_the_lanes_that_the_broker_gets(publisher: Publisher) -> None:
    def payload() -> str:
        return json.loads(publisher._outbox._state[META])["payload"]

    publisher.change(Mqtt("b", payload="protobuf"))
    assert payload() == "protobuf"
    publisher.publish_calibration("front", None)
    assert payload() == "protobuf"
    assert publisher.change(None)
    assert payload() == "json"


def test_settings_that_are_the_same_change_nothing(publisher: Publisher) -> None:
    before = publisher.workers()
    assert publisher.change(Mqtt("a")) == ""
    assert publisher.workers() == before


def test_a_file_whose_contents_have_changed_is_a_change(
    publisher: Publisher, brokers: Brokers, tmp_path: Path
) -> None:
    password = tmp_path / "password"
    password.write_text("one")
    login = Mqtt("b", username="me", password_file=str(password), insecure=True)
    publisher.change(login)
    brokers.wait(lambda: brokers.last("a") == "offline")
    assert publisher.change(login) == ""
    password.write_text("two")
    assert publisher.change(login) == "logs in to b:1883 again"


def test_to_publish_ends_and_begins_with_the_table(publisher: Publisher, brokers: Brokers) -> None:
    assert publisher.change(None) == "off, a:1883 is left"
    brokers.wait(lambda: brokers.last("a") == "offline")
    assert (publisher.on, publisher.connected, publisher.state) == (False, False, "off")
    assert publisher.workers() == []
    assert publisher.change(None) == ""
    publisher.publish_model_state("m", "READY")
    assert publisher.change(Mqtt("b")) == "on, at b:1883"
    brokers.wait(lambda: ("edge/v1/truck-7/models/m/state", "READY") in brokers.states["b"])
    brokers.wait(lambda: brokers.last("b") == "online")


def test_a_thread_that_hangs_is_replaced_and_every_state_published_again(
    publisher: Publisher, brokers: Brokers
) -> None:
    """The broker ends the first connection for the second one, which has the same client id."""
    hangs, let_go = threading.Event(), threading.Event()

    def step(wake: Wake, timeout_s: float) -> None:
        hangs.set()
        assert let_go.wait(WAIT_S)

    first, connection = publisher.workers(), brokers.logged_in["a"]
    connection.step = step
    assert hangs.wait(WAIT_S)
    connection.closed = True
    brokers.states.clear()
    publisher.reopen()
    assert publisher.workers() != first
    brokers.wait(lambda: (STATUS, "online") in brokers.states["a"])
    let_go.set()
    first[0].stop(WAIT_S)
    assert not first[0].alive
    publisher.publish_model_state("m", "READY")
    brokers.wait(lambda: ("edge/v1/truck-7/models/m/state", "READY") in brokers.states["a"])


def test_nothing_begins_after_the_end(brokers: Brokers) -> None:
    publisher = Publisher(None, IDENTITY)
    publisher.start()
    publisher.stop()
    publisher.reopen()
    assert publisher.change(Mqtt("b")) == ""
    assert publisher.workers() == []
    assert brokers.states == {}
