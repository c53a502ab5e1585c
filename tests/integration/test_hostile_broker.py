"""A broker that breaks the protocol, retains junk or floods costs its connection at most: the
publisher says why, and connects again."""

from __future__ import annotations

import contextlib
import logging
import ssl
import struct
from typing import TYPE_CHECKING

import pytest
from support.lane_frames import lane_frame
from support.scripted_broker import ScriptedBroker, header, packet, retained
from support.waiting import wait_until

from edge_server.board.board import Identity
from edge_server.mqtt.clients import try_broker
from edge_server.mqtt.publisher import Publisher
from edge_server.pipeline import messages
from edge_server.pipeline.event_log import Event, EventLog
from edge_server.pipeline.vehicle import VehicleInputs
from edge_server.settings import Mqtt

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from support.certificates import Authority

IDENTITY = Identity("truck-7", "0.1.0", "boot", "edge-truck-7-hostile")
ROOT = "edge/v1/truck-7"
LANES = f"{ROOT}/cameras/front/lanes"
RECEIVE_MAXIMUM, MAXIMUM_PACKET_SIZE = 0x21, 0x27
JUNK = {
    "nothing": b"",
    "bytes": b"\xff\0\xfe",
    "null": b"null",
    "an array": b"[]",
    "a number": b"7",
    "deep": b"[" * 30_000,
    "deep objects": b'{"x":' * 9_000,
    "deep within": b'{"x":' + b"[" * 30_000,
    "a mark below all": b'{"event":"-5","log":"x"}',
    "a mark beyond all": b'{"event":"9223372036854775807","log":"x"}',
    "a mark of many digits": b'{"event":"%s","log":"x"}' % (b"9" * 30_000),
    "a mark of other types": b'{"event":{},"log":[]}',
    "a birth of other types": b'{"session":["x"],"client_id":7}',
    "a state of other types": b'{"speed_mps":[1],"mono_ns":{}}',
    "long": b"x" * 60_000,
}


@contextlib.contextmanager
def publishing(
    broker: ScriptedBroker, events: EventLog | None = None, ca_file: str | None = None
) -> Iterator[Publisher]:
    publisher = Publisher(
        Mqtt("127.0.0.1", broker.port, vehicle_state=True, ca_file=ca_file),
        IDENTITY,
        events=events,
        vehicle=VehicleInputs(),
    )
    publisher.start()
    publisher.publish_online()
    try:
        yield publisher
    finally:
        workers = publisher.workers()
        publisher.stop()
    assert [worker.failure for worker in workers] == [None]


def lanes_arrive(publisher: Publisher, broker: ScriptedBroker) -> None:
    """Publish frames until one has arrived that was not published yet now."""
    before = sum(topic == LANES for topic, _ in tuple(broker.published))

    def new_ones() -> bool:
        publisher.publish_lanes(lane_frame(1))
        return sum(topic == LANES for topic, _ in tuple(broker.published)) > before

    wait_until(new_ones)


@pytest.mark.parametrize(
    "topic",
    [
        f"{ROOT}/models/+/state",
        f"{ROOT}/models/#/state",
        f"{ROOT}/models/a\0b/state",
        f"{ROOT}/models/{'m' * 60_000}/state",
        f"{ROOT}/models/\N{MIDDLE DOT}/state",
        f"{ROOT}/cameras/front/lanes",
        f"{ROOT}/status",
        "edge/v1/truck-8/models/m/state",
        "$SYS/models/m/state",
        "",
    ],
)
def test_a_retained_topic_that_is_no_state_of_ours_is_left_alone(topic: str) -> None:
    def subscribed(client: socket.socket) -> None:
        client.sendall(retained(topic.encode()) + retained(f"{ROOT}/models/gone/state".encode()))

    with ScriptedBroker(subscribed=subscribed) as broker, publishing(broker) as publisher:
        wait_until(lambda: (f"{ROOT}/models/gone/state", b"") in broker.published)
        lanes_arrive(publisher, broker)
        assert broker.clients == 1
    assert (topic, b"") not in broker.published


@pytest.mark.parametrize("name", ["vehicle", "meta"])
def test_a_flood_is_left_and_not_read_again(name: str, caplog: pytest.LogCaptureFixture) -> None:
    flood = b"\x30" + retained(f"{ROOT}/{name}".encode())[1:]

    def subscribed(client: socket.socket) -> None:
        client.sendall(flood * 5000)

    events = EventLog()
    events.put(Event("model", "instant", "served", "", 1, 2, model="m"))
    events._tick(0.0)
    with ScriptedBroker(subscribed=subscribed) as broker, publishing(broker, events) as publisher:
        wait_until(lambda: "nothing is read for 60 s" in caplog.text)
        lanes_arrive(publisher, broker)
        wait_until(lambda: f"{ROOT}/events/model" in broker.topics())
    assert caplog.text.count("nothing is read for 60 s") == 1


def test_a_topic_that_is_no_text_ends_the_connection_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def subscribed(client: socket.socket) -> None:
        if broker.clients == 1:
            client.sendall(retained(b"\xff\xfe"))

    with ScriptedBroker(subscribed=subscribed) as broker, publishing(broker) as publisher:
        wait_until(lambda: broker.clients >= 2)
        lanes_arrive(publisher, broker)
    assert "UnicodeDecodeError" in caplog.text


