"""SIGHUP moves the lanes to another broker, and applies limits, certificates and log settings."""

from __future__ import annotations

import queue
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from integration.test_metrics import scrape
from integration.test_transport import tls_live
from support.daemon_process import Process
from support.mosquitto import PATIENCE_S, Mosquitto, Subscriber
from support.settings_drive import MODELS, TOPIC, camera
from support.waiting import wait_until

from edge_server.proto.edge.lanes.v1 import lane_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.settings_drive import Drive

STATUS = "edge/v1/tested/status"
FRONT = camera("front")


@pytest.fixture
def other_broker(tmp_path: Path) -> Iterator[Mosquitto]:
    folder = tmp_path / "other"
    folder.mkdir()
    broker = Mosquitto(folder)
    broker.start()
    yield broker
    broker.kill()


def at(port: int, more: str = "") -> str:
    return f'[mqtt]\nhost = "127.0.0.1"\nport = {port}\n{more}'


def state_is(state: str) -> Callable[[dict], bool]:
    return lambda message: message.get("state") == state


def lanes_of(*subscribers: Subscriber) -> list[dict]:
    return [m for each in subscribers for m in each.messages.get(f"{TOPIC}/front/lanes", [])]


def test_lanes_move_to_another_broker_and_no_frame_is_lost(
    drive: Callable[..., Drive], other_broker: Mosquitto
) -> None:
    daemon = drive(FRONT)
    daemon.wait_for_lanes("front")
    there = Subscriber(other_broker.port, "edge/v1/tested/#")
    daemon.mqtt = at(other_broker.port)
    said = daemon.reload(FRONT)
    assert f"broker: moves from {daemon.broker} to 127.0.0.1:{other_broker.port}" in said
    there.wait(f"{TOPIC}/front/lanes", lambda m: m["seq"] > 0)
    there.wait(STATUS, state_is("online"))
    for name in ("meta", "cameras/front/status", "models/lane_detection/state"):
        there.wait(f"edge/v1/tested/{name}")
    daemon.subscriber.wait_for_last(STATUS, state_is("offline"))
    here = len(daemon.subscriber.messages[f"{TOPIC}/front/lanes"])

    count = len(there.messages[f"{TOPIC}/front/lanes"])
    there.wait(f"{TOPIC}/front/lanes", since=count + 5)
    lanes = lanes_of(daemon.subscriber, there)
    seqs = [message["seq"] for message in lanes]
    assert seqs == sorted(set(seqs)), "no lanes came twice, and those there are newer"
    missing = seqs[-1] - seqs[0] + 1 - len(seqs)
    assert missing <= scrape(daemon.process)["edge_mqtt_dropped_total", ""]
    assert len(daemon.subscriber.messages[f"{TOPIC}/front/lanes"]) == here
    assert daemon.process.terminate() == 0
    there.wait_for_last(STATUS, state_is("offline"))
    there.close()


def test_in_lockstep_a_broker_and_a_lane_stream_get_every_frame_once_and_in_order(
    drive: Callable[..., Drive], other_broker: Mosquitto
) -> None:
    """Also a broker that is not connected yet, and a reader with a window of one."""
    daemon = drive(camera("rear"))
    daemon.wait_for_lanes("rear")
    there = Subscriber(other_broker.port, f"{TOPIC}/front/lanes")
    with grpc.insecure_channel(f"127.0.0.1:{daemon.process.port}") as channel:
        stream = channel.stream_stream(
            "/edge.lanes.v1.LaneService/StreamLanes",
            pb.StreamLanesRequest.SerializeToString,
            pb.StreamLanesResponse.FromString,
        )
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(pb.StreamLanesRequest(window=1))
        responses = stream(iter(requests.get, None), timeout=4 * PATIENCE_S)
        heard = [next(responses)]  # the stream is open
        daemon.mqtt = at(other_broker.port)
        daemon.reload('[cameras.front]\nuri = "synthetic://road?fps=0&frames=40"\n')
        while heard[-1].frame.camera != "front" or heard[-1].frame.lanes:
            requests.put(pb.StreamLanesRequest(acknowledged=heard[-1].sequence))
            heard.append(next(responses))
        requests.put(None)
    *of_clip, ended = [each for each in heard if each.frame.camera == "front"]
    assert list(ended.frame.reasons) == ["ended: it ended after 40 frames"]
    assert [each.frame.frame_id for each in of_clip] == list(range(40))
    assert {each.lost for each in of_clip} == {0}
    there.wait(f"{TOPIC}/front/lanes", lambda m: "ended" in str(m["reasons"]))
    *published, _ = there.messages[f"{TOPIC}/front/lanes"]
    assert [message["frame_id"] for message in published] == list(range(40))
    there.close()


def test_a_broker_is_left_and_found_again(drive: Callable[..., Drive]) -> None:
    daemon = drive(FRONT)
    daemon.wait_for_lanes("front")
    mqtt, daemon.mqtt = daemon.mqtt, ""
    assert f"broker: off, {daemon.broker} is left" in daemon.reload(FRONT)
    daemon.subscriber.wait_for_last(STATUS, state_is("offline"))
    assert ("edge_mqtt_connected", "") not in scrape(daemon.process)
    daemon.mqtt = mqtt
    assert f"broker: on, at {daemon.broker}" in daemon.reload(FRONT)
    daemon.subscriber.wait_for_last(STATUS, state_is("online"))
    daemon.wait_for_lanes("front")


