"""The brokers of examples/fleet, with the paths and names of a test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.certificates import Authority

RECIPES = Path(__file__).parents[2] / "examples/fleet"


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


def bridge_lines(vehicle: str, folder: Path, nodes: list[str], certificates: str) -> list[str]:
    """The lines of vehicle.conf and vehicle_lanes.conf for that vehicle, without its listener, and
    with what they say of NATS; without a folder of `certificates` without TLS."""
    folder.mkdir()
    text = "".join((RECIPES / f"{name}.conf").read_text() for name in ("vehicle", "vehicle_lanes"))
    text = re.sub("(?m)^(address fleet|bridge_protocol_version mqttv50|listener).*\n", "", text)
    of_nats = "address|round_robin|bridge_protocol_version|try_private"
    text = re.sub(f"(?m)^# (?=({of_nats}) )", "", text)
    for old, new in {
        "truck-7": vehicle,  # first: what follows may have it in a path
        "/var/lib/mosquitto/": f"{folder}/",
        "n1.fleet.example:8883 n2.fleet.example:8883 n3.fleet.example:8883": " ".join(nodes),
        "/etc/mosquitto/certs/fleet_ca.pem": f"{certificates}/fleet.pem",
        "/etc/mosquitto/certs/": f"{certificates}/",
    }.items():
        assert old in text, f"vehicle.conf has no {old}"
        text = text.replace(old, new)
    if not certificates:
        text = re.sub("(?m)^bridge_(cafile|certfile|keyfile|insecure) .*\n", "", text)
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
