"""Three nodes with the configuration of examples/fleet, each on an address of its own: NATS for
what has to arrive, and a mosquitto for lanes.

The addresses are of the loopback of a network namespace, which `isolated` makes: a node whose
address is taken away lives on and reaches nobody, as in a network that is partitioned.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.fleet_recipes import EVENTS_PORT, LANES_PORT, RECIPES, lanes_lines
from support.mosquitto import mosquitto_binary
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable

    from support.certificates import Authority

NODES = ("n1", "n2", "n3")
WAIT_S = 90.0
SETTLING_S = 15.0
STOP_S = 10.0
_INSIDE = "EDGE_OWN_NETWORK"
_STORE_MIB = 96


def isolated() -> None:
    """Run this program again, with a network, processes and mounts of its own that end with it."""
    if _INSIDE not in os.environ:
        own = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        # As docs/fleet.md has it for vehicles.
        begin = "ip link set lo up && echo 1 >/proc/sys/net/ipv4/tcp_retries2"
        inside = [*own, "sh", "-c", f'{begin} && exec "$@"', "-", sys.executable]
        environment = {**os.environ, _INSIDE: "1"}
        os.execvpe("unshare", [*inside, *sys.argv], environment)  # noqa: S606


def users(names: Iterable[str]) -> str:
    """Return nats_users.conf: what fleet.acl says, in NATS's words."""
    lines = [
        f'  {{user: "CN={name}", permissions: {{publish: "edge.v1.{name}.>", '
        f'subscribe: ["edge.v1.{name}", "edge.v1.{name}.>", "$MQTT.sub.>"]}}}}'
        for name in names
    ]
    lines.append(
        '  {user: "CN=fleet-dashboard", permissions: {publish: {deny: ">"}, '
        'subscribe: ["edge.v1", "edge.v1.>", "$MQTT.sub.>"]}}'
    )
    return "authorization {\n users = [\n" + "\n".join(lines) + "\n ]\n}\n"


