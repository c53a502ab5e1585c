"""What the publisher makes of many; with a broker it is tested among the integration tests."""

from __future__ import annotations

import json
import os
import socket
import ssl
import threading
import time
from dataclasses import replace
from typing import NamedTuple

import pytest
from google.protobuf import json_format

from edge_server.board.board import Identity
from edge_server.cameras.calibration import Calibration
from edge_server.inference.registry import ModelEntry, ModelState
from edge_server.lanes.camera_model import CameraModel, Lens, Mounting
from edge_server.mqtt import link as linking
from edge_server.mqtt import payloads
from edge_server.mqtt.broker import reason_of
from edge_server.mqtt.connection import Connection
from edge_server.mqtt.payloads import Topics
from edge_server.mqtt.publisher import Publisher
from edge_server.pipeline.vehicle import VehicleInputs
from edge_server.proto.edge.lanes.v1 import lane_service_pb2
from edge_server.settings import Mqtt

CALIBRATION = Calibration(
    "ab12",
    CameraModel(Lens("pinhole", 1280, 720, 900, 900, 640, 360, (0,) * 5), Mounting(1.4, 0.02)),
)
IDENTITY = Identity("truck-7", "1", "boot", "client")


def test_of_a_models_versions_the_newest_that_serves_is_published() -> None:
    publisher = Publisher(Mqtt("127.0.0.1", 9), IDENTITY)
    waiting = publisher.waiting
    publisher.publish_models(
        [
            ModelEntry("a", 2, ModelState.READY),
            ModelEntry("a", 1, ModelState.READY),
            ModelEntry("a", 3, ModelState.UNAVAILABLE, "unloaded"),
            ModelEntry("b", 1, ModelState.UNAVAILABLE, "unloaded"),
            ModelEntry("b", 2, ModelState.LOADING, "building"),
        ]
    )
    assert publisher.waiting == waiting + 2
    publisher.stop()
    sent = {}
    while (state := publisher._outbox.take_state()) is not None:
        sent[state[0].removeprefix("edge/v1/truck-7/models/")] = json.loads(state[1])
    assert sent["a/state"] == {"model": "a", "state": "READY", "reason": ""}
    assert sent["b/state"] == {"model": "b", "state": "LOADING", "reason": "building"}


def test_the_topic_of_a_model_that_is_gone_is_emptied() -> None:
    publisher = Publisher(Mqtt("127.0.0.1", 9), IDENTITY)
    publisher.publish_models([ModelEntry("a", 1, ModelState.READY)])
    topic = "edge/v1/truck-7/models/a/state"
    assert publisher._outbox.knows(topic)
    publisher.publish_models([])
    publisher.publish_models([])
    publisher.stop()
    sent = dict(iter(publisher._outbox.take_state, None))
    assert sent[topic] == b""
    assert not publisher._outbox.knows(topic)


def sent_states(publisher: Publisher) -> dict[str, bytes]:
    topics = dict(iter(publisher._outbox.take_state, None))
    return {topic.removeprefix("edge/v1/truck-7/"): payload for topic, payload in topics.items()}


def test_the_birth_message_names_cameras_calibrations_and_the_models_that_serve() -> None:
    publisher = Publisher(Mqtt("127.0.0.1", 9, payload="protobuf"), IDENTITY)
    publisher.publish_calibration("front", CALIBRATION)
    publisher.publish_calibration("rear", None)
    publisher.publish_models(
        [
            ModelEntry("a", 2, ModelState.READY),
            ModelEntry("a", 1, ModelState.READY),
            ModelEntry("b", 1, ModelState.UNAVAILABLE, "unloaded"),
        ]
    )
    sent = sent_states(publisher)
    meta = json.loads(sent["meta"])
    assert meta["payload"] == "protobuf"
    assert meta["cameras"] == [
        {"name": "front", "calib_id": "ab12"},
        {"name": "rear", "calib_id": ""},
    ]
    assert meta["models"] == [{"name": "a", "versions": ["1", "2"]}]
    calibration = json.loads(sent["cameras/front/calibration"])
    message = json_format.ParseDict(calibration, lane_service_pb2.Calibration())
    assert (message.id, message.fx, message.height_m) == ("ab12", 900, 1.4)
    assert "cameras/rear/calibration" not in sent
    publisher.publish_calibration("front", None)
    publisher.clear_camera("rear")
    sent = sent_states(publisher)
    assert sent["cameras/front/calibration"] == b""
    assert json.loads(sent["meta"])["cameras"] == [{"name": "front", "calib_id": ""}]
    publisher.stop()


