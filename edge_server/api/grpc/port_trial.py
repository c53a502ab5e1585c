"""Tests before the daemon runs whether an address can be bound, and which server holds it."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, NamedTuple

import tritonclient.grpc as triton

from edge_server.board.listening import listener, remedy

if TYPE_CHECKING:
    from edge_server.settings import Grpc

_PATIENCE_S = 5.0


class PortTrial(NamedTuple):
    """The result of a bind test.

    Attributes:
        trouble: why the address cannot be bound now, with the remedy; empty if it can be.
        taken: a process listens there, and the address is otherwise usable.
    """

    trouble: str = ""
    taken: bool = False


def try_port(host: str, port: int, flags: str) -> PortTrial:
    """Bind and release the address.

    Args:
        flags: prefix of the flags for address and port: `--grpc`.
    """
    try:
        listener(host, port).close()
    except OSError as error:
        return PortTrial(remedy(error, flags), error.errno == errno.EADDRINUSE)
    return PortTrial()


def who_answers(settings: Grpc) -> str:
    """Return name and version of the server that answers there in plain text; empty without one."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    client = triton.InferenceServerClient(f"{host}:{settings.port}")
    try:
        metadata = client.get_server_metadata(client_timeout=_PATIENCE_S)
    except triton.InferenceServerException:
        return ""
    finally:
        client.close()
    return f"{metadata.name} {metadata.version}"
