"""Publisher against a real mosquitto that is present, absent, killed, frozen and unfriendly."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import paho.mqtt.client as paho
import pytest
from google.protobuf import json_format
from support.lane_frames import lane_frame
from support.waiting import TIMEOUT_S, wait_until

from edge_server.board.board import Identity
from edge_server.inference.registry import ModelEntry, ModelState
from edge_server.mqtt.connection import KEEPALIVE_S
from edge_server.mqtt.link import WINDOW
from edge_server.mqtt.publisher import Publisher
from edge_server.pipeline.event_log import Event, EventLog
from edge_server.proto.edge.lanes.v1 import lanes_pb2
from edge_server.settings import Mqtt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.certificates import Authority
    from support.mosquitto import Mosquitto

    from edge_server.lanes.types import LaneFrame

ROOT = "edge/v1/truck-7"
CONNACK, PINGREQ, PINGRESP = b"\x20\x03\x00\x00\x00", b"\xc0\x00", b"\xd0\x00"
IDENTITY = Identity("truck-7", "0.1.0", "boot", "edge-truck-7-test")
# The publishers' clock stands still, so that no frame grows old on a busy machine.
NOW_NS = time.monotonic_ns()


def frame(frame_id: int = 0, camera: str = "front", age_ns: int = 0) -> LaneFrame:
    return lane_frame(frame_id, camera, capture_mono_ns=NOW_NS - age_ns)


class Received:
    """What came, in order, and a way to wait for more."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._changed = threading.Condition()

    def add(self, item: Any) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def matching(self, wanted: Callable[[Any], bool]) -> list[Any]:
        with self._changed:
            return [item for item in self._items if wanted(item)]

    def wait_for(self, wanted: Callable[[Any], bool]) -> Any:
        with self._changed:
            found = self._changed.wait_for(
                lambda: next((item for item in self._items if wanted(item)), None), TIMEOUT_S
            )
            assert found is not None, f"never came; {len(self._items)} did: {self._items[-5:]}"
            return found


@contextlib.contextmanager
def listening(broker: Mosquitto, topic: str = f"{ROOT}/#", **login: str) -> Iterator[Received]:
    """A subscriber whose subscription the broker has confirmed."""
    inbox = Received()
    subscribed = threading.Event()
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    client.on_connect = lambda client, *_: client.subscribe(topic, qos=1)
    client.on_subscribe = lambda *_: subscribed.set()
    client.on_message = lambda _client, _data, message: inbox.add(message)
    if login:
        client.username_pw_set(**login)
    client.connect(broker.host, broker.port)
    client.loop_start()
    try:
        assert subscribed.wait(TIMEOUT_S)
        yield inbox
    finally:
        client.disconnect()
        client.loop_stop()


@contextlib.contextmanager
def publishing(broker: Mosquitto, **more: Any) -> Iterator[Publisher]:
    keepalive_s = more.pop("keepalive_s", KEEPALIVE_S)
    settings = Mqtt(broker.host, broker.port, **{key: str(value) for key, value in more.items()})
    publisher = Publisher(settings, IDENTITY, now_ns=lambda: NOW_NS, keepalive_s=keepalive_s)
    publisher.start()
    publisher.publish_online()
    try:
        yield publisher
    finally:
        publisher.stop()
    # Its end waits no longer than a stop of the daemon may; a busy machine takes longer.
    wait_until(lambda: not any(worker.alive for worker in publisher.workers()))
    assert [worker.failure for worker in publisher.workers()] == [None]


@pytest.fixture
def log() -> Iterator[Received]:
    """The log lines of the room, as (level, text)."""
    inbox = Received()

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            inbox.add((record.levelname, record.getMessage()))

    handler = Listen()
    logger = logging.getLogger("edge_server.mqtt")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield inbox
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def with_fields(topic: str, **fields: object) -> Callable[[Any], bool]:
    """A message on `topic` whose JSON has these fields."""
    return lambda message: (
        message.topic == f"{ROOT}/{topic}"
        and fields.items() <= json.loads(message.payload or b"{}").items()
    )