def test_a_name_that_no_topic_can_hold_is_logged_once_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = Publisher(Mqtt("127.0.0.1", 9), IDENTITY)
    for _ in range(3):
        publisher.publish_models([ModelEntry(os.fsdecode(b"m\xff"), 1, ModelState.UNAVAILABLE)])
    publisher.stop()
    assert len(caplog.records) == 1


def test_name_servers_that_do_not_respond_are_waited_for_without_a_stuck_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called, answer = threading.Event(), threading.Event()
    really = socket.getaddrinfo

    def resolve(host: str, *more: object, **named: object) -> object:
        if host != "broker.example":
            return really(host, *more, **named)
        called.set()
        answer.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    publisher = Publisher(Mqtt("broker.example"), IDENTITY)
    publisher.start()
    assert called.wait(60)
    (worker,) = publisher.workers()
    assert not worker.stuck(time.monotonic() + 3600)
    publisher.stop()
    answer.set()
    worker.stop(60)
    assert not worker.alive
    assert worker.failure is None


def link_to(mqtt: Mqtt) -> linking.Link:
    return linking.Link(mqtt, linking.Feed(IDENTITY, Topics("truck-7")))


def test_a_connection_that_opens_after_stop_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, let_go, closed = threading.Event(), threading.Event(), threading.Event()

    class Late(Connection):
        def open(self) -> None:
            begun.set()
            let_go.wait(60)

        def close(self) -> None:
            super().close()
            closed.set()

    monkeypatch.setattr(linking, "Connection", Late)
    publisher = Publisher(Mqtt("127.0.0.1"), IDENTITY)
    publisher.start()
    assert begun.wait(60)
    publisher.stop()
    assert not closed.is_set()
    let_go.set()
    assert closed.wait(60)


@pytest.mark.parametrize(("code", "about_the_clock"), [(9, True), (10, True), (18, False)])
def test_a_certificate_of_another_time_may_be_the_clocks_fault(
    code: int, about_the_clock: bool
) -> None:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed: some reason")
    error.verify_code = code
    assert "certificate verify failed: some reason" in reason_of(error)
    assert ("is the clock of this device right?" in reason_of(error)) is about_the_clock


