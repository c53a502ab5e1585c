"""Who cannot listen is told why, and what to do."""

from __future__ import annotations

import errno
import socket

import pytest

from edge_server.board.listening import remedy


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (socket.gaierror(-2, "Name or service not known"), "not known; give an address of this"),
        (PermissionError(errno.EACCES, ""), "Permission denied; choose a port from 1024 on"),
        (OSError(errno.EMFILE, ""), "Too many open files; choose others with --grpc-address"),
    ],
)
def test_each_reason_has_its_remedy(error: OSError, says: str) -> None:
    assert says in remedy(error, "--grpc")
