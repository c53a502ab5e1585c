"""Who cannot listen is told why, and what to do."""

from __future__ import annotations

import errno
import socket

import pytest

from edge_server.board.listening import client_host, host_and_port, remedy


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (socket.gaierror(-2, "Name or service not known"), "not known; give an address of this"),
        (PermissionError(errno.EACCES, ""), "Permission denied; choose a port from 1024 on"),
        (
            OSError(errno.EADDRINUSE, ""),
            "Address already in use; another process may hold the port: stop it (the installed "
            "service: sudo systemctl stop edge-server), or choose another with --grpc-port",
        ),
        (
            OSError(errno.EADDRNOTAVAIL, ""),
            "Cannot assign requested address; give an address of this machine with --grpc-address",
        ),
        (OSError(errno.EMFILE, ""), "Too many open files; choose others with --grpc-address"),
    ],
)
def test_each_reason_has_its_remedy(error: OSError, says: str) -> None:
    assert says in remedy(error, "--grpc")


@pytest.mark.parametrize(
    ("listens_at", "reached_at"),
    [
        ("0.0.0.0", "127.0.0.1:8001"),  # noqa: S104 - nothing is bound
        ("::", "[::1]:8001"),
        ("::1", "[::1]:8001"),
        ("10.0.0.5", "10.0.0.5:8001"),
    ],
)
def test_a_listener_of_every_address_is_reached_on_the_loopback(
    listens_at: str, reached_at: str
) -> None:
    assert host_and_port(client_host(listens_at), 8001) == reached_at