def line(level: str, part: str) -> Callable[[tuple[str, str]], bool]:
    return lambda entry: entry[0] == level and part in entry[1]


def publish_until_full(publisher: Publisher, fed: Iterator[int]) -> None:
    """Publish until the sockets to a frozen broker take no more for now, or it was given up."""
    connection = publisher._link._connection
    assert connection is not None
    give_up = time.monotonic() + TIMEOUT_S
    while connection.in_flight < WINDOW and connection.end is None:
        assert time.monotonic() < give_up, "the freeze never bit"
        publisher.publish_lanes(frame(next(fed)))
        time.sleep(0.0005)  # the worker, which empties the outbox, wants its turn


ONLINE = with_fields("status", state="online")
OFFLINE = with_fields("status", state="offline")


def test_lanes_arrive_live_and_parse(mosquitto: Mosquitto) -> None:
    with listening(mosquitto) as inbox, publishing(mosquitto) as publisher:
        inbox.wait_for(ONLINE)
        assert publisher.connected
        publisher.publish_lanes(frame(7))
        message = inbox.wait_for(with_fields("cameras/front/lanes", frame_id=7))
        assert (message.qos, message.retain) == (0, False)
        assert message.properties.MessageExpiryInterval == 1
        assert message.properties.ContentType == "application/json"
        assert message.properties.PayloadFormatIndicator == 1
        # A bell that rings on spins.
        wait_until(lambda: not select.select([publisher._link._wake], [], [], 0)[0])
        lanes = json_format.Parse(message.payload, lanes_pb2.LaneFrame())
        assert len(lanes.lanes) == 4
        assert len(lanes.lanes[0].image_points.x) == 72
    assert (publisher.published, publisher.dropped) == (1, 0)


def test_lanes_are_protobufs_where_the_settings_choose_that(mosquitto: Mosquitto) -> None:
    lanes_topic = f"{ROOT}/cameras/front/lanes"
    with (
        listening(mosquitto, lanes_topic) as inbox,
        publishing(mosquitto, payload="protobuf") as publisher,
    ):
        publisher.publish_lanes(frame(7))
        message = inbox.wait_for(lambda message: message.topic == lanes_topic)
        assert message.properties.ContentType == (
            "application/x-protobuf; messageType=edge.lanes.v1.LaneFrame"
        )
        assert message.properties.PayloadFormatIndicator == 0
        lanes = lanes_pb2.LaneFrame.FromString(message.payload)
        assert (lanes.frame_id, len(lanes.lanes)) == (7, 4)
        assert lanes.status == lanes_pb2.FRAME_STATUS_OK


def test_stop_publishes_offline(mosquitto: Mosquitto) -> None:
    with listening(mosquitto) as inbox:
        with publishing(mosquitto):
            inbox.wait_for(ONLINE)
        inbox.wait_for(OFFLINE)
    with listening(mosquitto) as late:
        assert late.wait_for(OFFLINE).retain


def test_the_broker_publishes_offline_after_an_abrupt_end(mosquitto: Mosquitto) -> None:
    program = (
        "import sys\n"
        "from edge_server.mqtt.publisher import Publisher\n"
        "from edge_server.board.board import Identity\n"
        "from edge_server.settings import Mqtt\n"
        "identity = Identity('truck-7', '1', 'b', 'c')\n"
        "p = Publisher(Mqtt('127.0.0.1', int(sys.argv[1])), identity)\n"
        "p.start()\n"
        "p.publish_online()\n"
        "sys.stdin.read()\n"
    )
    with (
        listening(mosquitto) as inbox,
        subprocess.Popen(
            [sys.executable, "-c", program, str(mosquitto.port)], stdin=subprocess.PIPE
        ) as process,
    ):
        inbox.wait_for(ONLINE)
        process.send_signal(signal.SIGKILL)
        inbox.wait_for(OFFLINE)
    with listening(mosquitto) as late:
        assert late.wait_for(OFFLINE).retain


