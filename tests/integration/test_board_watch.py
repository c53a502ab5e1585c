"""A sensor that never lets itself be read costs its numbers, and neither lanes nor the end."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.boards import plant
from support.waiting import TIMEOUT_S, wait_until

from edge_server.board import watch
from edge_server.board.board import read_board
from edge_server.board.facts import read_board_facts, read_within
from edge_server.board.watch import BoardWatch
from edge_server.daemon import build
from edge_server.daemon.daemon import Daemon
from edge_server.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Path]:
    """A board with a sensor whose read waits for ever; it ends with the test."""
    root = plant("orin_nx_jetpack6", tmp_path / "board")
    sensor = root / "sys/class/hwmon/hwmon1/curr1_input"
    sensor.unlink()
    os.mkfifo(sensor)
    yield root
    end = threading.Event()

    def release() -> None:
        while not end.is_set():
            try:
                os.close(os.open(sensor, os.O_WRONLY | os.O_NONBLOCK))
            except OSError:
                end.wait(0.05)

    sensor_reader = threading.Thread(target=release)
    sensor_reader.start()
    for thread in threading.enumerate():
        if thread.name == "board":
            thread.join(TIMEOUT_S)
    end.set()
    sensor_reader.join()


def test_doctor_goes_on_without_the_facts(hanging: Path) -> None:
    assert read_within(0.3, hanging) is None


def test_doctor_says_so(hanging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_server.board.board._SENSORS_S", 0.3)
    board = read_board(hanging)
    assert board.facts is None
    assert board.module is not None


def test_lanes_go_on_and_the_daemon_ends(
    hanging: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = plant("orin_nx_jetpack6", hanging.parent / "whole")
    roots = iter([whole, *[hanging] * 100])
    monkeypatch.setattr(watch, "STALE_S", 1.0)
    read = lambda _: read_board_facts(next(roots))  # noqa: E731
    monkeypatch.setattr(build, "BoardWatch", partial(BoardWatch, read=read))
    lanes = []
    settings = read_settings(
        None,
        {
            "repository": {"paths": [str(MODELS)]},
            "grpc": {"port": 0},
            "metrics": {"port": 0},
            "http": {"port": 0},
            "cameras": {"front": {"uri": "synthetic://road?seed=7&fps=10"}},
        },
    )
    daemon = Daemon(settings, [lambda lane_frame, _: lanes.append(lane_frame)])
    stop = threading.Event()
    daemon.start(stop)
    running = threading.Thread(target=daemon.run, args=(stop,))
    running.start()
    try:
        wait_until(lambda: "cannot be read" in caplog.text, 30)
        seen = len(lanes)
        wait_until(lambda: len(lanes) >= seen + 10, 30)
        assert running.is_alive()
    finally:
        stop.set()
        running.join(TIMEOUT_S)
        daemon.stop()
    assert not running.is_alive()
