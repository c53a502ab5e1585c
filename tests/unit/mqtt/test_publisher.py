"""What the publisher makes of many; with a broker it is tested among the integration tests."""

from __future__ import annotations

import json

from edge_server.mqtt.broker_address import BrokerAddress
from edge_server.mqtt.identity import Identity
from edge_server.mqtt.publisher import Publisher
from edge_server.serving.snapshot import ModelEntry, ModelState


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
