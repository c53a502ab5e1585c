"""Whether a lost camera is there again, by looks that cost it nothing.

A closed port responds to a connection by a refusal of its host's kernel, or not at all, so no look
reaches the camera's server before it listens. There are 3 to 7 looks a second, at times drawn by
chance.
"""

from __future__ import annotations

import os
import random
import select
import socket
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from edge_server.cameras.network_probe import PORTS
from edge_server.process.threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.cameras.source_uri import SourceUri

_SHORTEST_S, _LONGEST_S = 0.15, 0.35
# A host that is off does not respond at all.
_CONNECT_S = 1.0


class ReturnWatch(Protocol):
    """Looks for one camera after it was lost; used by one thread, and no call waits.

    Attributes:
        due: `time.monotonic()` of the next look.
    """

    due: float

    def look(self, now: float) -> bool:
        """Look once `due` has come; return whether the camera has been away and is there now."""
        ...

    def close(self) -> None:
        """Give up what the watch holds; a second call does nothing."""
        ...


class PortWatch:
    """Looks for the port of a camera in the network; a ReturnWatch.

    Args:
        host: name or address; a name is looked up once, on a thread of its own.
        port: of its server.
        draw: returns a number in 0..1 for each interval.
    """

    def __init__(self, host: str, port: int, draw: Callable[[], float] = random.random) -> None:
        self.due = 0.0
        self._draw = draw
        self._away = False
        self._addresses: Future[list[Any]] = Future()
        self._turn = 0
        self._connecting: socket.socket | None = None
        self._until = 0.0
        start_thread(f"look up {host}", lambda: _look_up(host, port, self._addresses))

    def look(self, now: float) -> bool:
        if now < self.due:
            return False
        self.due = now + _SHORTEST_S + (_LONGEST_S - _SHORTEST_S) * self._draw()
        there = self._is_there(now)
        if there is None:
            return False
        self.close()
        back = there and self._away
        self._away = not there
        return back

    def close(self) -> None:
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.close()

    def _is_there(self, now: float) -> bool | None:
        """Return whether the port is open; None where it is not known yet."""
        if self._connecting is None and not self._connect(now):
            return False if self._addresses.done() else None
        connecting = self._connecting
        assert connecting is not None  # noqa: S101  # for the type checker
        poll = select.poll()
        poll.register(connecting, select.POLLOUT)
        if poll.poll(0):
            return connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        return False if now > self._until else None

    def _connect(self, now: float) -> bool:
        """Begin to connect; return False where that is not possible."""
        addresses = self._addresses.result() if self._addresses.done() else []
        if not addresses:
            return False
        family, kind, protocol, _, address = addresses[self._turn % len(addresses)]
        self._turn += 1
        try:
            self._connecting = socket.socket(family, kind, protocol)
            self._connecting.setblocking(False)
            self._connecting.connect_ex(address)
        except OSError:
            self.close()
            return False
        self._until = now + _CONNECT_S
        return True


def _look_up(host: str, port: int, found: Future[list[Any]]) -> None:
    try:
        found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        found.set_result([])


class DeviceWatch:
    """Looks for the file of a video device; a ReturnWatch."""

    def __init__(self, path: str, draw: Callable[[], float] = random.random) -> None:
        self.due = 0.0
        self._path = path
        self._draw = draw
        self._away = False

    def look(self, now: float) -> bool:
        if now < self.due:
            return False
        self.due = now + _SHORTEST_S + (_LONGEST_S - _SHORTEST_S) * self._draw()
        # A new device belongs to root until udev has seen it.
        there = os.access(self._path, os.R_OK | os.W_OK)
        back = there and self._away
        self._away = not there
        return back

    def close(self) -> None:
        """Nothing to give up."""


def watch_port(uri: SourceUri) -> ReturnWatch:
    return PortWatch(uri.host, uri.port or PORTS[uri.scheme])


def watch_device(uri: SourceUri) -> ReturnWatch:
    return DeviceWatch(uri.path)
