"""sd_notify(3): what systemd learns of this process, and how often it wants to.

Not by libsystemd, whose call waits without limit for a manager that does not read.
"""

from __future__ import annotations

import logging
import os
import socket

from edge_server.process.text import as_utf8

log = logging.getLogger(__name__)

NOTIFY_TIMEOUT_S = 1.0


def notify(*assignments: str) -> bool:
    """Return whether `READY=1`, `STATUS=…`, `WATCHDOG=1`, … were sent to systemd; never raise, and
    wait at most `NOTIFY_TIMEOUT_S` for one that does not read."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(NOTIFY_TIMEOUT_S)
            sock.sendto(as_utf8("\n".join(assignments)).encode(), address)
    except OSError as error:
        log.warning("systemd: cannot be notified of %s: %s", assignments[0], error)
        return False
    return True


def watchdog_period_s() -> float | None:
    """Return the longest interval between two `WATCHDOG=1`; None without a watchdog."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    period_us = os.environ.get("WATCHDOG_USEC", "")
    return int(period_us) / 1e6 if period_us.isdecimal() and int(period_us) > 0 else None