def test_the_vehicles_state_is_read_unless_it_is_retained_or_wrong(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics, vehicle = Topics("truck-7"), VehicleInputs()
    feed = linking.Feed(IDENTITY, topics, now_ns=lambda: 70, vehicle=vehicle)
    link = linking.Link(Mqtt("127.0.0.1", 9, vehicle_state=True), feed)

    def arrives(payload: bytes, *, retain: bool = False) -> float | None:
        link._hear(topics.vehicle, payload, retain)
        state = vehicle.at(70)
        return None if state is None else state.speed_mps

    assert arrives(b'{"speed_mps": 30}', retain=True) is None
    assert arrives(b'{"speed_mps": 21.5}') == 21.5
    assert arrives(b"not JSON") == 21.5
    assert [record.getMessage().partition(" SetVehicle")[0] for record in caplog.records] == [
        "mqtt: edge/v1/truck-7/vehicle: left out: this is no"
    ]
    # The next mistake has another number, and one of a bus comes many times a second.
    assert arrives(b'{"mono_ns": 99999999}') == 21.5
    assert len(caplog.records) == 1
    monkeypatch.setattr(linking, "_LEFT_OUT_EVERY_S", -1.0)
    assert arrives(b'{"mono_ns": 99999999}') == 21.5
    assert "mono_ns is 99999999" in caplog.text
    # It is no state of this device, which a new run would clear.
    assert not link._retained
    link.leave()


class Pause(NamedTuple):
    """How long a link waits after the loss of a connection, which is between these two."""

    least_s: float
    most_s: float


def pause_after(link: linking.Link, **ended: bool) -> Pause:
    connection = Connection(link.mqtt, "client")
    for name, value in ended.items():
        setattr(connection, name, value)
    before_s = time.monotonic()
    link._lose(connection, "gone")
    return Pause(link._retry_at - time.monotonic(), link._retry_at - before_s)


def test_the_pause_is_short_after_a_connection_that_carried_something() -> None:
    link = link_to(Mqtt("127.0.0.1"))
    assert max(pause_after(link).least_s for _ in range(9)) <= 5.0
    assert pause_after(link).most_s >= 2.5, "nothing shows that the broker is back"
    for _ in range(9):
        assert pause_after(link, acknowledged=True).least_s <= 0.5
    assert pause_after(link, refused=True).least_s <= 5.0
    link.leave()


class Lasting(Connection):
    def step(self, *_: object) -> None: ...


def last(link: linking.Link, seconds: float) -> None:
    """Have the present connection of the link be that old."""
    link._connection = Lasting(link.mqtt, "client")
    link._tick(link._ready_since + seconds)


def test_two_that_end_each_others_connection_pause_longer_and_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link = link_to(Mqtt("127.0.0.1"))
    feed, pauses = link._feed, []
    for _ in range(10):
        link.connected = True
        pauses.append(pause_after(link, acknowledged=True, taken_over=True))
    assert pauses[0].least_s <= 0.5, "that may have been this device's own earlier connection"
    assert pauses[1].most_s >= 2.5
    assert pauses[1].least_s <= 5.0
    assert pauses[-1].most_s >= 150.0
    assert pauses[-1].least_s <= 300.0
    assert feed.taken_over == 10
    assert "'client', and each ends the other's connection" in feed.contest
    assert "device.id (--device-id)" in feed.contest
    assert caplog.text.count("another client") == 1

    last(link, 599.0)
    assert feed.contest
    last(link, 601.0)
    assert not feed.contest
    link.connected = True
    assert pause_after(link, acknowledged=True, taken_over=True).least_s <= 0.5
    link.leave()


def test_a_broker_that_only_closes_is_seen_through_by_the_others_birth() -> None:
    link = link_to(Mqtt("127.0.0.1"))
    link._greet()
    link._hear(link._feed.topics.meta, payloads.meta(IDENTITY, "of the run before"), True)
    assert pause_after(link, acknowledged=True).least_s <= 0.5
    link._greet()
    link._hear(link._feed.topics.meta, payloads.meta(IDENTITY, "of the run before"), True)
    assert not link._feed.contest
    link._hear(link._feed.topics.meta, payloads.meta(IDENTITY, "of the other"), True)
    assert "each ends the other's connection" in link._feed.contest
    assert pause_after(link, acknowledged=True).most_s >= 2.5
    assert link._feed.taken_over == 1
    # The other is gone: a network that breaks costs no pause.
    link._greet()
    assert pause_after(link, acknowledged=True).least_s <= 0.5
    link._greet()
    link._hear(link._feed.topics.meta, payloads.meta(IDENTITY, "of a third"), True)
    assert link._feed.contest
    last(link, 601.0)
    assert not link._feed.contest
    link.leave()


def test_another_machine_with_this_name_is_named_once_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = Publisher(Mqtt("127.0.0.1", 9), IDENTITY)
    link, feed = publisher._link, publisher._feed
    assert link is not None
    link._connections = 1
    other = payloads.meta(replace(IDENTITY, client_id="its"), "of the other")
    sent_states(publisher)
    link._hear(feed.topics.meta, payloads.meta(IDENTITY, "of the run before"), True)
    link._hear(feed.topics.meta, payloads.meta(IDENTITY, feed.session), False)
    for nonsense in (b"", b"nonsense", b'{"session": 7}', b'{"nested": ' + b"[" * 30_000):
        link._hear(feed.topics.meta, nonsense, False)
    assert not publisher.contested
    link._hear(feed.topics.meta, other, False)
    link._hear(feed.topics.meta, other, False)
    assert publisher.contested
    assert caplog.text.count("another machine publishes as 'truck-7' too, logged in as 'its'") == 1
    assert list(sent_states(publisher)) == ["meta"], "the other one gets to know of this one"
    publisher.stop()