def test_a_broker_that_forgot_everything_gets_it_again(mosquitto: Mosquitto, log: Received) -> None:
    with publishing(mosquitto) as publisher:
        publisher.publish_camera_status("front", "ok", 33)
        publisher.publish_model_state("laneDetect_model", "LOADING")
        with listening(mosquitto) as inbox:
            inbox.wait_for(with_fields("models/laneDetect_model/state", state="LOADING"))
        mosquitto.kill()
        log.wait_for(line("WARNING", "mqtt: lost"))
        assert not publisher.connected
        publisher.publish_model_state("laneDetect_model", "READY")
        mosquitto.start()
        with listening(mosquitto) as inbox:
            inbox.wait_for(ONLINE)
            inbox.wait_for(with_fields("meta", boot_id="boot"))
            inbox.wait_for(with_fields("cameras/front/status", state="ok", last_frame_age_ms=33))
            inbox.wait_for(with_fields("models/laneDetect_model/state", state="READY"))
            assert not inbox.matching(with_fields("models/laneDetect_model/state", state="LOADING"))


def test_what_an_earlier_run_has_left_is_taken_away_once_the_new_one_is_online(
    mosquitto: Mosquitto,
) -> None:
    with publishing(mosquitto) as before:
        before.publish_models([ModelEntry("gone", 1, ModelState.READY)])
        before.publish_models(
            [ModelEntry("gone", 1, ModelState.READY), ModelEntry("stays", 1, ModelState.READY)]
        )
        before.publish_camera_status("gone", "ok", 33)
        with listening(mosquitto) as inbox:
            inbox.wait_for(with_fields("models/gone/state", state="READY"))
            inbox.wait_for(with_fields("cameras/gone/status", state="ok"))
            inbox.wait_for(with_fields("models/stays/state", state="READY"))
    with listening(mosquitto) as inbox:
        now = Publisher(Mqtt("127.0.0.1", mosquitto.port), IDENTITY)
        now.start()
        inbox.wait_for(with_fields("status", state="starting"))
        now.publish_models([ModelEntry("stays", 1, ModelState.LOADING)])
        inbox.wait_for(with_fields("models/stays/state", state="LOADING"))
        assert not inbox.matching(lambda m: not m.payload), "it is not known yet what is gone"
        now.publish_models([ModelEntry("stays", 1, ModelState.READY)])
        now.publish_online()
        for topic in ("models/gone/state", "cameras/gone/status"):
            inbox.wait_for(lambda m, topic=topic: (m.topic, m.payload) == (f"{ROOT}/{topic}", b""))
        now.stop()
    with listening(mosquitto) as late:
        late.wait_for(OFFLINE)
        late.wait_for(with_fields("meta"))
        late.wait_for(with_fields("models/stays/state", state="READY"))
        kept = {message.topic.removeprefix(f"{ROOT}/") for message in late.matching(lambda _: True)}
    assert kept == {"status", "meta", "models/stays/state"}


def test_a_broker_that_appears_late_is_found(stopped_mosquitto: Mosquitto, log: Received) -> None:
    with publishing(stopped_mosquitto) as publisher:
        entry = log.wait_for(line("WARNING", "mqtt: cannot reach"))
        assert entry[1].endswith(": Connection refused; trying again")
        for n in range(1000):
            publisher.publish_lanes(frame(n))
        assert not publisher.connected
        assert (publisher.published, publisher.dropped) == (0, 999)
        stopped_mosquitto.start()
        log.wait_for(line("INFO", "mqtt: connected"))
        with listening(stopped_mosquitto) as inbox:
            inbox.wait_for(ONLINE)
            publisher.publish_lanes(frame(5000))
            inbox.wait_for(with_fields("cameras/front/lanes", frame_id=5000))
    assert len(log.matching(line("WARNING", "cannot reach"))) == 1, "one line per change of state"


