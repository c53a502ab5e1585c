"""Listen at an address, and explain a failure with its remedy."""

from __future__ import annotations

import errno
import os
import socket


def listener(host: str, port: int, backlog: int = 1) -> socket.socket:
    """Return a socket that listens at the address; port 0 takes a free one.

    Raises:
        OSError: the address cannot be used; see `remedy`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def remedy(error: OSError, flags: str) -> str:
    """Return the reason for an error of `listener`, and its remedy.

    Args:
        error: raised by `listener`.
        flags: prefix of the flags for address and port: `--grpc`.
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
