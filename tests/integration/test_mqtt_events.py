"""Events on a real mosquitto: none is lost and none out of order, whatever the broker does."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import paho.mqtt.client as paho
import pytest

from edge_server.board.identity import Identity
from edge_server.mqtt.publisher import Publisher
from edge_server.pipeline.event_log import EventLog
from edge_server.pipeline.events import Event
from edge_server.settings import Mqtt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .conftest import Mosquitto

ROOT = "edge/v1/truck-7"
IDENTITY = Identity("truck-7", "0.1.0", "boot", "edge-truck-7-events")
WAIT_S = 30.0


class Subscriber:
    """A program that may miss no event: the broker keeps a session for it, and it drops the ids
    that it has seen."""

    def __init__(self, broker: Mosquitto) -> None:
        self.ids: list[int] = []
        self.repeated = 0
        self._changed = threading.Condition()
        self._client = client = paho.Client(
            paho.CallbackAPIVersion.VERSION2,
            "subscriber",
            protocol=paho.MQTTv311,
            clean_session=False,
        )
        client.reconnect_delay_set(1, 1)
        client.on_connect = lambda client, *_: client.subscribe(f"{ROOT}/+/+/events/#", qos=1)
        client.on_message = self._take
        client.connect(broker.host, broker.port)
        client.loop_start()

    def _take(self, _client: Any, _data: Any, message: Any) -> None:
        number = int(json.loads(message.payload)["id"])
        with self._changed:
            if number in self.ids:
                self.repeated += 1
            else:
                self.ids.append(number)
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ids) >= count, WAIT_S), self.ids[-5:]

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


@contextlib.contextmanager
def device(broker: Mosquitto, folder: Path) -> Iterator[EventLog]:
    """What a daemon has of events: the log, and the publisher."""
    log = EventLog(folder / "events.db")
    publisher = Publisher(Mqtt(broker.host, broker.port), IDENTITY, events=log)
    log.worker.start()
    publisher.start()
    publisher.publish_online()
    try:
        yield log
    finally:
        publisher.stop()
        log.worker.stop()
    assert log.worker.failure is None


@pytest.fixture
def mosquitto(mosquitto_with: Callable[..., Mosquitto], tmp_path: Path) -> Mosquitto:
    """A broker that remembers its subscribers, as examples/fleet has it."""
    folder = tmp_path / "broker"
    folder.mkdir()
    return mosquitto_with(
        "allow_anonymous true",
        "persistence true",
        f"persistence_location {folder}/",
        "autosave_on_changes true",
        "autosave_interval 1",
    )


@pytest.fixture
def subscribe(mosquitto: Mosquitto) -> Iterator[Callable[[], Subscriber]]:
    made: list[Subscriber] = []

    def make() -> Subscriber:
        made.append(Subscriber(mosquitto))
        return made[-1]

    yield make
    for each in made:
        each.close()


def put(log: EventLog, count: int) -> None:
    for _ in range(count):
        event = Event("lane_departure", "begin", "left", "", time.monotonic_ns(), time.time_ns())
        log.put(Event(**{**event.__dict__, "camera": "front"}))


def test_an_event_arrives_at_once(
    mosquitto: Mosquitto, subscribe: Callable[[], Subscriber], tmp_path: Path
) -> None:
    subscriber = subscribe()
    with device(mosquitto, tmp_path) as log:
        put(log, 3)
        subscriber.wait_for(3)
    assert subscriber.ids == [1, 2, 3]


def test_events_of_an_outage_and_of_a_restart_arrive_in_order(
    mosquitto: Mosquitto, subscribe: Callable[[], Subscriber], tmp_path: Path
) -> None:
    subscriber = subscribe()
    with device(mosquitto, tmp_path) as log:
        put(log, 2)
        subscriber.wait_for(2)
        mosquitto.kill()
        put(log, 5)
    # The daemon ends during the outage, and another one starts.
    mosquitto.start()
    with device(mosquitto, tmp_path) as log:
        put(log, 1)
        subscriber.wait_for(8)
    assert subscriber.ids == [*range(1, 9)]


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.long)])
def test_no_event_is_lost_where_the_broker_is_killed_again_and_again(
    mosquitto: Mosquitto, subscribe: Callable[[], Subscriber], tmp_path: Path, kills: int
) -> None:
    subscriber = subscribe()
    stop = threading.Event()
    given = itertools.count(1)
    with device(mosquitto, tmp_path) as log:

        def events_come() -> None:
            while not stop.wait(0.02):
                put(log, 1)
                next(given)

        source = threading.Thread(target=events_come)
        source.start()
        for _ in range(kills):
            time.sleep(1.0)
            mosquitto.kill()
            time.sleep(0.2)
            mosquitto.start()
        stop.set()
        source.join()
        put(log, 1)
        count = next(given)
        subscriber.wait_for(count)
    assert subscriber.ids == sorted(subscriber.ids)
    assert subscriber.ids == [*range(1, count + 1)]