def test_a_frozen_broker_costs_lanes_and_nothing_else(mosquitto: Mosquitto) -> None:
    with listening(mosquitto) as inbox, publishing(mosquitto, keepalive_s=30) as publisher:
        inbox.wait_for(ONLINE)
        mosquitto.freeze()
        connection = publisher._link._connection
        assert connection is not None
        fed = itertools.count()
        publish_until_full(publisher, fed)
        for _ in range(5000):
            publisher.publish_lanes(frame(next(fed)))
        last = next(fed) - 1
        assert connection.in_flight <= WINDOW
        assert publisher._outbox.waiting <= 1
        assert publisher.dropped > 4500
        assert publisher.published < 200, "what the sockets hold, some 1 MB"
        mosquitto.thaw()
        inbox.wait_for(with_fields("cameras/front/lanes", frame_id=last))
        arrived = [
            json.loads(m.payload) for m in inbox.matching(with_fields("cameras/front/lanes"))
        ]
        assert arrived[-1]["frame_id"] == last
        assert [a["seq"] for a in arrived] == sorted(a["seq"] for a in arrived)
    assert publisher.published == len(arrived)
    assert publisher.published + publisher.dropped == last + 1


def test_a_broker_that_never_thaws_is_given_up(mosquitto: Mosquitto, log: Received) -> None:
    with publishing(mosquitto, keepalive_s=1) as publisher:
        log.wait_for(line("INFO", "mqtt: connected"))
        mosquitto.freeze()
        fed = itertools.count()
        publish_until_full(publisher, fed)
        while publisher.connected:  # a camera goes on, so something is cut off in flight
            publisher.publish_lanes(frame(next(fed)))
            time.sleep(0.005)
        log.wait_for(line("WARNING", "mqtt: lost"))
        waiting = len(publisher._outbox._live)
        assert publisher.published + publisher.dropped + waiting == next(fed), "one is unaccounted"


def test_a_broker_that_only_responds_to_pings_is_given_up(log: Received) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        publisher = Publisher(Mqtt("127.0.0.1", server.getsockname()[1]), IDENTITY, keepalive_s=1)
        publisher.start()
        said = line("WARNING", "edge/v1/truck-7/status not acknowledged for 3 s")
        give_up = time.monotonic() + TIMEOUT_S
        # Where the responses come too late, that ends a connection, and there is another one.
        while not log.matching(said):
            assert time.monotonic() < give_up, log.matching(lambda _: True)
            peer, _ = server.accept()
            with peer, contextlib.suppress(ConnectionError):
                peer.settimeout(TIMEOUT_S)
                peer.sendall(CONNACK)
                while received := peer.recv(4096):
                    if received.endswith(PINGREQ):
                        peer.sendall(PINGRESP)
            log.wait_for(line("WARNING", "mqtt: lost"))
        publisher.stop()


def test_a_frame_older_than_its_expiry_is_not_sent(mosquitto: Mosquitto) -> None:
    with listening(mosquitto) as inbox, publishing(mosquitto) as publisher:
        inbox.wait_for(ONLINE)
        publisher.publish_lanes(frame(1, "rear", 1_100_000_000))
        publisher.publish_lanes(frame(2, "front"))
        inbox.wait_for(with_fields("cameras/front/lanes", frame_id=2))
    assert (publisher.published, publisher.dropped) == (1, 1)


def test_that_there_are_no_lanes_is_sent_however_old_the_last_frame_is(
    mosquitto: Mosquitto,
) -> None:
    with listening(mosquitto) as inbox, publishing(mosquitto) as publisher:
        inbox.wait_for(ONLINE)
        old = frame(1, "rear", 60_000_000_000)
        publisher.publish_lanes(replace(old, lanes=(), failure="no picture"))
        inbox.wait_for(with_fields("cameras/rear/lanes", frame_id=1, status="FRAME_STATUS_INVALID"))


