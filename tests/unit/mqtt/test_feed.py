"""EventFeed: each event at least once, in order, whatever becomes of the connection."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest
from google.protobuf import json_format

from edge_server.board.board import Identity
from edge_server.mqtt import payloads
from edge_server.mqtt.link import SETTLED_S, EventFeed
from edge_server.mqtt.payloads import Topics
from edge_server.pipeline.event_log import Event, EventLog
from edge_server.proto.edge.lanes.v1 import events_pb2

IDENTITY = Identity("truck-7", "0.1.0", "5f1a7a3e-3f62-4c5c-9a55-1f0c4e0c9b11", "edge-truck-7-0")
DEPARTURE = Event(
    "lane_departure",
    "begin",
    "left",
    "the vehicle leaves its lane: its wheels are 0.31 m from the left boundary",
    81_234_567_890_123,
    1_790_000_000_123_456_789,
    id=41,
    camera="front",
    frame_id=1200,
    model="lane_detection",
    model_version="1",
    distance_to_line_m=0.31249,
    time_to_line_s=0.8,
)


def log_of(count: int) -> EventLog:
    log = EventLog()
    for number in range(count):
        log.put(replace(DEPARTURE, id=0, cause=str(number)))
    log._end()
    return log


def mark(id_: int, log: EventLog) -> payloads.Mark:
    return payloads.Mark(str(id_), log.id)


def taken(feed: EventFeed) -> list[int]:
    ids = []
    while (event := feed.take()) is not None:
        ids.append(event.id)
    return ids


def test_events_are_handed_out_once_and_in_order() -> None:
    feed = EventFeed(log_of(3))
    assert feed.waiting
    assert taken(feed) == [1, 2, 3]
    assert not feed.waiting


def test_a_new_connection_gets_what_is_not_settled() -> None:
    now_s = [0.0]
    log = log_of(5)
    feed = EventFeed(log, lambda: now_s[0])
    taken(feed)
    feed.acknowledge(1)
    now_s[0] = SETTLED_S - 1
    feed.acknowledge(2)
    now_s[0] = SETTLED_S
    # A minute after its acknowledgement an event is settled, the others may be lost.
    feed.begin()
    assert log.acknowledged("mqtt") == 1
    assert taken(feed) == [2, 3, 4, 5]


def test_a_broker_gets_what_follows_its_mark() -> None:
    log = log_of(5)
    feed = EventFeed(log)
    taken(feed)
    feed.acknowledge(5)
    # It came back with what it had at some earlier time, maybe long before.
    feed.begin(mark(2, log))
    assert taken(feed) == [3, 4, 5]
    # A mark beyond all that it can have, and no mark: what was settled counts.
    for each in (mark(6, log), None):
        feed.begin(each)
        assert taken(feed) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("its_log", ["of another device", ""])
def test_a_mark_of_another_log_hides_no_event_and_ids_go_on_above_it(its_log: str) -> None:
    log = log_of(3)
    feed = EventFeed(log)
    taken(feed)
    feed.acknowledge(3)
    feed.begin(payloads.Mark("2", its_log))
    assert taken(feed) == [1, 2, 3]
    feed.begin(payloads.Mark("300", its_log))
    assert taken(feed) == [1, 2, 3]
    log.put(DEPARTURE)
    log._end()
    assert taken(feed) == [301]


def test_the_mark_follows_the_acknowledgements_now_and_then() -> None:
    now_s = [100.0]
    log = log_of(5)
    feed = EventFeed(log, lambda: now_s[0])
    feed.begin(None)
    assert feed.take_mark() is None
    taken(feed)
    feed.acknowledge(1)
    assert feed.take_mark() == payloads.acknowledged(log.id, 1)
    feed.acknowledge(2)
    feed.acknowledge(3)
    assert feed.take_mark() is None
    now_s[0] += 1
    assert feed.take_mark() == payloads.acknowledged(log.id, 3)
    now_s[0] += 1
    assert feed.take_mark() is None
    # A broker that lost its mark gets it again with the next acknowledgement.
    feed.begin(None)
    feed.acknowledge(3)
    assert feed.take_mark() == payloads.acknowledged(log.id, 3)


def test_a_mark_that_is_none_is_none() -> None:
    assert payloads.decoded(payloads.acknowledged("ab", 41), payloads.Mark) == payloads.Mark(
        "41", "ab"
    )
    assert payloads.decoded(b'{"event": "41"}', payloads.Mark) == payloads.Mark("41"), (
        "of an earlier version"
    )
    for event in (b'"x"', b"3", b'"-3"', b'"1e3"', b'"\xd9\xa3"', b'"%d"' % 2**62, b"{}", b'""'):
        assert payloads.decoded(b'{"event": %s}' % event, payloads.Mark) is None
    for payload in (b"", b"{}", b"[1]", b"\xff", b'{"event": "1", "log": 2}'):
        assert payloads.decoded(payload, payloads.Mark) is None


def test_a_restart_begins_after_what_was_settled() -> None:
    now_s = [0.0]
    log = log_of(3)
    feed = EventFeed(log, lambda: now_s[0])
    taken(feed)
    feed.acknowledge(2)
    now_s[0] = SETTLED_S + 1
    feed.take()
    assert taken(EventFeed(log)) == [3]


def test_the_json_of_an_event_is_the_proto3_mapping() -> None:
    for event in (DEPARTURE, replace(DEPARTURE, phase="end", begin_id=40, frame_id=None)):
        sent: Any = json.loads(payloads.event(event, IDENTITY))
        message = json_format.ParseDict(sent, events_pb2.Event())
        assert message.id == 41
        assert message.HasField("frame_id") == (event.frame_id is not None)
        back = json_format.MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        assert back == sent
        written = payloads.event(event, IDENTITY, "protobuf")
        assert events_pb2.Event.FromString(written) == message


def test_the_published_example_is_what_we_send() -> None:
    published = resources.files("edge_server.proto.edge.lanes.v1") / "event.example.json"
    event = replace(DEPARTURE, log="5d0c9b1a77e04f32")
    assert json.loads(payloads.event(event, IDENTITY)) == json.loads(published.read_text())


@pytest.mark.parametrize("epoch_ns", [0, -1, 10**9, 2**63 - 1])
def test_an_event_has_a_time_whatever_the_wall_clock_shows(epoch_ns: int) -> None:
    event = replace(DEPARTURE, epoch_ns=epoch_ns)
    sent = json_format.Parse(payloads.event(event, IDENTITY), events_pb2.Event())
    assert sent == events_pb2.Event.FromString(payloads.event(event, IDENTITY, "protobuf"))
    assert (sent.epoch_ns, sent.time.ToMicroseconds()) == (epoch_ns, epoch_ns // 1000)


def test_the_topic_of_an_event_is_that_of_its_camera_or_device() -> None:
    topics = Topics("truck-7")
    assert topics.event("model") == "edge/v1/truck-7/events/model"
    departures = "edge/v1/truck-7/cameras/front/events/lane_departure"
    assert topics.event("lane_departure", "front") == departures
