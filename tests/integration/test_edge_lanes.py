"""The client to install: what it says of lanes, of silence, and of messages that are wrong."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import paho.mqtt.client as mqtt
import pytest
from google.protobuf import json_format
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from support.lane_stand_in import PowerCut, StandIn
from support.lane_stubs import CLIENT
from support.waiting import wait_until

from edge_lanes import EventStream, LaneStream, LaneSubscription, State, streams
from edge_lanes.v1 import lanes_pb2
from edge_server.lanes.e2e import PROPERTY, Envelope, protect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.daemon_process import Process
    from support.mosquitto import Mosquitto

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0
TOPIC = "edge/v1/truck-7/cameras/front/lanes"
# What the client may import beside itself: its dependencies, and what grpcio depends on.
DEPENDENCIES = ("grpc", "google", "paho", "typing_extensions")


@pytest.fixture(scope="module")
def clean_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the client's wheel and its dependencies alone."""
    folder = tmp_path_factory.mktemp("client")
    build = f"import setuptools.build_meta as b; b.build_wheel({str(folder)!r})"
    source = folder / "source"
    subprocess.run(["cp", "-rL", CLIENT, source], check=True)
    subprocess.run(
        [sys.executable, "-c", build],
        check=True,
        cwd=source,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    (wheel,) = folder.glob("edge_lanes-*.whl")
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv/lib").glob("python3.*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for name in DEPENDENCIES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        places = spec.submodule_search_locations or [spec.origin]
        place = Path(next(iter(places)))
        (site / place.name).symlink_to(place)
    return folder / "venv/bin/python"


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (CLIENT / "README.md").read_text(), re.DOTALL)