def test_a_bad_password_is_logged_once_and_crashes_nothing(
    mosquitto_with: Callable[..., Mosquitto], tmp_path: Path, log: Received
) -> None:
    if shutil.which("mosquitto_passwd") is None:
        pytest.skip("no mosquitto_passwd on this machine: apt install mosquitto")
    users = tmp_path / "users"
    subprocess.run(["mosquitto_passwd", "-b", "-c", users, "edge", "right"], check=True)
    broker = mosquitto_with("allow_anonymous false", f"password_file {users}")
    password = tmp_path / "password"
    password.write_text("wrong\n")
    login: dict[str, Any] = {"username": "edge", "password_file": password}
    with publishing(broker, **login) as publisher:
        log.wait_for(line("ERROR", f"127.0.0.1:{broker.port} refuses us: Not authorized"))
        publisher.publish_lanes(frame())
        assert not publisher.connected
    password.write_text("right\n")
    reader = {"username": "edge", "password": "right"}
    with publishing(broker, **login), listening(broker, **reader) as inbox:
        inbox.wait_for(ONLINE)
    assert not log.matching(lambda entry: "wrong" in entry[1] or "right" in entry[1])


def test_a_topic_the_broker_denies_is_logged(
    mosquitto_with: Callable[..., Mosquitto], tmp_path: Path, log: Received
) -> None:
    rules = tmp_path / "acl"
    rules.write_text(f"topic read #\ntopic write {ROOT}/status\n")
    broker = mosquitto_with("allow_anonymous true", f"acl_file {rules}")
    with publishing(broker) as publisher:
        log.wait_for(line("ERROR", f"{ROOT}/meta"))
        publisher.publish_camera_status("front", "ok", 1)
        publisher.publish_camera_status("front", "ok", 2)
        log.wait_for(line("ERROR", f"{ROOT}/cameras/front/status"))
        assert publisher.connected
    assert len(log.matching(line("ERROR", "refuses it: Not authorized"))) == 2


def test_a_message_that_the_broker_takes_no_packet_for_is_left_out_and_reported_once(
    mosquitto_with: Callable[..., Mosquitto], log: Received
) -> None:
    broker = mosquitto_with("allow_anonymous true", "max_packet_size 600")
    with listening(broker) as inbox, publishing(broker) as publisher:
        inbox.wait_for(ONLINE)
        publisher.publish_model_state("lanes", "READY")
        inbox.wait_for(with_fields("models/lanes/state", state="READY"))
        publisher.publish_model_state("lanes", "UNAVAILABLE", "why " * 200)
        publisher.publish_lanes(frame(0))
        log.wait_for(line("ERROR", f"{ROOT}/cameras/front/lanes: not published"))
        publisher.publish_lanes(frame(1))
        publisher.publish_camera_status("front", "ok", 1)
        inbox.wait_for(with_fields("cameras/front/status", state="ok"))
        inbox.wait_for(lambda m: m.topic == f"{ROOT}/models/lanes/state" and not m.payload)
        assert publisher.connected
        assert publisher.dropped
    assert len(log.matching(line("ERROR", f"{ROOT}/cameras/front/lanes: not published"))) == 1
    assert len(log.matching(line("ERROR", "max_packet_size"))) == 2
    assert not log.matching(line("WARNING", "lost"))


