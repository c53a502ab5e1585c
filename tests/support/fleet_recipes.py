"""The brokers of examples/fleet, with the paths and names of a test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.certificates import Authority

RECIPES = Path(__file__).parents[2] / "examples/fleet"
EVENTS_PORT = 8883
LANES_PORT = 8884


def fleet_lines(authority: Authority, folder: Path, acl: Path = RECIPES / "fleet.acl") -> list[str]:
    """The lines of fleet.conf without its listener, which a test has on a port of its own."""
    certificate, key = authority.issue("broker")
    return _lines(
        "fleet.conf",
        folder,
        {
            "/etc/mosquitto/certs/fleet_ca.pem": authority.ca,
            "/etc/mosquitto/certs/broker.crt": certificate,
            "/etc/mosquitto/certs/broker.key": key,
            "/etc/mosquitto/fleet.acl": acl,
        },
    )


def vehicle_lines(authority: Authority, folder: Path, fleet: str) -> list[str]:
    """Likewise of vehicle.conf, whose bridge goes to `fleet`, HOST:PORT."""
    certificate, key = authority.issue("truck-7")
    return _lines(
        "vehicle.conf",
        folder,
        {
            "/etc/mosquitto/certs/fleet_ca.pem": authority.ca,
            "/etc/mosquitto/certs/truck-7.crt": certificate,
            "/etc/mosquitto/certs/truck-7.key": key,
            "fleet.example:8883": fleet,
        },
    )


def bridge_lines(
    vehicle: str, folder: Path, nodes: list[str], certificates: str, restart_s: int
) -> list[str]:
    """The lines of vehicle.conf and vehicle_lanes.conf for that vehicle, without its listener, and
    with what they say of three nodes; without a folder of `certificates` without TLS.

    Args:
        nodes: their addresses, in the order in which this vehicle tries them.
        restart_s: how long it waits before it connects again for events and states.
    """
    folder.mkdir()
    of_all = (RECIPES / "vehicle.conf").read_text()
    of_all = re.sub("(?m)^(listener|bridge_protocol_version) .*\n", "", of_all)
    text = of_all + (RECIPES / "vehicle_lanes.conf").read_text()
    text = re.sub("(?m)^address .*\n", "", text)
    text = re.sub("(?m)^# (?=(address|round_robin|bridge_protocol_version|try_private) )", "", text)
    for old, new in {
        "truck-7": vehicle,  # first: what follows may have it in a path
        "/var/lib/mosquitto/": f"{folder}/",
        **{
            " ".join(f"n{number}.fleet.example:{port}" for number in (1, 2, 3)): " ".join(
                f"{node}:{port}" for node in nodes
            )
            for port in (EVENTS_PORT, LANES_PORT)
        },
        "restart_timeout 1 30": f"restart_timeout {restart_s} 30",
        "/etc/mosquitto/certs/fleet_ca.pem": f"{certificates}/fleet.pem",
        "/etc/mosquitto/certs/": f"{certificates}/",
    }.items():
        assert old in text, f"vehicle.conf has no {old}"
        text = text.replace(old, new)
    return _without_tls(text, certificates)


def lanes_lines(host: str, certificates: Path | None) -> list[str]:
    """The lines of fleet_lanes.conf for the node at `host`; without certificates without TLS."""
    text = (RECIPES / "fleet_lanes.conf").read_text()
    for old, new in {
        f"listener {LANES_PORT}": f"listener {LANES_PORT} {host}",
        "/etc/mosquitto/fleet.acl": str(RECIPES / "fleet.acl"),
        "/etc/mosquitto/certs/fleet_ca.pem": f"{certificates}/fleet.pem",
        "/etc/mosquitto/certs/": f"{certificates}/",
    }.items():
        assert old in text, f"fleet_lanes.conf has no {old}"
        text = text.replace(old, new)
    if certificates is None:
        text = text.replace("allow_anonymous false", "allow_anonymous true")
        text = re.sub("(?m)^acl_file .*\n", "", text)
    return _without_tls(text, str(certificates or ""))


def _without_tls(text: str, certificates: str) -> list[str]:
    """The lines that count; none of TLS where there are no certificates."""
    if not certificates:
        of_tls = "(bridge_)?(cafile|certfile|keyfile|insecure)|tls_version|require_certificate"
        text = re.sub(f"(?m)^({of_tls}|use_identity_as_username) .*\n", "", text)
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def _lines(name: str, folder: Path, values: dict[str, object]) -> list[str]:
    folder.mkdir()
    text = (RECIPES / name).read_text()
    for old, new in {"/var/lib/mosquitto/": f"{folder}/", **values}.items():
        assert old in text, f"{name} has no {old}"
        text = text.replace(old, str(new))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines[0].startswith("listener ")
    return lines[1:]