def test_the_programs_of_its_readme_run_in_an_environment_of_its_own(
    clean_python: Path, mosquitto: Mosquitto, start: Callable[..., Process], tmp_path: Path
) -> None:
    daemon = start(
        f"--model-repository={ROOT / 'models'}",
        "--camera=front=synthetic://road?seed=7&fps=2",
        "--camera=absent=/dev/video63",  # which is an event
        "--device-id=truck-7",
        f"--mqtt={mosquitto.host}:{mosquitto.port}",
    )
    lanes, subscription, events = code_blocks("python")
    for text, end, last in (
        (lanes, "        break", r"front [1-5] lanes"),
        (subscription, "    if reading.usable:\n        break", r"State\.\w+ .*"),
        (events, "    break", r"\d+ \w+ .+"),
    ):
        program = f"{text}{end}  # it goes on for ever\n"
        program = program.replace(":8001", f":{daemon.port}")
        program = program.replace('"front")', f'"front", port={mosquitto.port})')
        done = subprocess.run(
            [clean_python, "-W", "error", "-c", program],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(last, done.stdout.splitlines()[-1]), done.stdout


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    made = StandIn()
    yield made
    made.stop()


def test_a_frame_is_acknowledged_once_it_is_used(stand_in: StandIn) -> None:
    readings = iter(LaneStream(f"127.0.0.1:{stand_in.port}", silent_after_s=TIMEOUT_S))
    first = next(readings)
    assert (first.state, first.usable, first.lost) == (State.OK, True, 1)
    assert stand_in.service.acknowledged == []
    four = [next(readings) for _ in range(4)]
    assert [each.state for each in four] == [State.DEGRADED, State.STALE, State.INVALID, State.OK]
    assert [each.text for each in four[2:]] == ["frame 4 is not well", ""]
    readings.close()


def test_a_device_that_is_gone_is_silent_and_its_lanes_come_again(stand_in: StandIn) -> None:
    readings = iter(LaneStream(f"127.0.0.1:{stand_in.port}", silent_after_s=0.3))
    assert next(each for each in readings if each.usable)
    stand_in.stop()
    silent = next(each for each in readings if each.frame is None)
    assert (silent.state, silent.usable, silent.reasons) == (State.SILENT, False, [])
    silent = next(each for each in readings if each.frame is None and each.text)
    assert silent.text.startswith("UNAVAILABLE: ")
    stand_in.start()
    assert next(each for each in readings if each.usable).frame is not None
    readings.close()


def test_a_connection_whose_device_lost_its_power_is_replaced(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PINGS", [(name, value // 10) for name, value in streams.PINGS])
    with PowerCut(stand_in.port) as line:
        readings = iter(LaneStream(f"127.0.0.1:{line.port}", silent_after_s=0.3))
        assert next(each for each in readings if each.usable)
        line.cut()
        assert next(each for each in readings if each.frame is None).state is State.SILENT
        assert next(each for each in readings if each.usable).frame is not None
        readings.close()


def test_what_no_other_attempt_passes_is_raised(stand_in: StandIn) -> None:
    with pytest.raises(grpc.RpcError, match="no camera 'absent'"):
        next(iter(LaneStream(f"127.0.0.1:{stand_in.port}", ["absent"])))


def test_events_go_on_after_the_last_one_that_was_dealt_with(
    stand_in: StandIn, tmp_path: Path
) -> None:
    address, last = f"127.0.0.1:{stand_in.port}", tmp_path / "last"
    first = iter(EventStream(address, last))
    assert [next(first).id, next(first).id] == [1, 2]
    first.close()
    assert last.read_text() == "1 a", "the second was not dealt with"
    again = iter(EventStream(address, last))
    assert [next(again).id, next(again).id] == [2, 3]
    again.close()
    assert stand_in.service.asked == [(0, ""), (1, "a")]


class Publisher:
    """Publishes lanes as a device does, and otherwise."""

    def __init__(self, broker: Mosquitto) -> None:
        self.client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        self.client.connect(broker.host, broker.port)
        self.client.loop_start()

    def publish(
        self,
        seq: int,
        *,
        as_json: bool = True,
        envelope: str | None = None,
        payload: bytes | None = None,
    ) -> None:
        frame = lanes_pb2.LaneFrame(seq=seq, status=lanes_pb2.FRAME_STATUS_OK)
        if payload is None:
            text = json_format.MessageToJson(frame)
            payload = text.encode() if as_json else frame.SerializeToString()
        properties = Properties(PacketTypes.PUBLISH)
        properties.ContentType = "application/json" if as_json else "application/x-protobuf; m=L"
        value = envelope or protect(TOPIC, payload, Envelope("0" * 8, seq, 1000 * seq))
        properties.UserProperty = [(PROPERTY, value)]
        self.client.publish(TOPIC, payload, properties=properties).wait_for_publish(TIMEOUT_S)

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


def test_a_message_that_was_changed_is_lost(mosquitto: Mosquitto) -> None:
    publisher = Publisher(mosquitto)
    subscription = LaneSubscription(
        mosquitto.host, "truck-7", "front", port=mosquitto.port, silent_after_s=0.1
    )
    readings = iter(subscription)
    seq = 0
    while (reading := next(readings)).frame is None:  # until it has subscribed
        seq += 1
        publisher.publish(seq)
    while reading.frame is None or reading.frame.seq < seq:
        reading = next(readings)
    publisher.publish(seq + 1, envelope="1 00000000 2 2000 00000000")
    publisher.publish(seq + 2, as_json=False)
    after = next(each for each in readings if each.frame is not None and each.frame.seq > seq)
    assert after.frame is not None
    assert (after.frame.seq, after.lost) == (seq + 2, 1)
    seq += 2
    for as_json in (False, True):  # whoever may publish there can protect what is no frame
        seq += 1
        publisher.publish(seq, as_json=as_json, payload=b"\xff")
        while (reading := next(readings)).frame is None:
            seq += 1
            publisher.publish(seq)
        assert reading.state is State.OK
    mosquitto.kill()
    assert next(each for each in readings if each.text).state is State.SILENT
    mosquitto.start()
    wait_until(publisher.client.is_connected)
    while next(readings).frame is None:
        seq += 3
        publisher.publish(seq)
    readings.close()
    publisher.close()
