"""A daemon follows a channel of Docker's registry: what it places, what it refuses, what it says.

The same for 300 vehicles, without inference: `python benchmarks/fleet.py`.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import oras.client
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from support.adding_models import build, network
from support.mosquitto import Mosquitto, Subscriber
from support.oci_registry import Registry
from support.polling_server import POLL, Server
from support.verb import run_verb
from support.waiting import wait_until

from edge_server.repository.channel import Release
from edge_server.repository.manifest import SigningKey, make_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.certificates import Authority
    from support.daemon_process import Process

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "fleet.py"
WAIT_S = 60.0
TOPIC = "edge/v1/truck-7/channels/lanes"
EVENTS = "edge/v1/truck-7/events/model"
INDEX, SIGNATURE = "edge-server.channel", "edge-server.channel.signature"


def bad_network() -> bytes:
    """An ONNX file that passes the check before it serves: y = sqrt(100 - x), NaN for large x."""
    graph = helper.make_graph(
        [helper.make_node("Sub", ["k", "x"], ["d"]), helper.make_node("Sqrt", ["d"], ["y"])],
        "bad",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        [helper.make_tensor("k", TensorProto.FLOAT, [1], [100.0])],
    )
    opsets = [helper.make_opsetid("", 13)]
    data: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return data


class Fleet:
    """A registry, a key, and a vehicle that follows a channel."""

    def __init__(
        self, folder: Path, registry: Registry, broker: Mosquitto, authority: Authority
    ) -> None:
        self.folder, self.registry, self.broker = folder, registry, broker
        self.source = f"oci://{registry.host}/fleet/lanes:stable"
        self.key, self.other_key = folder / "fleet.key", folder / "other.key"
        make_keys(self.key)
        make_keys(self.other_key)
        self.repository = folder / "repository"
        self.config = folder / "config.toml"
        self.config.write_text(
            f"""
            [device]
            id = "truck-7"
            [mqtt]
            host = "{broker.host}"
            port = {broker.port}
            [repository]
            paths = ["{self.repository}"]
            store = "{folder / "store"}"
            mode = "poll"
            probation_requests = 20
            probation_s = 0.5
            [repository.channels.lanes]
            source = "{self.source}"
            keys = ["{self.key}.pub"]
            interval_s = 1
            ca_file = "{authority.ca}"
            """
        )

    def publish(self, *arguments: object, key: Path | None = None) -> str:
        """Run `models publish`; the beginning of the model's digest."""
        to = ("--channel", self.source, "--sign", key or self.key)
        done = run_verb("models", "publish", *arguments, *to)
        assert done.returncode == 0, done.stderr
        return done.stdout.split(", ")[1]

    def model(self, data: bytes) -> Path:
        return build(self.folder / "made" / "m", data)

    def manifest(self) -> dict[str, Any]:
        client = oras.client.OrasClient()
        try:
            found: dict[str, Any] = client.get_manifest(self.source.removeprefix("oci://"))
            return found
        finally:
            client.session.close()

    def put(self, manifest: dict[str, Any]) -> None:
        """Write the tag's manifest, as whoever has taken over the registry."""
        client = oras.client.OrasClient()
        try:
            container = client.get_container(self.source.removeprefix("oci://"))
            assert client.upload_manifest(manifest, container).status_code == 201
        finally:
            client.session.close()

    def wait_for_status(self, code: int, *words: str) -> None:
        """Run `fleet status` until it ends so and shows these words: on a busy machine the broker
        may be quiet for a second before it has sent anything."""
        address = f"{self.broker.host}:{self.broker.port}"

        def told() -> subprocess.CompletedProcess[str]:
            return run_verb("fleet", "status", "--mqtt", address, "--quiet-secs", 1)

        def fits() -> bool:
            found = told()
            return found.returncode == code and all(word in found.stdout for word in words)

        wait_until(fits, WAIT_S, otherwise=told)


@pytest.fixture
def fleet(
    tmp_path: Path, authority: Authority, mosquitto: Mosquitto, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fleet]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # Of the verbs; the daemon has `ca_file`.
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.ca))
    registry = Registry(tmp_path, authority)
    registry.start()
    yield Fleet(tmp_path, registry, mosquitto, authority)
    registry.stop()


@pytest.fixture
def states(fleet: Fleet) -> Iterator[Subscriber]:
    subscriber = Subscriber(fleet.broker.port, "edge/v1/truck-7/#")
    yield subscriber
    subscriber.close()


@pytest.fixture
def serve(
    fleet: Fleet,
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
) -> Callable[[], Server]:
    def make() -> Server:
        process = start(f"--config={fleet.config}", *POLL)
        return Server(process, client(process), fleet.repository)

    return make


def wait_for(server: Server, states: Subscriber, state: str, content: str = "", **more: Any) -> Any:
    """Ask the model with large numbers until the channel is in that state; its message."""

    def found() -> dict[str, Any] | None:
        large = triton.InferInput("x", [1], "FP32")
        large.set_data_from_numpy(np.full(1, 1000, np.float32))
        server.client.infer("m", [large])
        said = (states.messages.get(TOPIC) or [{}])[-1]
        fits = said.get("state") == state and said["content"].startswith(content)
        return said if fits and all(said[name] == value for name, value in more.items()) else None

    def heard() -> object:
        return states.messages.get(TOPIC, [])[-3:], server.log[-3000:]

    return wait_until(found, WAIT_S, otherwise=heard, every_s=0.1)


def wait_for_fault(states: Subscriber, says: str) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        said = states.messages[TOPIC][-1]
        return said if says in said["fault"] else None

    return wait_until(found, WAIT_S, otherwise=lambda: states.messages[TOPIC][-3:])


def causes(states: Subscriber) -> list[str]:
    return [event["cause"] for event in states.messages.get(EVENTS, [])]