@pytest.mark.parametrize("payload", JUNK.values(), ids=JUNK)
def test_what_is_retained_may_be_anything(payload: bytes) -> None:
    def subscribed(client: socket.socket) -> None:
        for name in ("acknowledged", "meta", "vehicle"):
            message = retained(f"{ROOT}/{name}".encode(), payload)
            client.sendall(message + b"\x30" + message[1:])

    events = EventLog()
    events.put(Event("model", "instant", "served", "", 1, 2, model="m"))
    events.worker.start()
    with ScriptedBroker(subscribed=subscribed) as broker, publishing(broker, events) as publisher:
        wait_until(lambda: f"{ROOT}/events/model" in broker.topics())
        lanes_arrive(publisher, broker)
        assert broker.clients == 1
    events.stop()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (header(0x31, 200 << 20), "a packet of 209715205 bytes, and 65536 are the most"),
        (packet(0x32, b"\0\1a\0\1\0"), "a message of QoS 1, and QoS 0 is subscribed"),
        (packet(0x34, b"\0\1a\0\1\0"), "a message of QoS 2, and QoS 0 is subscribed"),
        (packet(0x62, b"\0\1"), "0x62"),
        (packet(0xF0, b"\0\0"), "0xf0"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "0x48"),
    ],
    ids=["too large", "QoS 1", "QoS 2", "PUBREL", "AUTH", "HTTP"],
)
def test_what_this_client_has_not_agreed_to_ends_the_connection_at_its_header(
    sent: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    most = 64 << 20
    taken = 0

    def subscribed(client: socket.socket) -> None:
        nonlocal taken
        if broker.clients > 1:
            return
        client.sendall(sent)
        with contextlib.suppress(ConnectionError):
            while taken < most:
                taken += client.send(bytes(1 << 20))

    with ScriptedBroker(subscribed=subscribed) as broker, publishing(broker) as publisher:
        wait_until(lambda: broker.clients >= 2)
        lanes_arrive(publisher, broker)
    assert reason in caplog.text
    assert taken < most, "what the kernel's buffers hold, some 6 MiB"


def test_a_header_is_judged_within_tls_too(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = authority.issue("broker")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)

    def subscribed(client: socket.socket) -> None:
        if broker.clients == 1:
            client.sendall(retained(f"{ROOT}/models/gone/state".encode()) + header(0x31, 200 << 20))

    with (
        ScriptedBroker(subscribed=subscribed, tls=tls) as broker,
        publishing(broker, ca_file=str(authority.ca)) as publisher,
    ):
        wait_until(lambda: broker.clients >= 2)
        lanes_arrive(publisher, broker)
    assert "a packet of 209715205 bytes" in caplog.text


@pytest.mark.parametrize(
    ("properties", "name"),
    [
        (struct.pack("!BH", RECEIVE_MAXIMUM, 0), "ReceiveMaximum"),
        (struct.pack("!BI", MAXIMUM_PACKET_SIZE, 0), "MaximumPacketSize"),
    ],
)
def test_a_limit_of_nothing_is_an_error_of_the_protocol(
    properties: bytes, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedBroker(properties=properties) as broker, publishing(broker) as publisher:
        wait_until(lambda: broker.clients >= 2)
        assert f"{name} property value" in publisher.state
        publisher.stop()
        found = try_broker(Mqtt("127.0.0.1", broker.port), "check")
    assert f"{name} property value" in found.fault
    assert f"cannot reach 127.0.0.1:{broker.port}: a protocol error: " in caplog.text


def test_an_error_of_publishing_ends_the_connection_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> bytes:
        raise ZeroDivisionError("of this frame")

    with ScriptedBroker() as broker, publishing(broker) as publisher:
        wait_until(lambda: publisher.connected)
        with monkeypatch.context() as patched:
            patched.setattr(messages, "frame_payload", broken)
            publisher.publish_lanes(lane_frame(0))
            wait_until(lambda: broker.clients >= 2)
        lanes_arrive(publisher, broker)
    assert "lost 127.0.0.1" in caplog.text
    assert "ZeroDivisionError: of this frame" in caplog.text


def test_an_event_that_no_topic_can_hold_stops_no_other_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events = EventLog()
    for camera in ("Front Left", "front"):
        events.put(Event("camera", "instant", "ok", "", 1, 2, camera=camera))
    events.worker.start()
    with ScriptedBroker() as broker, publishing(broker, events):
        wait_until(lambda: f"{ROOT}/cameras/front/events/camera" in broker.topics())
        assert broker.clients == 1
    events.stop()
    assert "camera name 'Front Left'" in caplog.text


def test_a_subscription_without_an_answer_holds_no_event_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events = EventLog()
    events.put(Event("model", "instant", "served", "", 1, 2, model="m"))
    events.worker.start()
    with (
        ScriptedBroker(answers_subscriptions=False) as broker,
        publishing(broker, events) as publisher,
    ):
        wait_until(lambda: f"{ROOT}/events/model" in broker.topics())
        lanes_arrive(publisher, broker)
        assert broker.clients == 1
    events.stop()
    assert "has not answered a subscription" in caplog.text


@pytest.fixture(autouse=True)
def caplog_at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="edge_server.mqtt")
