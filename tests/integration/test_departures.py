"""From a drive to a departure warning in `mosquitto_sub`, with the commands of the README."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conftest import Mosquitto, Process

README = Path(__file__).parents[2] / "README.md"
MODELS = Path(__file__).parents[2] / "models"
WAIT_S = 60


def commands() -> list[str]:
    """The README's block that warns of departures, behind the one that enters the environment."""
    block = re.search(
        r"```\nsource [^\n]*\n(edge-server calibrate lens .*?)```", README.read_text(), re.DOTALL
    )
    assert block is not None
    return [line.partition("  #")[0].strip() for line in block[1].splitlines()]


def configuration() -> str:
    block = re.search(r"```toml\n(# drive\.toml\n.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    return block[1]


def test_five_commands_lead_from_a_drive_to_a_warning(
    mosquitto: Mosquitto, start: Callable[..., Process], tmp_path: Path
) -> None:
    if shutil.which("mosquitto_sub") is None:
        pytest.skip("no mosquitto_sub on this machine: apt install mosquitto-clients")
    lens, estimate, run, subscribe = commands()
    for command in (lens, estimate.replace("frames=300", "frames=60")):
        words = [word.strip("'") for word in command.split()]
        assert words[0] == "edge-server"
        done = subprocess.run(
            [sys.executable, "-m", *["edge_server", *words[1:]]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"60 of 60 frames show both lines", done.stdout)

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
