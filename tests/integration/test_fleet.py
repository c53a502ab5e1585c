"""The recipes of examples/fleet: a vehicle's broker keeps for the fleet's what that cannot take, a
vehicle has the topics of its own name alone, and the cluster's runtime is what KServe reads."""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import paho.mqtt.client as paho
import pytest
from integration.test_mqtt_events import WAIT_S, Subscriber, device
from paho.mqtt.subscribeoptions import SubscribeOptions
from support.fleet_recipes import RECIPES, fleet_lines, vehicle_lines
from support.mosquitto import Mosquitto, mosquitto_binary
from support.waiting import wait_until

from edge_server.settings import Mqtt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.certificates import Authority

ROOT = "edge/v1/truck-7"
NOT_AUTHORIZED = 0x87


@pytest.fixture
def fleet(authority: Authority, tmp_path: Path) -> Iterator[Mosquitto]:
    if not mosquitto_binary():
        pytest.skip("no mosquitto on this machine: apt install mosquitto")
    folder = tmp_path / "fleet"
    lines = fleet_lines(authority, folder)
    broker = Mosquitto(folder, *lines)
    broker.start()
    yield broker
    broker.kill()


@pytest.fixture
def vehicle(fleet: Mosquitto, authority: Authority, tmp_path: Path) -> Iterator[Mosquitto]:
    folder = tmp_path / "vehicle"
    lines = vehicle_lines(authority, folder, f"{fleet.host}:{fleet.port}")
    broker = Mosquitto(folder, *lines)
    broker.start()
    yield broker
    broker.kill()


class Client:
    """A client of the fleet's broker with a certificate of its own."""

    def __init__(self, fleet: Mosquitto, authority: Authority, name: str) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self._changed = threading.Condition()
        self._codes: dict[int, list[int]] = {}
        self._client = client = paho.Client(
            paho.CallbackAPIVersion.VERSION2, f"{name}-test", protocol=paho.MQTTv5
        )
        certificate, key = authority.issue(name)
        client.tls_set(authority.ca, certificate, key, tls_version=ssl.PROTOCOL_TLS_CLIENT)
        connected = threading.Event()
        client.on_connect = lambda *_: connected.set()
        client.on_message = self._take
        client.on_publish = lambda _c, _d, mid, code, _p: self._note(mid, [code.value])
        client.on_subscribe = lambda _c, _d, mid, codes, _p: self._note(
            mid, [code.value for code in codes]
        )
        client.connect(fleet.host, fleet.port)
        client.loop_start()
        assert connected.wait(WAIT_S)

    def _note(self, mid: int, codes: list[int]) -> None:
        with self._changed:
            self._codes[mid] = codes
            self._changed.notify_all()

    def _take(self, _client: Any, _data: Any, message: Any) -> None:
        with self._changed:
            self.messages.append((message.topic, message.payload))
            self._changed.notify_all()

    def _codes_of(self, mid: int) -> list[int]:
        with self._changed:
            assert self._changed.wait_for(lambda: mid in self._codes, WAIT_S)
            return self._codes[mid]

    def publish(self, topic: str, payload: bytes = b"x", *, retain: bool = False) -> int:
        """Return the broker's reason code."""
        return self._codes_of(self._client.publish(topic, payload, qos=1, retain=retain).mid)[0]

    def subscribe(self, topic: str) -> int:
        """Return the broker's reason code."""
        _, mid = self._client.subscribe(topic, options=SubscribeOptions(qos=1))
        assert mid is not None
        return self._codes_of(mid)[0]

    def wait_for(self, topic: str, payload: bytes | None = None) -> None:
        def there() -> bool:
            return any(t == topic and payload in {None, p} for t, p in self.messages)

        with self._changed:
            assert self._changed.wait_for(there, WAIT_S), self.messages[-5:]

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


def test_events_of_the_time_without_a_fleet_arrive_later_and_in_order(
    fleet: Mosquitto, vehicle: Mosquitto, authority: Authority, tmp_path: Path
) -> None:
    dashboard = Subscriber(fleet, authority)
    with device(Mqtt(vehicle.host, vehicle.port), tmp_path) as each:
        each.put(3)
        dashboard.wait_for(3)
        fleet.kill()
        each.put(20)
        # The daemon's own broker has them now, and dies as well.
        wait_until(lambda: b'{"event":"23",' in (tmp_path / "vehicle/mosquitto.db").read_bytes())
        vehicle.kill()
    vehicle.start()
    fleet.start()
    dashboard.wait_for(23)
    dashboard.close()
    assert dashboard.ids == [*range(1, 24)]


def test_the_fleet_sees_states_and_whether_the_bridge_is_connected(
    fleet: Mosquitto, vehicle: Mosquitto, authority: Authority, tmp_path: Path
) -> None:
    dashboard = Client(fleet, authority, "fleet-dashboard")
    assert dashboard.subscribe("edge/v1/#") == 1
    with device(Mqtt(vehicle.host, vehicle.port), tmp_path):
        dashboard.wait_for(f"{ROOT}/meta")
        dashboard.wait_for(f"{ROOT}/bridge", b"1")
        vehicle.kill()
        dashboard.wait_for(f"{ROOT}/bridge", b"0")
    dashboard.close()


