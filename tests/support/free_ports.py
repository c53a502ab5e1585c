"""Free ports of loopback."""

from __future__ import annotations

import itertools
import os
import socket

# Below the ports that the kernel gives to clients, and from another place for each test process: a
# port that is free now is still free when the daemon that is to listen there does so.
_FIRST_PORT = 10_000 + os.getpid() * 211 % 20_000
_PORTS = itertools.cycle((*range(_FIRST_PORT, 32_000), *range(10_000, _FIRST_PORT)))


def free_ports(count: int) -> list[int]:
    """Return ports on which nobody listens, TCP and UDP, each once in this process."""
    return list(itertools.islice(filter(_is_free, _PORTS), count))


def _is_free(port: int) -> bool:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(type=kind) as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True
