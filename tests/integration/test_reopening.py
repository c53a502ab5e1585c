"""A lost camera's port and device are looked for, with real sockets and files."""

from __future__ import annotations

import resource
import socket
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from support.free_ports import free_ports
from support.waiting import TIMEOUT_S, wait_until

from edge_server.cameras.live_source import PortProbe, ReturnWatch, watch_device
from edge_server.cameras.source_uri import parse_source_uri
from edge_server.mqtt.outbox import Wake

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.live_cameras.started import LiveCameras


class Watch:
    """A `ReturnWatch` whose looks are all due, and which has looked so often."""

    def __init__(self, is_there: Callable[[], bool | None]) -> None:
        self.watch, self.looks = ReturnWatch(self._look), 0
        self._is_there = is_there

    def _look(self) -> bool | None:
        there = self._is_there()
        self.looks += there is not None
        return there

    def is_back(self) -> bool:
        return self.watch.look(self.watch.due)

    def never_back(self, looks: int = 4) -> bool:
        """Look so often; return whether no look said that the camera is back."""
        found: list[bool] = []
        wait_until(lambda: found.append(self.is_back()) or self.looks >= looks)
        return not any(found)


def port_watch(host: str, port: int) -> Watch:
    return Watch(PortProbe(host, port))


def test_a_port_that_opens_again_is_seen() -> None:
    (port,) = free_ports(1)
    watch = port_watch("localhost", port)
    assert watch.never_back()
    with socket.create_server(("127.0.0.1", port)):
        wait_until(watch.is_back)


def test_the_watch_holds_where_a_process_has_more_than_1024_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.enter_context(socket.socket())
        watch = port_watch("127.0.0.1", free_ports(1)[0])
        assert watch.never_back()
        wake = Wake()
        wake.ring()
        wake.wait(TIMEOUT_S)
        wake.close()


def test_a_port_that_was_open_all_the_time_is_not_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        watch = port_watch("127.0.0.1", server.getsockname()[1])
        assert watch.never_back()


def test_a_host_that_drops_every_packet_or_is_unknown_holds_nobody(
    live_cameras: LiveCameras,
) -> None:
    for host, port in (("127.0.0.1", live_cameras.dropping_port()), ("kamera.invalid", 554)):

        def takes_no_time(host: str = host, port: int = port) -> bool:
            watch, begun = port_watch(host, port), time.monotonic()
            for _ in range(30):
                watch.is_back()
            return time.monotonic() - begun < 1.0

        wait_until(takes_no_time)  # a busy machine is slow now and then


def test_a_device_that_is_plugged_in_again_is_seen(tmp_path: Path) -> None:
    device = tmp_path / "video0"
    watch = watch_device(parse_source_uri(f"v4l2://{device}"))
    assert not any(watch.look(watch.due) for _ in range(4))
    device.touch()
    assert watch.look(watch.due)
