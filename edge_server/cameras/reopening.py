"""When a source that was lost is opened again: after a delay, or as soon as it is there.

Looking whether it is there costs it nothing. A closed port responds to a connection by a refusal of
its host's kernel, or not at all, so no look reaches the camera's server before it listens. There
are 3 to 7 looks a second, at times drawn by chance.
"""

from __future__ import annotations

import os
import random
import socket
from collections import deque
from typing import TYPE_CHECKING

from edge_server.cameras.network import PORTS
from edge_server.process.threads import Backoff, start_future

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from edge_server.cameras.source_uri import SourceUri

# A source that is there again is opened before it is due so many times within that time.
_MOST_CALLS_BACK = 3
_CALLS_BACK_WITHIN_S = 10.0

_SHORTEST_S, _LONGEST_S = 0.15, 0.35
# What is not known at once mostly is so soon.
_UNKNOWN_S = 0.02
# A host that is off does not respond at all.
_CONNECT_S = 1.0


class Reopening:
    """Says when a lost source is opened: after delays that double, or as soon as it is there again
    where that can be seen. Not thread-safe.

    A source that comes and goes is opened as often as the delays allow, and little more.

    Args:
        first_s: the first delay.
        longest_s: the longest; after a source has run longer, they start from the first again.
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
        self._watch = None

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


class ReturnWatch:
    """Looks for one camera after it was lost; used by one thread, and no call waits.

    `due` is the time of the next look. `is_there` looks for it, None where it is not known yet.
    """

    def __init__(self, is_there: Callable[[], bool | None]) -> None:
        self.due = 0.0
        self._is_there = is_there
        self._away = self._unknown = False

    def look(self, now: float) -> bool:
        """Look once `due` has come; return whether the camera has been away and is there now."""
        if now < self.due:
            return False
        there, again = self._is_there(), self._unknown
        self._unknown = there is None
        self.due = now + random.uniform(_SHORTEST_S, _LONGEST_S)  # noqa: S311 - no secret
        if there is None:
            self.due = self.due if again else now + _UNKNOWN_S
            return False
        back = there and self._away
        self._away = not there
        return back


class PortProbe:
    """Connects to the port of a camera, over and over; each attempt has a thread of its own, as
    looking up a name and connecting wait."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._attempt: Future[bool] | None = None

    def __call__(self) -> bool | None:
        if self._attempt is None:
            self._attempt = start_future(f"look for {self._address[0]}", self._connect)
        if self._attempt is None or not self._attempt.done():
            return None
        there, self._attempt = self._attempt.result(), None
        return there

    def _connect(self) -> bool:
        try:
            socket.create_connection(self._address, _CONNECT_S).close()
        except (OSError, UnicodeError):  # the latter: it is no host name
            return False
        return True


def watch_port(uri: SourceUri) -> ReturnWatch:
    return ReturnWatch(PortProbe(uri.host, uri.port or PORTS[uri.scheme]))


def watch_device(uri: SourceUri) -> ReturnWatch:
    # A new device belongs to root until udev has seen it.
    return ReturnWatch(lambda: os.access(uri.path, os.R_OK | os.W_OK))
