"""The connections of a video library to one RTSP camera.

GStreamer neither bounds a message of RTSP nor can be interrupted within one, and would fill the
memory; FFmpeg follows a camera's redirect to any host.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_OPEN = Path("/proc/self/fd")
# In struct tcp_info of linux/tcp.h.
_BYTES_RECEIVED = slice(128, 136)


class CameraSockets:
    """The TCP connections of this process to one camera that begin after this object is made.

    Another camera at the same address counts as the same one, if it is opened later.

    Args:
        hosts: the camera's IP addresses.
    """

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = hosts
        self._before = {name for _, name in _sockets()} if hosts else set()

    def connected(self) -> bool:
        """Return whether one of them is open."""
        return any(True for _ in self._connections())

    def received_bytes(self) -> int:
        """Return how much the connection with the most has received."""
        return max(
            (
                int.from_bytes(
                    each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)[_BYTES_RECEIVED],
                    "little",
                )
                for each in self._connections()
            ),
            default=0,
        )

    def shut_down(self) -> None:
        """End the connections: whoever reads them finds their end."""
        for each in self._connections():
            each.shutdown(socket.SHUT_RDWR)

    def _connections(self) -> Iterator[socket.socket]:
        for number, name in _sockets() if self._hosts else ():
            if name in self._before:
                continue
            try:
                connection = socket.socket(fileno=os.dup(number))
            except OSError:  # closed since
                continue
            with connection:
                try:
                    if (
                        connection.type == socket.SOCK_STREAM
                        and connection.family in (socket.AF_INET, socket.AF_INET6)
                        and connection.getpeername()[0] in self._hosts
                    ):
                        yield connection
                except OSError:  # not connected
                    continue


def _sockets() -> Iterator[tuple[int, str]]:
    """Yield the descriptor and the kernel's name of every socket of this process."""
    for entry in _OPEN.iterdir():
        try:
            name = str(entry.readlink())
        except OSError:  # closed since
            continue
        if name.startswith("socket:"):
            yield int(entry.name), name
