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
    from pathlib import Path

    from support.live_cameras.started import LiveCameras


def port_watch(host: str, port: int) -> ReturnWatch:
    return ReturnWatch(PortProbe(host, port))


def looks(watch: ReturnWatch, for_s: float, until: bool = True) -> bool:
    """Look whenever it is due; return whether a look said that the camera is back."""
    end = time.monotonic() + for_s
    while (now := time.monotonic()) < end:
        if watch.look(now) and until:
            return True
        time.sleep(max(0.0, min(watch.due, end) - time.monotonic()))
    return False


def test_a_port_that_opens_again_is_seen() -> None:
    (port,) = free_ports(1)
    watch = port_watch("localhost", port)
    assert not looks(watch, 1.0)
    with socket.create_server(("127.0.0.1", port)):
        assert looks(watch, TIMEOUT_S)


def test_the_watch_holds_where_a_process_has_more_than_1024_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.enter_context(socket.socket())
        watch = port_watch("127.0.0.1", free_ports(1)[0])
        assert not looks(watch, 1.0)
        wake = Wake()
        wake.ring()
        wake.wait(TIMEOUT_S)
        wake.close()


def test_a_port_that_was_open_all_the_time_is_not_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        watch = port_watch("127.0.0.1", server.getsockname()[1])
        assert not looks(watch, 1.0)


def test_a_host_that_drops_every_packet_or_is_unknown_holds_nobody(
    live_cameras: LiveCameras,
) -> None:
    for host, port in (("127.0.0.1", live_cameras.dropping_port()), ("kamera.invalid", 554)):

        def takes_no_time(host: str = host, port: int = port) -> bool:
            watch, begun = port_watch(host, port), time.monotonic()
            for step in range(30):
                watch.look(begun + step)
            return time.monotonic() - begun < 1.0

        wait_until(takes_no_time)  # a busy machine is slow now and then


def test_a_device_that_is_plugged_in_again_is_seen(tmp_path: Path) -> None:
    device = tmp_path / "video0"
    watch = watch_device(parse_source_uri(f"v4l2://{device}"))
    assert not looks(watch, 0.5)
    device.touch()
    assert looks(watch, TIMEOUT_S)
