"""When a source that was lost is opened again: after a delay, or as soon as it is there.

Looking whether it is there costs it nothing. A closed port responds to a connection by a refusal of
its host's kernel, or not at all, so no look reaches the camera's server before it listens. There
are 3 to 7 looks a second, at times drawn by chance.
"""

from __future__ import annotations

import errno
import os
import random
import select
import socket
from collections import deque
from typing import TYPE_CHECKING, Protocol

from edge_server.cameras.network import PORTS
from edge_server.process.threads import start_future
from edge_server.process.worker import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.cameras.source_uri import SourceUri

# A source that is there again is opened before it is due so many times within that time.
_MOST_CALLS_BACK = 3
_CALLS_BACK_WITHIN_S = 10.0

_SHORTEST_S, _LONGEST_S = 0.15, 0.35
# A host that is off does not respond at all.
_CONNECT_S = 1.0


class Reopening:
    """Says when a lost source is opened: after delays that double, or as soon as it is there again
    where that can be seen. Not thread-safe.

    A source that comes and goes is opened as often as the delays allow, and little more.

    Args:
        first_s: the first delay.
        longest_s: upper bound of the delays; after a source has run longer than this, they start
            from the first again.
        watch: makes what sees the source return; None where nothing does.
    """

    def __init__(
        self, first_s: float, longest_s: float, watch: Callable[[], ReturnWatch | None]
    ) -> None:
        self._backoff = Backoff(first_s, longest_s)
        self._new_watch = watch
        self._watch: ReturnWatch | None = None
        self._due = 0.0
        self._called_back: deque[float] = deque(maxlen=_MOST_CALLS_BACK)

    def lose(self, now: float, ran_s: float) -> None:
        """The source is lost; it ran for `ran_s`."""
        if ran_s > self._backoff.longest_s:
            self._backoff.reset()
        self._due = now + self._backoff.next_s()
        self.end()
        self._watch = self._new_watch()

    def is_due(self, now: float) -> bool:
        """Return whether the source is to be opened now."""
        return now >= self._due or self._is_back(now)

    def wait_s(self, now: float) -> float:
        """Return the seconds until the source is opened or looked for."""
        due = self._due if self._watch is None else min(self._due, self._watch.due)
        return max(0.0, due - now)

    def end(self) -> None:
        """Look for the source no more: it is opened, or nobody wants it."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _is_back(self, now: float) -> bool:
        """Return whether the source was away, and may be opened before it is due."""
        if self._watch is None or not self._watch.look(now):
            return False
        often = len(self._called_back) == _MOST_CALLS_BACK
        if often and now - self._called_back[0] < _CALLS_BACK_WITHIN_S:
            return False
        self._called_back.append(now)
        self._backoff.reset()
        return True


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
    """

    def __init__(self, host: str, port: int) -> None:
        self.due = 0.0
        self._away = False
        self._addresses = start_future(
            f"look up {host}", lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        self._turn = 0
        self._count = 1  # of the addresses
        self._missed = 0  # of them in a row
        self._connecting: socket.socket | None = None
        self._until = 0.0

    def look(self, now: float) -> bool:
        if now < self.due:
            return False
        self.due = now + random.uniform(_SHORTEST_S, _LONGEST_S)  # noqa: S311 - no secret
        there = self._is_there(now)
        if there is None:
            return False
        self.close()
        # The camera may be at another of its addresses alone: at IPv4, and not at IPv6.
        self._missed = 0 if there else self._missed + 1
        self._turn += not there
        back = there and self._away
        self._away = not there and (self._away or self._missed >= self._count)
        return back

    def close(self) -> None:
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.close()

    def _is_there(self, now: float) -> bool | None:
        """Return whether the port is open; None where it is not known yet."""
        if self._connecting is None and not self._connect(now):
            return False if self._addresses is not None and self._addresses.done() else None
        connecting = self._connecting
        assert connecting is not None  # noqa: S101  # for the type checker
        poll = select.poll()
        poll.register(connecting, select.POLLOUT)
        if poll.poll(0):
            return connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        return False if now > self._until else None

    def _connect(self, now: float) -> bool:
        """Begin to connect; return False where that is not possible."""
        found = self._addresses
        if found is None or not found.done() or found.exception() or not found.result():
            return False
        addresses = found.result()
        self._count = len(addresses)
        family, kind, protocol, _, address = addresses[self._turn % self._count]
        try:
            self._connecting = socket.socket(family, kind, protocol)
            self._connecting.setblocking(False)
            # Where no network leads to the host, the socket itself has no error afterwards.
            begun = self._connecting.connect_ex(address) in {0, errno.EINPROGRESS}
        except OSError:
            begun = False
        if not begun:
            self.close()
            return False
        self._until = now + _CONNECT_S
        return True


class DeviceWatch:
    """Looks for the file of a video device; a ReturnWatch."""

    def __init__(self, path: str) -> None:
        self.due = 0.0
        self._path = path
        self._away = False

    def look(self, now: float) -> bool:
        if now < self.due:
            return False
        self.due = now + random.uniform(_SHORTEST_S, _LONGEST_S)  # noqa: S311 - no secret
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
