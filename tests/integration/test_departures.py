"""From a drive to a departure warning in `mosquitto_sub`, with the commands of docs/start.md; the
vehicle's state withholds one, over gRPC and MQTT."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.lane_stubs import CLIENT, SEED, write_calibration
from support.verb import run_verb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.daemon_process import Process
    from support.mosquitto import Mosquitto

START = Path(__file__).parents[2] / "docs/start.md"
MODELS = Path(__file__).parents[2] / "models"
EXAMPLE = Path(__file__).parents[2] / "examples/lanes/lanes.py"
WAIT_S = 100


def commands() -> list[str]:
    """The block of docs/start.md that warns of departures."""
    block = re.search(r"```sh\n(edge-server calibrate lens .*?)```", START.read_text(), re.DOTALL)
    assert block is not None
    return [line.partition("  #")[0].strip() for line in block[1].splitlines()]


def configuration() -> str:
    block = re.search(r"```toml\n(# drive\.toml\n.*?)```", START.read_text(), re.DOTALL)
    assert block is not None
    return block[1]


def test_five_commands_lead_from_a_drive_to_a_warning(
    mosquitto: Mosquitto, start: Callable[..., Process], tmp_path: Path
) -> None:
    if shutil.which("mosquitto_sub") is None:
        pytest.skip("no mosquitto_sub on this machine: apt install mosquitto-clients")
    lens, estimate, check, run, subscribe = commands()
    for command in (lens, estimate.replace("frames=300", "frames=60")):
        words = [word.strip("'") for word in command.split()]
        assert words[0] == "edge-server"
        done = run_verb(*words[1:], cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    # In some of them the vehicle changes its lane.
    assert re.search(r"(5\d|60) of 60 frames show the paint of both lines", done.stdout)

    text = configuration().replace("front.toml", str(tmp_path / "front.toml"))
    text = text.replace('"models"', f'"{MODELS}"')
    text = text.replace('host = "localhost"', f'host = "{mosquitto.host}"\nport = {mosquitto.port}')
    (tmp_path / "drive.toml").write_text(text)
    topic = subscribe.split()[-1].strip("'")
    subscriber = subprocess.Popen(
        [
            *("mosquitto_sub", "-h", mosquitto.host, "-p", str(mosquitto.port), "-q", "1"),
            *("-W", str(WAIT_S), "-C", "2", "-t", topic),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert check == "edge-server check --config drive.toml"
        assert run == "edge-server run --config drive.toml"
        start("--config", str(tmp_path / "drive.toml"))
        events: list[Any] = [json.loads(line) for line in subscriber.communicate()[0].splitlines()]
    finally:
        subscriber.kill()
    begin, end = events
    assert (begin["kind"], begin["phase"]) == ("EVENT_KIND_LANE_DEPARTURE", "EVENT_PHASE_BEGIN")
    assert (begin["cause"], begin["camera"]) == ("left", "front")
    # Between ISO 17361's earliest and latest line, also where a busy machine drops frames.
    assert -0.3 <= begin["distance_to_line_m"] <= 0.75
    assert (end["phase"], end["cause"]) == ("EVENT_PHASE_END", "returned")
    assert end["begin_id"] == begin["id"]


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_what_the_vehicle_says_of_itself_withholds_warnings(
    mosquitto: Mosquitto, start: Callable[..., Process], tmp_path: Path
) -> None:
    if shutil.which("mosquitto_sub") is None:
        pytest.skip("no mosquitto_sub on this machine: apt install mosquitto-clients")
    write_calibration(tmp_path / "front.toml")
    # Wider than its lane: it leaves it all the time, on both sides.
    (tmp_path / "drive.toml").write_text(
        f"""
        [device]
        id = "truck-7"
        [repository]
        paths = ["{MODELS}"]
        [vehicle]
        width_m = 4.0
        [mqtt]
        host = "{mosquitto.host}"
        port = {mosquitto.port}
        vehicle_state = true
        [cameras.front]
        uri = "synthetic://road?seed={SEED}&fps=10"
        calibration = "{tmp_path / "front.toml"}"
        max_age_ms = 1000
        """
    )
    broker, root = ("-h", mosquitto.host, "-p", str(mosquitto.port)), "edge/v1/truck-7"
    topics = ("-t", f"{root}/cameras/front/events/#", "-t", f"{root}/cameras/front/lanes")
    with running("mosquitto_sub", *broker, "-W", str(WAIT_S), *topics) as subscriber:
        daemon = start("--config", str(tmp_path / "drive.toml"))

        def next_event() -> tuple[str, str]:
            messages = (json.loads(line) for line in subscriber.stdout or ())
            event = next(each for each in messages if each["schema"] == "edge.event/1")
            assert event["kind"] == "EVENT_KIND_LANE_DEPARTURE"
            assert event["cause_code"] == f"REASON_CODE_{event['cause'].upper()}"
            return event["phase"], event["cause"]

        def lanes() -> dict[str, Any]:
            """The first after the event."""
            messages = (json.loads(line) for line in subscriber.stdout or ())
            return dict(next(each for each in messages if "ego" in each))

        def departure() -> dict[str, str]:
            return dict(lanes()["ego"]["departure"])

        assert next_event() == ("EVENT_PHASE_BEGIN", "left")
        assert departure() == {
            "state": "DEPARTURE_STATE_WARNING",
            "side": "left",
            "withheld_by": "",
            "side_code": "DEPARTURE_SIDE_LEFT",
            "withheld_by_code": "WITHHELD_BY_NONE",
        }

        client = f"PYTHONPATH={CLIENT}"
        program = ("env", client, sys.executable, str(EXAMPLE), f"127.0.0.1:{daemon.port}")
        with running(*program, "vehicle", "25", "hazard", str(WAIT_S)):
            assert next_event() == ("EVENT_PHASE_END", "indicator")
            found = departure()
            assert found["state"] == "DEPARTURE_STATE_WITHHELD"
            assert found["withheld_by"] == "indicator"
            assert found["withheld_by_code"] == "WITHHELD_BY_INDICATOR"
            frame = lanes()
            assert frame["vehicle"]["speed_mps"] == 25.0
            assert frame["vehicle"]["indicator"] == "INDICATOR_HAZARD"
            assert frame["vehicle"]["age_us"] <= 500_000
            # Its wheels are beyond the boundary, and time has passed.
            assert frame["ego"]["left"]["distance_m"] < 0
            assert frame["ego"]["left"]["time_s"] == 0.0
        # Half a second later the daemon does not know it any more.
        assert next_event() == ("EVENT_PHASE_BEGIN", "left")

        publish = ("mosquitto_pub", *broker, "-t", f"{root}/vehicle", "--repeat-delay", "0.1")
        again = ("--repeat", str(10 * WAIT_S))
        with running(*publish, *again, "-m", '{"speed_mps": 10}'):
            assert next_event() == ("EVENT_PHASE_END", "slow")
            assert departure()["withheld_by"] == "slow"
        # On the left alone.
        with running(*publish, *again, "-m", '{"indicator": "INDICATOR_LEFT"}'):
            assert next_event() == ("EVENT_PHASE_BEGIN", "right")
        subprocess.run([*publish, "-m", '{"speed": 10}'], check=True)
        wrong = "edge/v1/truck-7/vehicle: left out: this is no SetVehicleStateRequest in json"
        while wrong not in daemon.log.read_text():
            departure()  # lanes go on
