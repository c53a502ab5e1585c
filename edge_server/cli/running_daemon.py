"""The daemon that runs on this machine: its settings, and how verbs reach it.

Nothing heavy is imported here: every start of the command line imports this module.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_server.cli.flags.values import address
from edge_server.errors import SettingsError, Unavailable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from edge_server.api.grpc.client import DaemonClient
    from edge_server.settings import Settings

INSTALLED = Path("/etc/edge_server/config.toml")
REMEDY = (
    "is the daemon running? `systemctl status edge-server` says why it is not; --config FILE names "
    "the settings of another one, --grpc and --metrics its addresses"
)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings of the running daemon, with the addresses of the flags.

    Raises:
        SettingsError: the file or an address is wrong.
    """
    from msgspec.structs import replace

    from edge_server.settings import Grpc, Metrics, read_settings

    config = arguments.config or (INSTALLED if INSTALLED.is_file() else None)
    settings = read_settings(config, {})
    # Neither certificate nor header of the settings belongs to another address.
    if given := getattr(arguments, "grpc", None):
        if "/" in given:
            settings = replace(settings, grpc=Grpc(socket=given))
        else:
            grpc = Grpc(**_tcp("--grpc", given), insecure=True, control="off")
            settings = replace(settings, grpc=grpc)
    if given := getattr(arguments, "metrics", None):
        settings = replace(settings, metrics=Metrics(**_tcp("--metrics", given), insecure=True))
    return settings


def _tcp(flag: str, given: str) -> dict[str, Any]:
    try:
        return address(given)
    except ValueError as error:
        raise SettingsError(f"{flag} {given}: {error}") from None


@contextmanager
def connected(settings: Settings) -> Iterator[DaemonClient]:
    """Yield a client of the daemon, which has responded to a first call.

    Raises:
        Unavailable: it does not respond; the text has the remedy.
        SettingsError: no side of it can be called.
    """
    from edge_server.api.grpc.client import DaemonClient
    from edge_server.errors import DeadlineExceeded

    with DaemonClient(settings.grpc) as client:
        try:
            client.server()
        except (Unavailable, DeadlineExceeded) as error:
            raise Unavailable(f"gRPC at {client.target}: {error}; {REMEDY}") from error
        yield client
