"""One build at a time on a device: two would halve each other's memory, and distort each other's
measurements."""

from __future__ import annotations

import errno
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edge_server.errors import Cancelled, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# An abstract socket name: visible without a shared directory, and released with the process.
LOCK_NAME = "\0edge-server-plan-build"
_RETRY_S = 0.5


@contextmanager
def build_lock(on_wait: Callable[[], None], stop: threading.Event | None = None) -> Iterator[None]:
    """Hold the device's build lock; wait while another build holds it.

    Args:
        on_wait: called once, if another process or thread holds the lock.
        stop: ends the wait when set.

    Raises:
        Cancelled: `stop` was set during the wait.
        InternalError: the kernel refuses the lock for a permanent reason.
    """
    stop = stop or threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        waited = False
        while True:
            try:
                lock.bind(LOCK_NAME)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise InternalError(
                        f"the lock of plan builds, the abstract Unix socket {LOCK_NAME[1:]}, "
                        f"cannot be bound: {error.strerror}; let the service's security profile "
                        "(AppArmor, SELinux) allow it"
                    ) from error
                if not waited:
                    on_wait()
                waited = True
                if stop.wait(_RETRY_S):
                    raise Cancelled("the build was given up while another one ran") from None
        yield