def test_a_vehicle_takes_what_is_good_and_rolls_back_what_is_bad(
    fleet: Fleet, states: Subscriber, serve: Callable[[], Server]
) -> None:
    build(fleet.repository / "m", network(1))
    server = serve()
    assert server.answer() == 1

    # Out of the share nothing is placed; one number later it is.
    content = fleet.publish(fleet.model(network(2)), "--share", 0)
    assert wait_for(server, states, "not_in_share", content)["serves"][:12] != content
    assert server.answer() == 1
    fleet.publish("--share", 100)
    said = wait_for(server, states, "good", content, share=100.0)
    assert (server.answer(), said["serves"][:12], said["fault"]) == (2, content, "")
    wait_until(lambda: "channel_good" in causes(states), WAIT_S)
    assert causes(states).index("channel_placed") < causes(states).index("channel_good")
    fleet.wait_for_status(0, "truck-7", content)

    # One that its check finds, and one that only its canary finds.
    refused = fleet.publish(fleet.model(network(float("nan"))), "--share", 100)
    said = wait_for(server, states, "refused", refused)
    assert "no finite element" in said["reason"]
    worse = fleet.publish(fleet.model(bad_network()), "--share", 100)
    said = wait_for(server, states, "rolled_back", worse)
    assert (server.answer(), said["serves"][:12]) == (2, content)
    wait_until(lambda: "channel_rolled_back" in causes(states), WAIT_S)
    fleet.wait_for_status(1, "rolled_back")
    line = run_verb(
        "status",
        "--config",
        fleet.config,
        "--grpc",
        f"127.0.0.1:{server.process.port}",
        "--metrics",
        f"127.0.0.1:{server.process.metrics_port}",
    )
    assert "channel lanes" in line.stdout, line.stdout + line.stderr

    # Another share is no other model: it is not tried again, also not after a restart.
    fleet.publish("--share", 50.5)
    wait_for(server, states, "rolled_back", worse, share=50.5)
    assert server.process.terminate() == 0
    server = serve()
    wait_for(server, states, "rolled_back", worse, share=50.5)
    assert server.answer() == 2
    assert causes(states).count("channel_rolled_back") == 1

    # What was good before is published again, and taken.
    fleet.publish(fleet.model(network(2)), "--share", 100)
    wait_for(server, states, "good", content)


def test_what_is_no_newer_index_of_this_key_changes_nothing(
    fleet: Fleet, states: Subscriber, serve: Callable[[], Server]
) -> None:
    build(fleet.repository / "m", network(1))
    fleet.publish(fleet.model(network(2)), "--share", 100)
    older = fleet.manifest()
    server = serve()
    wait_for(server, states, "good")
    fleet.publish(fleet.model(network(3)), "--share", 100)
    newer = fleet.manifest()
    said = wait_for(server, states, "good", json.loads(newer["annotations"][INDEX])["content"])
    assert server.answer() == 3

    fleet.registry.stop()
    assert server.answer() == 3
    assert wait_for_fault(states, "unreachable: ")["serial"] == said["serial"]
    fleet.registry.start()

    # The tag is moved back.
    fleet.put(older)
    assert "is older than" in wait_for_fault(states, "refused: ")["fault"]
    wait_until(lambda: "channel_index_refused" in causes(states), WAIT_S)
    fleet.put(newer)
    wait_for(server, states, "good", fault="")

    # The index is changed under its signature, or signed by another key.
    release = msgspec.json.decode(newer["annotations"][INDEX], type=Release)
    changed = msgspec.structs.replace(release, serial=release.serial + 5)
    index = msgspec.json.encode(changed, order="sorted")
    fleet.put({**newer, "annotations": {**newer["annotations"], INDEX: index.decode()}})
    wait_for_fault(states, "is not signed by")
    fleet.put(newer)
    wait_for(server, states, "good", fault="")
    fleet.publish(fleet.model(network(4)), "--share", 100, key=fleet.other_key)
    wait_for_fault(states, "is not signed by")

    # A good signature, and another archive than the index names.
    changed = msgspec.structs.replace(changed, content="0" * 64)
    index = msgspec.json.encode(changed, order="sorted")
    signature = base64.b64encode(SigningKey(fleet.key).sign(index)).decode()
    annotations = {INDEX: index.decode(), SIGNATURE: signature}
    fleet.put({**newer, "annotations": annotations, "layers": older["layers"]})
    assert wait_for_fault(states, "another archive than")["serial"] == changed.serial
    assert server.answer() == 3

    # The serial outlives a restart.
    assert server.process.terminate() == 0
    fleet.put(newer)
    server = serve()
    wait_for_fault(states, "is older than")
    assert server.answer() == 3


def test_a_release_waits_for_its_conditions(
    fleet: Fleet, states: Subscriber, serve: Callable[[], Server]
) -> None:
    build(fleet.repository / "m", network(1))
    server = serve()
    fleet.publish(fleet.model(network(2)), "--share", 100, "--parked", 1)
    said = wait_for(server, states, "waiting")
    assert "speed is not known" in said["reason"]
    assert server.answer() == 1


def test_a_change_needs_the_key_of_the_index(fleet: Fleet) -> None:
    fleet.publish(fleet.model(network(2)), "--share", 1)
    to = ("--channel", fleet.source, "--share", 10, "--sign", fleet.other_key)
    refused = run_verb("models", "publish", *to)
    assert refused.returncode == 78
    assert "has no index that this key has signed" in refused.stderr


@pytest.mark.serial
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_300_vehicles_stop_a_bad_network_at_its_first_share() -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--vehicles", "300", "--interval", "10"],
        capture_output=True,
        text=True,
        timeout=1100,
        cwd=BENCHMARK.parents[1],
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
