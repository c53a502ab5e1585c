"""Every limit of the settings reaches gRPC, on each side what belongs there."""

from __future__ import annotations

import pytest

from edge_server.api.grpc.server import channel_options
from edge_server.settings import Grpc

LIMITS = {
    "max_message_bytes": "grpc.max_receive_message_length",
    "max_connections": "grpc.max_allowed_incoming_connections",
    "max_streams": "grpc.max_concurrent_streams",
    "max_metadata_bytes": "grpc.max_metadata_size",
    "handshake_timeout_ms": "grpc.server_handshake_timeout_ms",
    "idle_timeout_ms": "grpc.max_connection_idle_ms",
    "keepalive_time_ms": "grpc.keepalive_time_ms",
    "keepalive_timeout_ms": "grpc.keepalive_timeout_ms",
    "max_pings_without_data": "grpc.http2.max_pings_without_data",
    "min_ping_interval_without_data_ms": "grpc.http2.min_recv_ping_interval_without_data_ms",
    "max_ping_strikes": "grpc.http2.max_ping_strikes",
}
AGE = {
    "max_connection_age_ms": "grpc.max_connection_age_ms",
    "max_connection_age_grace_ms": "grpc.max_connection_age_grace_ms",
}


@pytest.mark.parametrize("unix", [False, True])
def test_each_limit_is_an_option_of_grpc(unix: bool) -> None:
    settings = Grpc(**{name: 100_000 + n for n, name in enumerate({**LIMITS, **AGE})})
    options = dict(channel_options(settings, unix=unix))
    for name, option in LIMITS.items():
        # The daemon itself has a connection, to the socket where there is one.
        own = name == "max_connections" and not unix
        assert options[option] == getattr(settings, name) + own
    for name, option in AGE.items():
        assert options.get(option) == (None if unix else getattr(settings, name))


def test_half_sent_requests_cannot_close_the_server_to_others() -> None:
    for unix in (False, True):
        options = dict(channel_options(Grpc(), unix=unix))
        assert "grpc.max_concurrent_rpcs" not in options
        assert options["grpc.so_reuseport"] == 0
        assert options["grpc.max_metadata_size"] == options["grpc.absolute_max_metadata_size"]


def test_pings_without_calls_are_as_chosen() -> None:
    options = dict(channel_options(Grpc(keepalive_without_calls=True), unix=False))
    assert options["grpc.keepalive_permit_without_calls"] == 1


def test_what_a_model_made_is_sent_however_long_it_is() -> None:
    options = dict(channel_options(Grpc(max_message_bytes=100_000), unix=False))
    assert options["grpc.max_send_message_length"] == -1
