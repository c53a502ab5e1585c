"""Events on the fleet's mosquitto, with TLS and ACL: none is lost and none out of order, whatever
becomes of the broker or of the disk, and lanes go on."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import paho.mqtt.client as paho
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from support.fleet_recipes import fleet_lines
from support.lane_frames import lane_frame
from support.processes import resident_bytes
from support.waiting import wait_until

from edge_server.board.board import Identity
from edge_server.lanes import e2e
from edge_server.mqtt.publisher import Publisher
from edge_server.pipeline.event_log import Event, EventLog
from edge_server.settings import Mqtt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.certificates import Authority
    from support.mosquitto import Mosquitto

ROOT = "edge/v1/truck-7"
LANES = f"{ROOT}/cameras/front/lanes"
IDENTITY = Identity("truck-7", "0.1.0", "boot", "edge-truck-7-events")
WAIT_S = 60.0
# A message is late that takes so much longer than the quickest one of the session.
MAX_DELAY_S = 1.0
# Lanes of this age at their arrival are late for certain: older ones than 1 s are not sent.
LATE_S = 3.0
MEMORY_BYTES = 16 * 2**20


class Subscriber:
    """A program that may miss no event: the broker keeps a session for it, and it drops the ids of
    a log that it has seen.

    Attributes:
        ids: of the events, in the order of their first arrival.
        lanes: age in s at the arrival, and what the envelope was worth, of each lane message.
    """

    def __init__(self, broker: Mosquitto, authority: Authority) -> None:
        self.ids: list[int] = []
        self.lanes: list[tuple[float, e2e.Check]] = []
        self._seen: set[tuple[str, int]] = set()
        self._changed = threading.Condition()
        self._checker = e2e.Checker(LANES, max_lost=2**31, max_delay_s=MAX_DELAY_S)
        self._client = client = paho.Client(
            paho.CallbackAPIVersion.VERSION2, "subscriber", protocol=paho.MQTTv5
        )
        certificate, key = authority.issue("fleet-dashboard")
        client.tls_set(authority.ca, certificate, key, tls_version=ssl.PROTOCOL_TLS_CLIENT)
        client.reconnect_delay_set(1, 1)
        subscribed = threading.Event()
        client.on_connect = lambda client, *_: client.subscribe([(f"{ROOT}/#", 1)])
        client.on_subscribe = lambda *_: subscribed.set()
        client.on_message = self._take
        session = Properties(PacketTypes.CONNECT)
        session.SessionExpiryInterval = 3600
        client.connect(broker.host, broker.port, clean_start=False, properties=session)
        client.loop_start()
        assert subscribed.wait(WAIT_S)

    def _take(self, _client: Any, _data: Any, message: Any) -> None:
        if message.topic == LANES:
            lanes = json.loads(message.payload)
            captured_s = int(lanes["time"]["capture_mono_ns"]) / 1e9
            value = dict(message.properties.UserProperty)[e2e.PROPERTY]
            now_s = time.monotonic()
            check = self._checker.check(message.payload, value, now_s)
            self.lanes.append((now_s - captured_s, check))
        elif "/events/" in message.topic:
            self._take_event(message)

    def _take_event(self, message: Any) -> None:
        event = json.loads(message.payload)
        number = int(event["id"])
        value = dict(message.properties.UserProperty)[e2e.PROPERTY]
        assert isinstance(e2e.unprotect(message.topic, message.payload, value), e2e.Envelope)
        assert message.properties.CorrelationData == event["id"].encode()
        with self._changed:
            if (event["log"], number) not in self._seen:
                self._seen.add((event["log"], number))
                self.ids.append(number)
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ids) >= count, WAIT_S), (
                f"{len(self.ids)} of {count}, the last {self.ids[-5:]}"
            )

    def wait_for_lanes(self) -> None:
        """Wait until some have come that were not there yet: half a second on an idle machine."""
        enough = len(self.lanes) + 12
        wait_until(lambda: len(self.lanes) >= enough, WAIT_S)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


class Device:
    """What a daemon has of events: the log, and the publisher; and lanes of a camera."""

    def __init__(self, mqtt: Mqtt, folder: Path) -> None:
        self.log = EventLog(folder / "events.db")
        self.publisher = Publisher(mqtt, IDENTITY, events=self.log)
        self.given = 0
        self._stop = threading.Event()

    def start(self) -> None:
        self.log.worker.start()
        self.publisher.start()
        self.publisher.publish_online()

    def stop(self) -> None:
        self.publisher.stop()
        self.log.stop()
        assert self.log.worker.failure is None

    def put(self, count: int) -> None:
        for _ in range(count):
            mono_ns, epoch_ns = time.monotonic_ns(), time.time_ns()
            self.log.put(
                Event("lane_departure", "begin", "left", "", mono_ns, epoch_ns, camera="front")
            )
            self.given += 1

    @contextlib.contextmanager
    def driving(self) -> Iterator[None]:
        """50 events and 25 frames a second."""
        thread = threading.Thread(target=self._drive)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
        self.put(1)

    def _drive(self) -> None:
        for number in itertools.count():
            if self._stop.wait(0.02):
                return
            self.put(1)
            if number % 2:
                self.publisher.publish_lanes(lane_frame(number))


@pytest.fixture
def mosquitto(
    mosquitto_with: Callable[..., Mosquitto], authority: Authority, tmp_path: Path
) -> Mosquitto:
    """The broker of examples/fleet."""
    return mosquitto_with(*fleet_lines(authority, tmp_path / "broker"))


@pytest.fixture
def mqtt(mosquitto: Mosquitto, authority: Authority) -> Mqtt:
    certificate, key = authority.issue("truck-7")
    return Mqtt(
        mosquitto.host,
        mosquitto.port,
        ca_file=str(authority.ca),
        cert_file=str(certificate),
        key_file=str(key),
    )


@pytest.fixture
def subscriber(mosquitto: Mosquitto, authority: Authority) -> Iterator[Subscriber]:
    made = Subscriber(mosquitto, authority)
    yield made
    made.close()


@contextlib.contextmanager
def device(mqtt: Mqtt, folder: Path) -> Iterator[Device]:
    made = Device(mqtt, folder)
    made.start()
    try:
        yield made
    finally:
        made.stop()


def test_events_of_an_outage_and_of_a_restart_arrive_in_order(
    mosquitto: Mosquitto, mqtt: Mqtt, subscriber: Subscriber, tmp_path: Path
) -> None:
    with device(mqtt, tmp_path) as before:
        before.put(2)
        subscriber.wait_for(2)
        mosquitto.kill()
        before.put(5)
    # The daemon ends during the outage, and another one starts.
    mosquitto.start()
    with device(mqtt, tmp_path) as after:
        after.put(1)
        subscriber.wait_for(8)
    assert subscriber.ids == [*range(1, 9)]


def test_a_broker_gets_again_what_it_forgot_and_no_more(
    mosquitto: Mosquitto, mqtt: Mqtt, subscriber: Subscriber, tmp_path: Path
) -> None:
    old, now = tmp_path / "broker/mosquitto.db", tmp_path / "old.db"
    with device(mqtt, tmp_path) as each:
        each.put(3)
        subscriber.wait_for(3)
        # Until the broker has the mark of these events, and has written it.
        wait_until(lambda: b'{"event":"3",' in old.read_bytes(), WAIT_S)
        now.write_bytes(old.read_bytes())
        each.put(3)
        subscriber.wait_for(6)
        mosquitto.kill()
        old.write_bytes(now.read_bytes())
        mosquitto.start()
        each.put(1)
        subscriber.wait_for(7)
        published = next(
            each.publisher._feed.counters[f"{ROOT}/cameras/front/events/lane_departure"]
        )
    assert subscriber.ids == [*range(1, 8)]
    assert published == 10, "4, 5 and 6 again, and none of the first three"


def with_a_bad_sector(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(5 * 4096)
        opened.write(bytes(4096))


@pytest.mark.parametrize(
    "harm",
    [with_a_bad_sector, lambda file: file.write_bytes(b"#" * 100_000), Path.unlink],
    ids=["a bad sector", "no byte left", "erased"],
)
def test_no_new_event_is_hidden_by_what_was_known_of_a_damaged_log(
    mosquitto: Mosquitto,
    mqtt: Mqtt,
    subscriber: Subscriber,
    tmp_path: Path,
    harm: Callable[[Path], object],
) -> None:
    with device(mqtt, tmp_path) as before:
        before.put(300)
        subscriber.wait_for(300)
    with device(mqtt, tmp_path) as before:  # until the broker has the mark
        before.put(1)
        subscriber.wait_for(301)
        wait_until(lambda: b'{"event":"301",' in (tmp_path / "broker/mosquitto.db").read_bytes())
    harm(tmp_path / "events.db")
    with device(mqtt, tmp_path) as after:
        after.put(350)
        subscriber.wait_for(651)
        assert (after.log.id == before.log.id) == (harm is with_a_bad_sector)
    new = subscriber.ids[301:]
    assert new == [*range(new[0], new[0] + 350)]
    assert harm is Path.unlink or new[0] > 301, "for a reader that keeps an id alone"


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.long)])
def test_no_event_is_lost_where_the_broker_is_killed_again_and_again(
    mosquitto: Mosquitto, mqtt: Mqtt, subscriber: Subscriber, tmp_path: Path, kills: int
) -> None:
    memory_bytes = resident_bytes()
    with device(mqtt, tmp_path) as each:
        with each.driving():
            for _ in range(kills):
                subscriber.wait_for_lanes()
                mosquitto.kill()
                time.sleep(0.2)
                mosquitto.start()
        subscriber.wait_for(each.given)
    check(subscriber, each, memory_bytes)


@pytest.mark.parametrize("more_s", [0, pytest.param(60, marks=pytest.mark.long)])
def test_no_event_is_lost_where_the_broker_stands_still(
    mosquitto: Mosquitto, mqtt: Mqtt, subscriber: Subscriber, tmp_path: Path, more_s: float
) -> None:
    memory_bytes = resident_bytes()
    with device(mqtt, tmp_path) as each:
        with each.driving():
            subscriber.wait_for_lanes()
            mosquitto.freeze()
            # 3 s without an acknowledgement are too many.
            wait_until(lambda: not each.publisher.connected, WAIT_S)
            time.sleep(more_s)
            mosquitto.thaw()
            subscriber.wait_for_lanes()
        subscriber.wait_for(each.given)
    check(subscriber, each, memory_bytes)


def check(subscriber: Subscriber, each: Device, memory_bytes: int) -> None:
    assert subscriber.ids == [*range(1, each.given + 1)]
    assert resident_bytes() - memory_bytes <= MEMORY_BYTES
    lanes = tuple(subscriber.lanes)
    assert lanes
    median_s, p95_s, longest_s = np.percentile([age_s for age_s, _ in lanes], [50, 95, 100])
    print(f"age of lanes: median {median_s:.4f} s, p95 {p95_s:.4f} s, longest {longest_s:.4f} s")
    print(f"memory: {(resident_bytes() - memory_bytes) / 2**20:.1f} MiB more")
    # What a frozen broker had read before comes when it goes on, and has expired meanwhile.
    for age_s, verdict in lanes:
        assert verdict.usable or (verdict is e2e.Check.TIMEOUT and age_s > MAX_DELAY_S)
        assert age_s <= LATE_S or not verdict.usable


FULL = """
import sys
from pathlib import Path
from edge_server.pipeline.event_log import EventLog
sys.path[:0] = sys.argv[3:]
from integration.test_mqtt_events import Device
from edge_server.settings import Mqtt
import msgspec
mqtt = msgspec.json.decode(sys.argv[1], type=Mqtt)
each = Device(mqtt, Path(sys.argv[2]))
each.start()
each.put(10)
sys.stdin.readline()
ballast = open(sys.argv[2] + "/ballast", "wb", buffering=0)
try:
    while True:
        ballast.write(bytes(4096))
