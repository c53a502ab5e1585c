"""One build at a time on a device: two would halve each other's memory, and spoil each other's
measurements."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edge_server.errors import Cancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# An abstract name: no directory that a service might not see, and gone with the process.
_NAME = "\0edge-server-plan-build"
_AGAIN_S = 0.5


@contextmanager
def build_turn(
    on_wait: Callable[[], None],
    stop: threading.Event | None = None,
    name: str = _NAME,
) -> Iterator[None]:
    """Hold the device's only turn to build; waits for it.

    Args:
        on_wait: called once, where another process or thread has it.

    Raises:
        Cancelled: `stop` was set while this waited.
    """
    stop = stop or threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as turn:
        waited = False
        while True:
            try:
                turn.bind(name)
                break
            except OSError:
                if not waited:
                    on_wait()
                waited = True
                if stop.wait(_AGAIN_S):
                    raise Cancelled("the build was given up while another one ran") from None
        yield