def test_tls_trusts_the_given_authority_only(
    mosquitto_with: Callable[..., Mosquitto], tmp_path: Path, log: Received
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    for name in ("ours", "other"):
        request = (
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 "
            f"-subj /CN={name} -addext subjectAltName=IP:127.0.0.1"
        )

        files = ["-keyout", tmp_path / f"{name}.key", "-out", tmp_path / f"{name}.pem"]
        subprocess.run(["openssl", *request.split(), *files], check=True, capture_output=True)
    broker = mosquitto_with(
        f"certfile {tmp_path}/ours.pem", f"keyfile {tmp_path}/ours.key", "allow_anonymous true"
    )
    with publishing(broker, ca_file=tmp_path / "ours.pem"):
        log.wait_for(line("INFO", "mqtt: connected"))
    with publishing(broker, ca_file=tmp_path / "other.pem"):
        log.wait_for(line("WARNING", "CERTIFICATE_VERIFY_FAILED"))
    with publishing(broker, ca_file=tmp_path / "absent.pem"):
        log.wait_for(line("WARNING", "No such file"))


def test_a_broker_may_require_a_certificate_of_ours(
    mosquitto_with: Callable[..., Mosquitto], authority: Authority, log: Received
) -> None:
    its_cert, its_key = authority.issue("broker")
    our_cert, our_key = authority.issue("truck-7")
    broker = mosquitto_with(
        *(f"certfile {its_cert}", f"keyfile {its_key}", f"cafile {authority.ca}"),
        *("require_certificate true", "allow_anonymous true"),
    )
    with publishing(broker, ca_file=authority.ca, cert_file=our_cert, key_file=our_key):
        log.wait_for(line("INFO", "mqtt: connected"))
    with publishing(broker, ca_file=authority.ca) as publisher:
        log.wait_for(lambda entry: entry[0] == "WARNING" and "connected" not in entry[1])
        assert not publisher.connected


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x20\x06\x00\x00\x03\xff\xff\xff"]
)
def test_something_that_is_no_broker_is_left_and_tried_again(answer: bytes, log: Received) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        publisher = Publisher(Mqtt("127.0.0.1", server.getsockname()[1]), IDENTITY)
        publisher.start()
        try:
            for _ in range(2):
                peer, _ = server.accept()
                with peer:
                    assert peer.recv(4096)[:1] == b"\x10", "CONNECT"
                    peer.sendall(answer)
                    with contextlib.suppress(OSError):  # the publisher has gone by itself
                        peer.shutdown(socket.SHUT_WR)
                    log.wait_for(line("WARNING", "mqtt: cannot reach"))
        finally:
            publisher.stop()
    assert [worker.failure for worker in publisher.workers()] == [None]
    assert len(log.matching(line("WARNING", ""))) == 1, "one line per change of state"


def started(broker: Mosquitto, identity: Identity) -> Publisher:
    publisher = Publisher(Mqtt(broker.host, broker.port), identity)
    publisher.start()
    publisher.publish_online()
    return publisher


def test_two_with_one_client_id_do_not_fight_for_ever(mosquitto: Mosquitto, log: Received) -> None:
    both = [started(mosquitto, IDENTITY) for _ in range(2)]
    try:
        log.wait_for(lambda entry: "each ends the other's connection" in entry[1])
        wait_until(lambda: any(each.taken_over for each in both))
        found = next(each for each in both if each.contested)
        assert "device.id (--device-id)" in found.state
    finally:
        for publisher in both:
            publisher.stop()


def test_two_machines_with_one_name_hide_no_event_of_each_other(mosquitto: Mosquitto) -> None:
    logs = [EventLog(), EventLog()]
    for log, count in zip(logs, (3, 30), strict=True):
        for _ in range(count):
            log.put(Event("model", "instant", "served", "", 1, 2, model="m"))
        log._end()
    with listening(mosquitto, f"{ROOT}/events/#") as inbox:
        for _ in range(2):
            for number, log in enumerate(logs):
                log.put(Event("model", "instant", "served", "", 1, 2, model="m"))
                log._end()
                identity = replace(IDENTITY, client_id=f"edge-{number}")
                publisher = Publisher(Mqtt(mosquitto.host, mosquitto.port), identity, events=log)
                publisher.start()
                publisher.publish_online()
                last = {"log": log.id, "id": str(log.newest)}
                inbox.wait_for(with_fields("events/model", **last))
                publisher.stop()
        found = [json.loads(message.payload) for message in inbox.matching(lambda _: True)]
    for log in logs:
        assert {int(each["id"]) for each in found if each["log"] == log.id} == {
            each.id for each in log.after(0)
        }


def test_two_machines_with_one_name_are_named_by_both(mosquitto: Mosquitto, log: Received) -> None:
    first = started(mosquitto, IDENTITY)
    wait_until(lambda: first.connected)
    second = started(mosquitto, replace(IDENTITY, client_id="edge-other"))
    try:
        wait_until(lambda: first.contested and second.contested)
        assert first.connected
        assert second.connected
        assert "another machine publishes as 'truck-7'" in second.state
    finally:
        first.stop()
        second.stop()
