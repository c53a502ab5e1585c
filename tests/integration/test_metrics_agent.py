"""A Prometheus on the vehicle, as examples/fleet has it, sends what the fleet's one missed."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import threading
import urllib.parse
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest
from support.fleet_recipes import RECIPES
from support.free_ports import free_ports
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.certificates import Authority

WAIT_S = 60.0
BLOCK_S = 10


class Page(ThreadingHTTPServer):
    """What a daemon says: `edge_scrapes` counts its scrapes."""

    daemon_threads = True

    def __init__(self) -> None:
        self.scrapes = 0
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page.scrapes += 1
                self.send_response(200)
                self.end_headers()
                self.wfile.write(f"edge_scrapes {page.scrapes}\n".encode())

            def log_message(self, *_: object) -> None:
                """Nothing."""

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Link:
    """What leads from a vehicle to `port`, and can be cut."""

    def __init__(self, port: int) -> None:
        self.is_up = True
        self._ends: list[socket.socket] = []
        self._goal = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if not self.is_up:
                    near.close()
                    continue
                far = socket.create_connection(self._goal)
                self._ends += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, destination: socket.socket) -> None:
        with suppress(OSError), source, destination:
            while data := source.recv(65536):
                destination.sendall(data)

    def cut(self) -> None:
        self.is_up = False
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


class Fleet:
    """The fleet's Prometheus, with TLS."""

    def __init__(self, authority: Authority, folder: Path) -> None:
        (self.port,) = free_ports(1)
        certificate, key = authority.issue("broker")
        folder.mkdir()
        web = (RECIPES / "fleet_web.yml").read_text()
        web = web.replace("/etc/prometheus/broker.crt", str(certificate))
        web = web.replace("/etc/prometheus/broker.key", str(key))
        web = web.replace("/etc/prometheus/fleet_ca.pem", str(authority.ca))
        (folder / "web.yml").write_text(web)
        text = (RECIPES / "prometheus.yml").read_text()
        begin, end = text.index("rule_files:"), text.index("scrape_configs:")
        (folder / "prometheus.yml").write_text(text[:begin] + text[end:])
        self._command = [
            *("prometheus", f"--config.file={folder}/prometheus.yml"),
            *(f"--storage.tsdb.path={folder}/tsdb", f"--web.config.file={folder}/web.yml"),
            # What is older than half of this, it takes within out_of_order_time_window alone.
            f"--storage.tsdb.min-block-duration={BLOCK_S}s",
            *("--web.enable-remote-write-receiver", f"--web.listen-address=127.0.0.1:{self.port}"),
        ]
        self._tls = ssl.create_default_context(cafile=str(authority.ca))
        self._tls.load_cert_chain(*authority.issue("fleet-dashboard"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it listens."""
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)

        def listens() -> bool:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port)).close()
                return True
            return False

        wait_until(listens, WAIT_S)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def values(self, vehicle: str) -> list[int]:
        """Return what it has of that vehicle, in the order of time."""
        query = urllib.parse.urlencode({"query": f'edge_scrapes{{vehicle="{vehicle}"}}[5m]'})
        url = f"https://127.0.0.1:{self.port}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=WAIT_S, context=self._tls) as answer:
            found = json.load(answer)["data"]["result"]
        return [int(value) for series in found for _, value in series["values"]]


class Agent:
    """The Prometheus of a vehicle that scrapes `page` each second."""

    def __init__(
        self, vehicle: str, page: Page, port: int, authority: Authority, folder: Path
    ) -> None:
        folder.mkdir()
        certificate, key = authority.issue(vehicle)
        text = (RECIPES / "vehicle_prometheus.yml").read_text()
        for old, new in {
            "/etc/prometheus/truck-7.crt": str(certificate),
            "/etc/prometheus/truck-7.key": str(key),
            "/etc/prometheus/fleet_ca.pem": str(authority.ca),
            "truck-7": vehicle,
            "scrape_interval: 15s": "scrape_interval: 1s",
            "127.0.0.1:8002": f"127.0.0.1:{page.server_address[1]}",
            "fleet.example:9090": f"127.0.0.1:{port}",
        }.items():
            assert old in text, f"vehicle_prometheus.yml has no {old}"
            text = text.replace(old, new)
        (folder / "prometheus.yml").write_text(text)
        (port,) = free_ports(1)
        self._process = subprocess.Popen(
            [
                *("prometheus", "--enable-feature=agent"),
                f"--config.file={folder}/prometheus.yml",
                *(f"--storage.agent.path={folder}/agent", "--storage.agent.retention.max-time=24h"),
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=subprocess.DEVNULL,
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def fleet(authority: Authority, tmp_path: Path) -> Iterator[Fleet]:
    if not shutil.which("prometheus"):
        pytest.skip("no prometheus on this machine: apt install prometheus")
    each = Fleet(authority, tmp_path / "fleet")
    each.start()
    yield each
    each.kill()


@pytest.mark.long
def test_the_fleet_gets_each_sample_of_an_outage(
    fleet: Fleet, authority: Authority, tmp_path: Path
) -> None:
    pages = {"truck-7": Page(), "truck-8": Page()}
    link = Link(fleet.port)
    agents = [
        Agent("truck-7", pages["truck-7"], link.port, authority, tmp_path / "truck-7"),
        Agent("truck-8", pages["truck-8"], fleet.port, authority, tmp_path / "truck-8"),
    ]

    def newest(vehicle: str) -> int:
        return max(fleet.values(vehicle), default=0)

    try:
        wait_until(lambda: min(map(newest, pages)) >= 3, WAIT_S, every_s=0.5)
        link.cut()
        begin = pages["truck-7"].scrapes
        wait_until(lambda: pages["truck-7"].scrapes >= begin + 2 * BLOCK_S, WAIT_S, every_s=0.5)
        end = pages["truck-7"].scrapes
        # Others went on: what comes now is older than what it has.
        wait_until(lambda: newest("truck-8") >= end, WAIT_S, every_s=0.5)
        assert newest("truck-7") <= begin
        link.is_up = True
        wait_until(lambda: newest("truck-7") > end, WAIT_S, every_s=0.5)
        values = fleet.values("truck-7")
        assert values == [*range(values[0], values[-1] + 1)]
    finally:
        for agent in agents:
            agent.close()
        link.close()
        for page in pages.values():
            page.close()


def test_a_vehicle_without_a_certificate_of_the_fleet_sends_nothing(fleet: Fleet) -> None:
    unknown = ssl.create_default_context()
    unknown.check_hostname = False
    unknown.verify_mode = ssl.CERT_NONE
    url = f"https://127.0.0.1:{fleet.port}/api/v1/write"

    def answer() -> str:
        try:
            urllib.request.urlopen(url, b"", timeout=WAIT_S, context=unknown)
        except OSError as error:
            return str(error)
        return "accepted"

    # Where the connection is closed amid the request, that says no reason.
    wait_until(lambda: "certificate" in answer(), otherwise=answer)