except OSError:
    pass
each.put(500)
print("full", flush=True)
sys.stdin.readline()
ballast.truncate(0)
each.put(10)
print("free", flush=True)
sys.stdin.readline()
each.stop()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system of its own needs root")
def test_no_event_is_lost_where_the_disk_is_full(
    mqtt: Mqtt, subscriber: Subscriber, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    root = Path(__file__).parents[2]
    script = 'mount -t tmpfs -o size=256k none "$0" && exec "$@"'
    settings = msgspec.json.encode(mqtt).decode()
    with subprocess.Popen(
        [
            *("unshare", "--mount", "sh", "-c", script, disk),
            *(sys.executable, "-c", FULL, settings, disk, root, root / "tests"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
    ) as daemon:
        assert daemon.stdin is not None
        assert daemon.stdout is not None
        assert daemon.stderr is not None
        subscriber.wait_for(10)
        daemon.stdin.write("\n")
        daemon.stdin.flush()
        assert daemon.stdout.readline() == "full\n", daemon.stderr.read()
        subscriber.wait_for(510)
        daemon.stdin.write("\n")
        daemon.stdin.flush()
        assert daemon.stdout.readline() == "free\n"
        subscriber.wait_for(520)
        said = daemon.communicate("\n")[1]
        assert "events: cannot be written: No space left on device" in said
    assert daemon.returncode == 0
    assert subscriber.ids == [*range(1, 521)]
