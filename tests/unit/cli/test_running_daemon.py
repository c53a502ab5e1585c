"""Verbs find the daemon by its settings, or by addresses that the flags give."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.api.grpc.client import target_of
from edge_server.cli.main import command_line
from edge_server.cli.run import settings_of
from edge_server.errors import SettingsError
from edge_server.settings import Grpc, Settings, Tls

if TYPE_CHECKING:
    from pathlib import Path

ENCRYPTED = Tls(enabled=True, certificate="c", key="k")


def settings(tmp_path: Path, *flags: str) -> Settings:
    config = tmp_path / "config.toml"
    config.write_text(
        '[grpc]\nport = 7001\nsocket = "/run/s"\ncontrol = "unix"\n[metrics]\nenabled = false\n'
    )
    return settings_of(command_line().parse_args(["status", "--config", str(config), *flags]))


@pytest.mark.parametrize(
    ("grpc", "target"),
    [
        (Grpc(), "127.0.0.1:8001"),
        (Grpc(host="::1"), "[::1]:8001"),
        (Grpc(host="0.0.0.0", insecure=True, control="off"), "127.0.0.1:8001"),  # noqa: S104 - unbound
        (Grpc(socket="/run/a b.sock"), "unix:/run/a%20b.sock"),
        (Grpc(socket="/run/s", tls=ENCRYPTED), "unix:/run/s"),
    ],
)
def test_the_socket_is_called_before_tcp(grpc: Grpc, target: str) -> None:
    assert target_of(grpc) == target


@pytest.mark.parametrize(
    ("grpc", "text"),
    [(Grpc(tls=ENCRYPTED), "set a socket in"), (Grpc(enabled=False), "enabled = true")],
)
def test_a_side_that_cannot_be_called_is_an_error_with_the_remedy(grpc: Grpc, text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        target_of(grpc)


def test_addresses_of_the_flags_take_the_place_of_the_settings(tmp_path: Path) -> None:
    assert target_of(settings(tmp_path).grpc) == "unix:/run/s"
    assert target_of(settings(tmp_path, "--grpc", "10.0.0.5:9").grpc) == "10.0.0.5:9"
    assert target_of(settings(tmp_path, "--grpc", "/tmp/t.sock").grpc) == "unix:/tmp/t.sock"  # noqa: S108 - unused
    metrics = settings(tmp_path, "--metrics", "[::1]:9002").metrics
    assert (metrics.enabled, metrics.host, metrics.port) == (True, "::1", 9002)


@pytest.mark.parametrize("flag", ["--grpc", "--metrics"])
def test_an_address_that_is_none_is_named(tmp_path: Path, flag: str) -> None:
    with pytest.raises(SettingsError, match=rf"{flag} :80: give it as HOST, HOST:PORT"):
        settings(tmp_path, flag, ":80")
