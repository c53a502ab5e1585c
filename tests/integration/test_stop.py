"""Stopping tells everyone first and waits for nobody longer than its grace."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from edge_server.daemon.daemon import Daemon
from edge_server.settings import Serving, read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODELS = Path(__file__).parents[2] / "models"
TIMEOUT_S = 30.0
GRACE_S = Serving().exit_timeout_s


@pytest.fixture
def two_cameras() -> Iterator[Callable[..., Daemon]]:
    """A daemon with two rendered roads and listeners of the test's."""
    started: list[Daemon] = []

    def start(*listeners: object, stop: threading.Event | None = None) -> Daemon:
        camera = {"uri": "synthetic://road?seed=7&fps=4"}
        overrides = {
            "repository": {"paths": [str(MODELS)]},
            "grpc": {"port": 0},
            "metrics": {"enabled": False},
            "http": {"enabled": False},
            "cameras": {"left": camera, "right": camera},
        }
        daemon = Daemon(read_settings(None, overrides), listeners)
        started.append(daemon)
        daemon.start(stop or threading.Event())
        return daemon

    yield start
    for daemon in started:
        daemon.stop()


def test_two_pipelines_that_hang_share_one_grace(
    two_cameras: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    hanging = threading.Semaphore(0)

    def hang(*_: object) -> None:
        hanging.release()
        let_go.wait(TIMEOUT_S)

    daemon = two_cameras(hang)
    for _ in range(2):
        assert hanging.acquire(timeout=TIMEOUT_S)
    waited_s: list[float] = []
    for pipeline in daemon.pipelines:

        def stop(timeout_s: float, stop: Callable[[float], None] = pipeline.worker.stop) -> None:
            waited_s.append(timeout_s)
            stop(timeout_s)

        monkeypatch.setattr(pipeline.worker, "stop", stop)
    daemon.stop()
    assert all(pipeline.worker.alive for pipeline in daemon.pipelines)
    let_go.set()
    assert len(waited_s) == 2
    assert sum(waited_s) <= GRACE_S


def test_a_daemon_that_is_stopped_while_it_starts_never_becomes_ready(
    two_cameras: Callable[..., Daemon],
) -> None:
    stop = threading.Event()
    stop.set()
    seen: list[object] = []
    daemon = two_cameras(lambda *_: seen.append(1), stop=stop)
    assert not daemon.data_plane.server_ready()
    assert not any(pipeline.worker.alive for pipeline in daemon.pipelines)
    daemon.run(stop)
    daemon.stop()
    assert seen == []
