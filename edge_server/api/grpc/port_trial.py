"""Whether one could listen at an address, tried before the daemon runs, and who does already."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, NamedTuple

import tritonclient.grpc as triton

from edge_server.board.listening import listener, remedy

if TYPE_CHECKING:
    from edge_server.settings import Grpc

_PATIENCE_S = 5.0


class PortTrial(NamedTuple):
    """How it went.

    Attributes:
        trouble: why nobody can listen there now, with the remedy; empty where one could.
        taken: a process listens there, and that is all that is in the way.
    """

    trouble: str = ""
    taken: bool = False


def try_port(host: str, port: int, flags: str) -> PortTrial:
    """Listen there for a moment.

    Args:
        flags: what the flags for address and port begin with: `--grpc`.
    """
    try:
        listener(host, port).close()
    except OSError as error:
        return PortTrial(remedy(error, flags), error.errno == errno.EADDRINUSE)
    return PortTrial()


def who_answers(settings: Grpc) -> str:
    """Name and version of the server that answers there in plain text; empty where none tells."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    client = triton.InferenceServerClient(f"{host}:{settings.port}")
    try:
        metadata = client.get_server_metadata(client_timeout=_PATIENCE_S)
    except triton.InferenceServerException:
        return ""
    finally:
        client.close()
    return f"{metadata.name} {metadata.version}"
