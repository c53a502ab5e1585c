"""A wall clock that starts in 1970 and jumps by hours costs no lane, no model and no restart."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tritonclient.grpc as triton
from support.adding_models import network, swap
from support.mosquitto import Subscriber
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest
    from support.daemon_process import Process
    from support.mosquitto import Mosquitto

TIMEOUT_S = 30.0
TOPIC = "edge/v1/tested/cameras/front/lanes"
HEALTH = "edge/v1/tested/health"


class Clock:
    """The wall clock of processes that start from now on; that of durations stays the kernel's."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._file = folder / "clock"
        library = folder / "wall_clock.so"
        source = Path(__file__).parents[1] / "support/stand_ins/wall_clock.c"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
        self.set(0)
        patch.setenv("WALL_CLOCK", str(self._file))
        patch.setenv("LD_PRELOAD", str(library))

    def set(self, offset_s: int) -> None:
        """Set the clock; the file is mapped, so it is changed in place."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(offset_s.to_bytes(8, sys.byteorder, signed=True))


def test_lanes_and_models_go_on_while_the_clock_jumps(
    start: Callable[..., Process],
    mosquitto: Mosquitto,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subscriber = Subscriber(mosquitto.port, "edge/v1/tested/#")
    repository = tmp_path / "repository"
    repository.mkdir()
    swap(repository, "m", network(1.0))
    shipped = Path(__file__).parents[2] / "models"
    clock = Clock(tmp_path, monkeypatch)
    clock.set(600 - int(time.time()))  # 1970-01-01 00:10
    config = tmp_path / "config.toml"
    config.write_text(
        f'[device]\nid = "tested"\n[repository]\npaths = ["{shipped}", "{repository}"]\n'
        f'mode = "poll"\npoll_s = 0.3\nsettle_s = 0.3\nprobation_requests = 0\n'
        f'store = "{tmp_path}/store"\n[mqtt]\nhost = "127.0.0.1"\nport = {mosquitto.port}\n'
        '[cameras.front]\nuri = "synthetic://road?seed=7&fps=10"\nmax_age_ms = 1000\n'
    )
    process = start("--config", str(config))
    client = triton.InferenceServerClient(f"127.0.0.1:{process.port}")
    try:
        # On a busy machine the first may be stale.
        first = subscriber.wait(
            TOPIC, lambda m: m["lanes"] and m["status"] == "FRAME_STATUS_DEGRADED"
        )
        assert first["time"]["capture_time"].startswith("1970-01-01T00:1")
        assert first["time"]["wall_clock"] == "WALL_CLOCK_WRONG"
        assert "clock_unsynchronized: wrong" in first["reasons"]
        assert subscriber.wait(HEALTH)["time"]["clock"] == "HEALTH_CLOCK_WRONG"

        for number, hours in enumerate((0, 6, 1, 4), 1):
            clock.set(3600 * hours)
            health = _steps(subscriber, number)
            assert health["status"] != "HEALTH_STATUS_DEGRADED"
            swap(repository, "m", network(number + 1.0))
            _wait_for(client, number + 1.0)
            heard = len(subscriber.messages[TOPIC])
            told = subscriber.wait(TOPIC, lambda m: m["lanes"], since=heard)
            assert told["time"]["wall_clock"] != "WALL_CLOCK_WRONG"
            assert not any("clock_unsynchronized" in reason for reason in told["reasons"])
            off_s = int(told["time"]["capture_epoch_ns"]) / 1e9 - time.time() - 3600 * hours
            assert abs(off_s) < 60

        lanes = subscriber.messages[TOPIC]
        times = [int(each["time"]["capture_mono_ns"]) for each in lanes]
        assert times == sorted(times)
        # No stall was seen where the clock jumped, and no age was measured with it; a busy machine
        # may make lanes too old all the same.
        words = {reason.partition(":")[0] for each in lanes for reason in each["reasons"]}
        assert words <= {"clock_unsynchronized", "age", "too_old"}
        assert max(each["time"]["age_us"] for each in lanes) < 60_000_000
        states = subscriber.messages["edge/v1/tested/cameras/front/status"]
        assert {state["state"] for state in states} <= {"lost", "ok"}
        assert not states[-1]["since"].startswith("1970")
        assert process.popen.poll() is None
        process.wait_for_log("clock: was set by")
    finally:
        client.close()
        subscriber.close()
    assert process.terminate() == 0


def _steps(subscriber: Subscriber, count: int) -> dict:
    """The health of the device when it has seen so many steps; it looks twice a second."""
    return subscriber.wait(HEALTH, lambda m: m["time"]["clock_steps"] == count)


def _wait_for(client: triton.InferenceServerClient, number: float) -> None:
    values = triton.InferInput("x", [1], "FP32")
    values.set_data_from_numpy(np.zeros(1, np.float32))
    wait_until(
        lambda: float(client.infer("m", [values]).as_numpy("y")[0]) == number,
        TIMEOUT_S,
        otherwise=lambda: f"model {number} is not followed",
    )
