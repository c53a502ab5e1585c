"""What ends a connection to the broker from our side."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from edge_server.mqtt import connection as connection_module
from edge_server.mqtt.connection import ACKNOWLEDGE_S, Connection, _Sent
from edge_server.settings import Mqtt

if TYPE_CHECKING:
    import pytest


def test_a_standstill_of_the_process_is_no_missing_acknowledgement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(connection_module, "time", SimpleNamespace(monotonic=lambda: now))
    connection = Connection(Mqtt("127.0.0.1"), "client")
    connection._check_acknowledgements(now)
    connection._unacknowledged[1] = _Sent("status", now)
    now += 60.0
    connection._check_acknowledgements(now)
    assert connection.end is None
    for _ in range(int(ACKNOWLEDGE_S)):
        now += 1.0
        connection._check_acknowledgements(now)
    assert connection.end == "status not acknowledged for 3 s"
