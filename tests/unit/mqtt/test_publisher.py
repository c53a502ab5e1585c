"""What the publisher makes of many; with a broker it is tested among the integration tests."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

from edge_server.inference.snapshot import ModelEntry, ModelState
from edge_server.mqtt.broker_address import BrokerAddress
from edge_server.mqtt.identity import Identity
from edge_server.mqtt.opening import Opening
from edge_server.mqtt.publisher import Publisher
from edge_server.mqtt.wake import Wake

if TYPE_CHECKING:
    import pytest


def test_of_a_models_versions_the_newest_that_serves_is_told() -> None:
    publisher = Publisher(BrokerAddress(port=9), Identity("truck-7", "1", "boot", "client"))
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
    said = {}
    while (state := publisher._outbox.take_state()) is not None:
        said[state[0].removeprefix("edge/v1/truck-7/models/")] = json.loads(state[1])
    assert said["a/state"] == {"model": "a", "state": "READY", "reason": ""}
    assert said["b/state"] == {"model": "b", "state": "LOADING", "reason": "building"}


def test_the_topic_of_a_model_that_is_gone_is_emptied() -> None:
    publisher = Publisher(BrokerAddress(port=9), Identity("truck-7", "1", "boot", "client"))
    publisher.publish_models([ModelEntry("a", 1, ModelState.READY)])
    topic = "edge/v1/truck-7/models/a/state"
    assert publisher._outbox.knows(topic)
    publisher.publish_models([])
    publisher.publish_models([])
    publisher.stop()
    said = dict(iter(publisher._outbox.take_state, None))
    assert said[topic] == b""
    assert not publisher._outbox.knows(topic)


def test_a_name_that_no_topic_can_hold_is_told_once_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = Publisher(BrokerAddress(port=9), Identity("truck-7", "1", "boot", "client"))
    for _ in range(3):
        publisher.publish_models([ModelEntry(os.fsdecode(b"m\xff"), 1, ModelState.UNAVAILABLE)])
    publisher.stop()
    assert len(caplog.records) == 1


def test_name_servers_that_do_not_answer_are_waited_for_without_a_stuck_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, answer = threading.Event(), threading.Event()
    really = socket.getaddrinfo

    def resolve(host: str, *more: object, **named: object) -> object:
        if host != "broker.example":
            return really(host, *more, **named)  # type: ignore[arg-type]
        asked.set()
        answer.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    address = BrokerAddress("broker.example")
    publisher = Publisher(address, Identity("truck-7", "1", "boot", "client"))
    publisher.start()
    assert asked.wait(60)
    beats = {publisher.worker._heartbeat}
    end = time.monotonic() + 60
    while len(beats) < 4:
        assert time.monotonic() < end, "the worker waits for the name servers"
        beats.add(publisher.worker._heartbeat)
        time.sleep(0.01)
    publisher.stop()
    publisher.worker.stop(60)
    assert not publisher.worker.alive
    assert publisher.worker.failure is None
    answer.set()


def test_a_connection_that_comes_after_it_is_wanted_no_more_is_closed() -> None:
    class Late:
        def __init__(self) -> None:
            self.let_go, self.closed = threading.Event(), threading.Event()

        def open(self) -> None:
            self.let_go.wait(60)

        def close(self) -> None:
            self.closed.set()

    late, wake = Late(), Wake()
    opening = Opening(late, wake)  # type: ignore[arg-type]
    opening.leave()
    assert not late.closed.is_set()
    late.let_go.set()
    assert late.closed.wait(60)
    wake.close()
