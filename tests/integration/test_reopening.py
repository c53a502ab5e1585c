"""A lost camera's port and device are looked for, with real sockets and files."""

from __future__ import annotations

import resource
import socket
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from support.free_ports import free_ports
from support.waiting import TIMEOUT_S, wait_until

from edge_server.cameras.live_source import Reopening, look_for_device, look_for_port
from edge_server.cameras.source_uri import parse_source_uri
from edge_server.mqtt.outbox import Wake

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from support.live_cameras.started import LiveCameras

    from edge_server.cameras.source_uri import SourceUri


class Lost:
    """A camera that was lost just now; each of its looks is due, and it has begun so many."""

    def __init__(self, look: Callable[[SourceUri], Future[bool] | None], uri: str) -> None:
        self.looks, self._now = 0, 0.0
        self._look = partial(look, parse_source_uri(uri))
        self._reopening = Reopening(1e9, 1e9, self._counted)
        self._reopening.lose(0.0, 0.0)

    def _counted(self) -> Future[bool] | None:
        self.looks += 1
        return self._look()

    def is_back(self) -> bool:
        self._now += self._reopening.wait_s(self._now)
        return self._reopening.is_due(self._now)

    def never_back(self, looks: int = 4) -> bool:
        """Look so often; return whether no look said that the camera is back."""
        found: list[bool] = []
        wait_until(lambda: found.append(self.is_back()) or self.looks > looks)
        return not any(found)


def lost_port(host: str, port: int) -> Lost:
    return Lost(look_for_port, f"rtsp://{host}:{port}/live")


def test_a_port_that_opens_again_is_seen() -> None:
    (port,) = free_ports(1)
    camera = lost_port("localhost", port)
    assert camera.never_back()
    with socket.create_server(("127.0.0.1", port)):
        wait_until(camera.is_back)


def test_the_watch_holds_where_a_process_has_more_than_1024_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.enter_context(socket.socket())
        camera = lost_port("127.0.0.1", free_ports(1)[0])
        assert camera.never_back()
        wake = Wake()
        wake.ring()
        wake.wait(TIMEOUT_S)
        wake.close()


def test_a_port_that_was_open_all_the_time_is_not_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        camera = lost_port("127.0.0.1", server.getsockname()[1])
        assert camera.never_back()


def test_a_host_that_drops_every_packet_or_is_unknown_holds_nobody(
    live_cameras: LiveCameras,
) -> None:
    for host, port in (("127.0.0.1", live_cameras.dropping_port()), ("kamera.invalid", 554)):

        def takes_no_time(host: str = host, port: int = port) -> bool:
            camera, begun = lost_port(host, port), time.monotonic()
            for _ in range(30):
                camera.is_back()
            return time.monotonic() - begun < 1.0

        wait_until(takes_no_time)  # a busy machine is slow now and then


def test_a_device_that_is_plugged_in_again_is_seen(tmp_path: Path) -> None:
    device = tmp_path / "video0"
    camera = Lost(look_for_device, f"v4l2://{device}")
    assert camera.never_back()
    device.touch()
    assert camera.is_back()


def test_without_a_thread_it_is_looked_for_a_few_times_a_second() -> None:
    camera = Reopening(1e9, 1e9, lambda: None)
    camera.lose(0.0, 0.0)
    for now in (0.0, 10.0, 20.0):
        assert not camera.is_due(now)
        assert camera.wait_s(now) > 0.1
