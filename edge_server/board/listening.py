"""Listen at an address, explain a failure with its remedy, and reach a listener again."""

from __future__ import annotations

import errno
import os
import socket


def listener(host: str, port: int, backlog: int = 1) -> socket.socket:
    """Return a socket that listens at the address; port 0 takes a free one. For its OSError see
    `remedy`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def client_host(host: str) -> str:
    """Return where a client on this machine reaches a process that listens at `host`: the loopback,
    where `host` stands for every address of the machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - is not bound here


def host_and_port(host: str, port: int) -> str:
    """Return the address as URLs and gRPC write it, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def remedy(error: OSError, flags: str) -> str:
    """Return the reason for an error of `listener`, and its remedy; `flags` is the prefix of the
    flags for address and port: `--grpc`."""
    if isinstance(error, socket.gaierror):
        return f"{error.strerror}; give an address of this machine with {flags}-address"
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno == errno.EADDRINUSE:
        return (
            f"{reason}; another process may hold the port: stop it (the installed service: sudo "
            f"systemctl stop edge-server), or choose another with {flags}-port"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{reason}; give an address of this machine with {flags}-address"
    if error.errno == errno.EACCES:
        return f"{reason}; choose a port from 1024 on with {flags}-port"
    return f"{reason}; choose others with {flags}-address and {flags}-port"