def test_a_password_whose_file_has_changed_is_used_at_once(
    drive: Callable[..., Drive], tmp_path: Path
) -> None:
    if shutil.which("mosquitto_passwd") is None:
        pytest.skip("no mosquitto_passwd on this machine: apt install mosquitto")
    folder = tmp_path / "closed"
    folder.mkdir()
    users, password = folder / "users", tmp_path / "password"

    def let_in(word: str) -> None:
        subprocess.run(["mosquitto_passwd", "-b", "-c", users, "edge", word], check=True)

    let_in("first")
    password.write_text("first\n")
    broker = Mosquitto(
        folder,
        *("per_listener_settings false", "allow_anonymous false", f"password_file {users}"),
    )
    broker.start()
    login = f'username = "edge"\npassword_file = "{password}"\n'
    daemon = drive(FRONT)
    daemon.wait_for_lanes("front")
    address = f"127.0.0.1:{broker.port}"
    daemon.mqtt = at(broker.port, login)
    daemon.reload(FRONT)
    daemon.wait_for_log(f"mqtt: connected to {address}")

    password.write_text("wrong\n")
    assert f"broker: logs in to {address} again" in daemon.reload(FRONT)
    daemon.wait_for_log(f"{address} refuses us: Not authorized")
    daemon.process.wait_for("broker away (Not authorized)")

    let_in("second")
    broker.reload()
    password.write_text("second\n")
    before = len(daemon.log)
    assert f"broker: logs in to {address} again" in daemon.reload(FRONT)
    daemon.wait_for_log(f"mqtt: connected to {address}", before)
    assert "nothing differs" in daemon.reload(FRONT)
    broker.kill()


def test_certificates_of_other_paths_are_what_new_connections_see(
    drive: Callable[..., Drive], authority: Any, stranger: Any
) -> None:
    def tls(certificate: Path, key: Path) -> str:
        return f'[grpc.tls]\nenabled = true\ncertificate = "{certificate}"\nkey = "{key}"\n'

    first, second = authority.issue("first"), stranger.issue("second")
    daemon = drive(FRONT, tls(*first))
    assert tls_live(daemon.process, None, authority.ca)
    said = daemon.reload(FRONT, tls(second[0], first[1]))
    assert f"not reloaded, everything stays as it is: grpc.tls.key: {first[1]}: is not" in said
    assert tls_live(daemon.process, None, authority.ca)
    said = daemon.reload(FRONT, tls(*second))
    assert f'grpc.tls.certificate: "{first[0]}" -> "{second[0]}"' in said
    assert tls_live(daemon.process, None, stranger.ca)
    assert not tls_live(daemon.process, None, authority.ca)
    daemon.wait_for_lanes("front")


def test_limits_and_log_change_and_a_restart_is_asked_for_everywhere(
    drive: Callable[..., Drive],
) -> None:
    daemon = drive(FRONT)
    daemon.wait_for_lanes("front")
    more = (
        "[log]\nverbose = 1\n[grpc]\nmax_pending_bytes = 1048576\nmax_streams = 7\n"
        "[serving]\nexit_timeout_s = 9.0\n"
    )
    said = daemon.reload(FRONT, more=more)
    assert (
        "settings: reloaded; serving.exit_timeout_s: 3.0 -> 9.0; grpc.max_pending_bytes: 201326592 "
        "-> 1048576; log.verbose: 0 -> 1" in said
    )
    daemon.wait_for_log(
        "settings: grpc.max_streams: 100 -> 7: restart needed, 100 stays until then"
    )
    daemon.process.wait_for("broker connected")
    assert scrape(daemon.process)["edge_settings_restart_needed", ""] == 1
    daemon.subscriber.wait(STATUS, lambda m: m.get("restart_needed") == ["grpc.max_streams"])

    said = daemon.reload(FRONT, more="[grpc]\nmax_streams = -7\n")
    assert "config.toml: grpc.max_streams: " in said
    line = daemon.config.read_text().splitlines().index("max_streams = -7") + 1
    assert f" (line {line})" in said
    daemon.subscriber.wait(STATUS, lambda m: f"(line {line})" in m.get("not_reloaded", ""))
    assert scrape(daemon.process)["edge_settings_reloaded", ""] == 0
    assert "log.verbose: 1 -> 0" in daemon.reload(FRONT)
    daemon.subscriber.wait_for_last(STATUS, lambda m: "restart_needed" not in m)
    assert scrape(daemon.process)["edge_settings_restart_needed", ""] == 0


def test_a_storm_of_signals_ends_nothing(drive: Callable[..., Drive]) -> None:
    daemon = drive(FRONT)
    for _ in range(2000):
        daemon.hang_up()
    daemon.wait_for_lanes("front")
    assert "settings: reloaded; nothing differs" in daemon.reload_file()
    assert daemon.process.terminate() == 0


def test_a_request_during_the_start_is_met_after_it(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    base = f'[repository]\npaths = ["{MODELS}"]\n'
    config.write_text(base)
    process = Process(tmp_path, "--config", str(config))
    try:
        wait_until(lambda: "grpc: listening" in process.log.read_text(), PATIENCE_S)
        config.write_text(base + FRONT)
        process.popen.send_signal(signal.SIGHUP)
        process.wait_for("READY=1\nSTATUS=serving 4 models, no camera, broker off")
        process.wait_for("RELOADING=1")
        process.wait_for("STATUS=serving 4 models, 1 camera, broker off")
        process.wait_for_log("cameras: added front")
        assert process.terminate() == 0
    finally:
        process.close()
