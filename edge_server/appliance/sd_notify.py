"""Telling systemd how we are: sd_notify(3) in a few lines, no library needed."""

from __future__ import annotations

import os
import socket


def notify(*assignments: str) -> None:
    """Send `READY=1`, `STATUS=…`, `WATCHDOG=1`, … to the service manager, if there is one."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.sendto("\n".join(assignments).encode(), address)


def watchdog_period_s() -> float | None:
    """How often systemd wants `WATCHDOG=1` at the latest; None when it watches nothing."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    period_us = os.environ.get("WATCHDOG_USEC", "")
    return int(period_us) / 1e6 if period_us.isdecimal() and int(period_us) > 0 else None