def test_a_vehicle_has_the_topics_of_its_own_name_alone(
    fleet: Mosquitto, authority: Authority
) -> None:
    own, other = (Client(fleet, authority, name) for name in ("truck-7", "truck-8"))
    dashboard = Client(fleet, authority, "fleet-dashboard")
    for client, topic in ((own, f"{ROOT}/#"), (other, "edge/v1/truck-8/#"), (dashboard, "edge/#")):
        client.subscribe(topic)
    # Wildcards beyond its own name give it nothing, whatever the broker answers.
    other.subscribe(f"{ROOT}/#")
    other.subscribe("edge/v1/#")
    other.subscribe("#")
    assert dashboard.subscribe("edge/v1/#") == 1

    assert other.publish(f"{ROOT}/status", b"forged", retain=True) == NOT_AUTHORIZED
    assert other.publish("edge/v1/truck-8/status", b"real") == 0
    assert own.publish(f"{ROOT}/status", b"real", retain=True) == 0
    assert dashboard.publish(f"{ROOT}/status", b"forged") == NOT_AUTHORIZED
    dashboard.wait_for(f"{ROOT}/status", b"real")
    dashboard.wait_for("edge/v1/truck-8/status", b"real")
    other.wait_for("edge/v1/truck-8/status", b"real")
    assert all(topic.startswith("edge/v1/truck-8/") for topic, _ in other.messages)
    assert all(payload != b"forged" for _, payload in own.messages + dashboard.messages)
    for client in (own, other, dashboard):
        client.close()


def test_a_client_without_a_certificate_of_the_fleet_is_kept_out(
    fleet: Mosquitto, authority: Authority
) -> None:
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    client.tls_set(authority.ca)
    refused = threading.Event()
    client.on_disconnect = lambda *_: refused.set()
    try:
        client.connect(fleet.host, fleet.port)
    except OSError:
        return
    client.loop_start()
    assert refused.wait(WAIT_S)
    client.loop_stop()


def test_prometheus_gets_the_vehicles_that_the_broker_knows(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    client.connect(mosquitto.host, mosquitto.port)
    client.loop_start()
    for vehicle, state in (("truck-7", "online"), ("truck-8", "offline"), ('"x', "online")):
        payload = f'{{"state":"{state}","version":"0"}}'
        client.publish(f"edge/v1/{vehicle}/status", payload, 1, retain=True).wait_for_publish(
            WAIT_S
        )
    client.disconnect()
    client.loop_stop()
    file = tmp_path / "vehicles.json"

    def write_targets() -> int:
        return subprocess.run(
            [
                *(RECIPES / "targets", file, "proxy.example:443/DEVICE/metrics"),
                *("-h", mosquitto.host, "-p", str(mosquitto.port)),
            ],
            env={**os.environ, "SECONDS_TO_READ": "1"},
            check=False,
        ).returncode

    expected = [
        {
            "targets": [f"proxy.example:443/{vehicle}/metrics"],
            "labels": {"vehicle": vehicle, "said": said},
        }
        for vehicle, said in (("truck-7", "online"), ("truck-8", "offline"))
    ]

    def found() -> bool:
        assert write_targets() == 0
        return bool(json.loads(file.read_text()) == expected)

    wait_until(found, WAIT_S, otherwise=file.read_text)  # a busy machine reads less in its second
    mosquitto.kill()
    assert write_targets() != 0
    assert json.loads(file.read_text()) == expected
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mosquitto.conf", file.name]


@pytest.mark.skipif(
    not shutil.which("promtool"), reason="no Prometheus on this machine: apt install prometheus"
)
def test_the_fleets_rules_are_valid_and_alert(tmp_path: Path) -> None:
    for example in (RECIPES, RECIPES.parent / "observability"):
        shutil.copytree(example, tmp_path / example.name)
    folder = tmp_path / RECIPES.name
    (folder / "vehicles.json").write_text("[]")
    for command in (
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "fleet_rules_test.yml"),
    ):
        subprocess.run(["promtool", *command], cwd=folder, check=True, timeout=WAIT_S)


def test_the_runtime_has_the_fields_that_kserve_requires() -> None:
    runtime, service = (RECIPES / "servingruntime.yaml").read_text().split("\n---\n")

    def value(text: str, path: str) -> str:
        """Of a key by its indentation; enough for this file, which has no flow style."""
        place = 0
        for depth, key in enumerate(path.split(".")):
            found = re.compile(rf"^ {{{2 * depth}}}{key}:(.*)$", re.MULTILINE).search(text, place)
            assert found is not None, path
            place = found.end()
        return found.group(1).strip()

    assert value(runtime, "apiVersion") == "serving.kserve.io/v1alpha1"
    assert value(runtime, "kind") == "ServingRuntime"
    name = value(runtime, "metadata.name")
    assert "    - name: triton\n" in runtime
    assert "    - grpc-v2\n" in runtime
    assert "    - name: kserve-container\n" in runtime
    assert "        - --model-repository=/mnt/models\n" in runtime
    # Every model that it loads is one of the repository that Triton has a backend for.
    for model in re.findall(r"--load-model=(\S+)", runtime):
        config = (RECIPES.parents[1] / "models" / model / "config.pbtxt").read_text()
        assert 'platform: "onnxruntime_onnx"' in config
    assert value(service, "apiVersion") == "serving.kserve.io/v1beta1"
    assert value(service, "kind") == "InferenceService"
    assert value(service, "spec.predictor.model.runtime") == name
    assert value(service, "spec.predictor.model.protocolVersion") == "grpc-v2"
