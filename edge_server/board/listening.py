"""Why nobody can listen at an address, and what to do about it."""

from __future__ import annotations

import errno
import os
import socket


def listener(host: str, port: int, backlog: int = 1) -> socket.socket:
    """A socket that listens there; port 0 takes a free one.

    Raises:
        OSError: that is not possible; see `remedy`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def remedy(error: OSError, flags: str) -> str:
    """What went wrong in `listener`, and what helps.

    Args:
        flags: what the flags for address and port begin with: `--grpc`.
    """
    if isinstance(error, socket.gaierror):
        return f"{error.strerror}; give an address of this machine with {flags}-address"
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno == errno.EADDRINUSE:
        return (
            f"{reason}; another process may hold the port: stop it, or choose another with "
            f"{flags}-port"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{reason}; give an address of this machine with {flags}-address"
    if error.errno == errno.EACCES:
        return f"{reason}; choose a port from 1024 on with {flags}-port"
    return f"{reason}; choose others with {flags}-address and {flags}-port"
