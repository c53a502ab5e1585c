"""Whether a broker lets us in, tried before the daemon runs."""

from __future__ import annotations

import ssl
import time
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from edge_server.mqtt.connection import Connection
from edge_server.mqtt.wake import Wake

if TYPE_CHECKING:
    from edge_server.mqtt.broker_address import BrokerAddress

# To be let in, once there is a connection.
PATIENCE_S = 5.0
_STEP_S = 0.2


class Trial(NamedTuple):
    """How it went.

    Attributes:
        trouble: for a person; empty where the broker let us in.
        stays: the broker refused us, or is not the one that the settings trust: waiting helps
            nothing.
    """

    trouble: str = ""
    stays: bool = False


def try_broker(address: BrokerAddress, client_id: str, *, patience_s: float = PATIENCE_S) -> Trial:
    """Connect as the publisher does, and leave again; nothing is published.

    Args:
        client_id: not that of a publisher which may be connected: the broker would end that one.
    """
    with closing(Wake()) as wake:
        connection = Connection(address, client_id, None, lambda: None)
        try:
            connection.open()
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or error
            return Trial(str(why), stays=isinstance(error, ssl.SSLCertVerificationError))
        until = time.monotonic() + patience_s
        while not connection.ready and connection.end is None and time.monotonic() < until:
            connection.step(wake, _STEP_S)
        trial = Trial()
        if connection.end is not None:
            trial = Trial(connection.end, stays=connection.refused)
        elif not connection.ready:
            trial = Trial(f"takes connections and does not answer within {patience_s:g} s")
        connection.close()
    return trial
