"""Tests before the daemon runs whether a broker accepts the connection."""

from __future__ import annotations

import ssl
import time
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from edge_server.mqtt.connection import Connection
from edge_server.mqtt.wake import Wake

if TYPE_CHECKING:
    from edge_server.mqtt.broker_address import BrokerAddress

# Time limit for CONNACK, once the connection is open.
PATIENCE_S = 5.0
_STEP_S = 0.2


class Trial(NamedTuple):
    """The result of a connection test.

    Attributes:
        trouble: the reason of a failure; empty if the broker accepted the connection.
        stays: the broker refused the client, or is not the one that the settings trust: a retry
            would fail again.
    """

    trouble: str = ""
    stays: bool = False


def try_broker(address: BrokerAddress, client_id: str, *, patience_s: float = PATIENCE_S) -> Trial:
    """Connect as the publisher does, and disconnect; nothing is published.

    Args:
        client_id: other than a connected publisher's: the broker would disconnect that publisher.
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