class Node:
    """One node; it keeps what it has while it is stopped.

    Args:
        number: from 1 on; its address is 10.77.0.`number`.
        certificate: of all nodes, and its key; None has no TLS and lets everyone in.
    """

    def __init__(
        self, folder: Path, number: int, authority: Authority, vehicles: Iterable[str], *, tls: bool
    ) -> None:
        self.name, self.host = f"n{number}", f"10.77.0.{number}"
        self._address(add=True)
        self._folder = folder / self.name
        self.store = self._folder / "store"
        self.store.mkdir(parents=True)
        size = f"size={_STORE_MIB}m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", self.store], check=True)
        (self._folder / "nats_users.conf").write_text(users(vehicles) if tls else "")
        text = (RECIPES / "nats.conf").read_text()
        # A node calls itself, in vain, and those after it: a route ends at the later one's address.
        routes = [f'"nats://10.77.0.{later}:6222"' for later in range(number, len(NODES) + 1)]
        begin, end = text.index("routes: ["), text.index("]", text.index("routes: ["))
        text = f"{text[:begin]}routes: [{', '.join(routes)}{text[end:]}"
        for old, new in {
            "server_name: n1": f"server_name: {self.name}",
            "n1.fleet.example": self.host,
            "127.0.0.1:": f"{self.host}:",
            "/var/lib/nats": str(self.store),
            "max_file_store: 10GB": f"max_file_store: {_STORE_MIB}MB",
            "/etc/nats/certs/fleet_ca.pem": str(authority.ca),
            "/etc/nats/certs/broker.crt": str(authority.ca.parent / "broker.crt"),
            "/etc/nats/certs/broker.key": str(authority.ca.parent / "broker.key"),
        }.items():
            assert old in text, f"nats.conf has no {old}"
            text = text.replace(old, new)
        if not tls:
            before, after = text.split("max_ack_pending: 1\n")
            text = f"{before}max_ack_pending: 1\n}}\n{after[after.index('# kill') :]}"
        self._config = self._folder / "nats.conf"
        self._config.write_text(text)
        lanes = lanes_lines(self.host, authority.ca.parent if tls else None)
        self._lanes_config = self._folder / "lanes.conf"
        self._lanes_config.write_text("\n".join(["user root", *lanes, ""]))
        self.log = self._folder / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self._lanes: subprocess.Popen[bytes] | None = None
        self._cpu_s = 0.0

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                ["nats-server", "-c", str(self._config)], stdout=log, stderr=log
            )
            self._lanes = subprocess.Popen(
                [mosquitto_binary(), "-c", str(self._lanes_config)], stdout=log, stderr=log
            )

    def end(self, number: int = signal.SIGTERM, within_s: float = STOP_S) -> None:
        """Send that signal and wait for the end; a node that hangs is killed, as systemd does."""
        if self.process is not None and self._lanes is not None:
            self._cpu_s = self.cpu_s()
            self._lanes.send_signal(signal.SIGKILL if number == signal.SIGKILL else signal.SIGTERM)
            self.process.send_signal(number)
            self._lanes.wait()
            self._lanes = None
            try:
                self.process.wait(within_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def partition(self) -> None:
        self._address(add=False)

    def heal(self) -> None:
        self._address(add=True)

    def fill(self) -> None:
        """Leave no room on its disk."""
        with suppress(OSError), (self.store / "filler").open("wb") as file:
            while True:
                file.write(bytes(1 << 20))

    def has_room(self) -> None:
        (self.store / "filler").unlink()

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.host}:8222/{path}", timeout=5) as answer:
            return json.load(answer)

    def is_ready(self, *, assets: bool = True) -> bool:
        """Whether it is one of the cluster, and what it stores (`assets`) has caught up."""
        with suppress(OSError, ValueError):
            path = "healthz" if assets else "healthz?js-server-only=true"
            healthy: bool = self.ask(path).get("status") == "ok"
            return healthy and len(self.ask("routez")["routes"]) >= len(NODES) - 1
        return False

    def listens(self) -> bool:
        with suppress(OSError):
            for port in (EVENTS_PORT, LANES_PORT):
                socket.create_connection((self.host, port), 1).close()
            return True
        return False

    def cpu_s(self) -> float:
        """Processor time of all its lives, as of this moment or its end."""
        if self.process is None or self._lanes is None:
            return self._cpu_s
        return self._cpu_s + cpu_s(self.process.pid) + cpu_s(self._lanes.pid)

    def _address(self, *, add: bool) -> None:
        verb = "add" if add else "del"
        subprocess.run(["ip", "addr", verb, f"{self.host}/32", "dev", "lo"], check=True)


class Cluster:
    """All nodes."""

    def __init__(
        self, folder: Path, authority: Authority, vehicles: Iterable[str], *, tls: bool = True
    ) -> None:
        addresses = [f"10.77.0.{number}" for number in range(1, len(NODES) + 1)]
        authority.issue("broker", addresses=addresses)
        vehicles = list(vehicles)
        self.nodes = [
            Node(folder, number, authority, vehicles, tls=tls)
            for number in range(1, len(NODES) + 1)
        ]

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        self.wait()

    def wait(self) -> None:
        """Until every node is ready; what NATS 2.9 calls behind while nothing is written to it gets
        `SETTLING_S` to catch up."""
        began = time.monotonic()

        def is_ready() -> bool:
            assets = time.monotonic() - began < SETTLING_S
            return all(node.is_ready(assets=assets) and node.listens() for node in self.nodes)

        wait_until(
            is_ready,
            WAIT_S,
            otherwise=lambda: "\n".join(n.log.read_text()[-1500:] for n in self.nodes),
            every_s=0.2,
        )

    def cpu_s(self) -> float:
        return sum(node.cpu_s() for node in self.nodes)

    def end(self) -> None:
        for node in self.nodes:
            node.end(signal.SIGKILL)
            subprocess.run(["umount", node.store], check=True)


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
