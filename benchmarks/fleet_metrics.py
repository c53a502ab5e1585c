"""The metrics of a fleet in a real Prometheus: memory, and how long rules and dashboard take.

    python benchmarks/fleet_metrics.py [--vehicles 300] [--minutes 3]

Real are Debian's Prometheus, examples/fleet's configuration, rules and `targets` (from the states
that a real mosquitto retains), the alerts, and the queries of the dashboard. The vehicles are
simulated: one server answers for all, with what one real daemon with a camera said in `SCRAPES`
scrapes, one after another, so that counters go on and begin again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paho.mqtt.client as paho
from record import add_option, record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.broker_cluster import cpu_s
from support.free_ports import free_ports
from support.mosquitto import Mosquitto
from support.processes import resident_bytes
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
SCRAPES = 12
WAIT_S = 60.0
ROUNDS = 5


def recorded_metrics(folder: Path) -> list[bytes]:
    """Return what a daemon with a camera says of itself, a second apart."""
    grpc, metrics, http = free_ports(3)
    command = [sys.executable, "-m", "edge_server", "run"]
    command += [f"--model-repository={ROOT / 'models'}", f"--grpc-port={grpc}"]
    command += [f"--metrics-port={metrics}", f"--http-port={http}"]
    command += ["--camera=front=synthetic://road?seed=7&fps=5"]
    daemon = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "XDG_STATE_HOME": str(folder / "state")},
    )
    try:

        def scrape() -> bytes:
            with (
                suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics") as answer,
            ):
                said: bytes = answer.read()
                return said
            return b""

        wait_until(lambda: b"edge_end_to_end_latency_seconds_count{" in scrape(), WAIT_S)
        found = []
        for _ in range(SCRAPES):
            found.append(scrape())
            time.sleep(1)
    finally:
        daemon.terminate()
        daemon.wait()
    return found


@contextmanager
def vehicles_at(port: int, pages: list[bytes]) -> Iterator[None]:
    """Serve /NAME/metrics of every name, each time the next page."""
    asked: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked[self.path] += 1
            page = pages[asked[self.path] % len(pages)]
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Prometheus:
    """Of examples/fleet."""

    def __init__(self, folder: Path) -> None:
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}/api/v1"
        for example in ("fleet", "observability"):
            shutil.copytree(ROOT / "examples" / example, folder / example, dirs_exist_ok=True)
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'fleet/prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=subprocess.DEVNULL,
        )

    def get(self, path: str, **query: object) -> Any:
        url = f"{self._url}/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:  # noqa: S310 - loopback
            return json.load(answer)["data"]

    def number(self, query: str) -> float:
        with suppress(OSError):
            if found := self.get("query", query=query)["result"]:
                return float(found[0]["value"][1])
        return 0.0

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def times_ms(prometheus: Prometheus, queries: list[str], minutes: float) -> list[float]:
    """Return the median time of each as a panel asks: over that range, at 60 places or more."""
    found = []
    for query in queries:
        each = []
        for _ in range(ROUNDS):
            end = time.time()
            begin = time.monotonic()
            prometheus.get(
                "query_range", query=query, start=end - 60 * minutes, end=end, step=max(1, minutes)
            )
            each.append(1e3 * (time.monotonic() - begin))
        found.append(statistics.median(each))
    return found


def retain_states(broker: Mosquitto, vehicles: int) -> None:
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    client.connect(broker.host, broker.port)
    client.loop_start()
    for number in range(vehicles):
        state = "online" if number % 10 else "offline"
        payload = json.dumps({"state": state, "version": "0"}, separators=(",", ":"))
        sent = client.publish(f"edge/v1/truck-{number}/status", payload, 1, retain=True)
    sent.wait_for_publish(WAIT_S)
    client.disconnect()
    client.loop_stop()


def run(folder: Path, vehicles: int, minutes: float) -> dict[str, float]:
    pages = recorded_metrics(folder)
    broker = Mosquitto(folder)
    broker.start()
    (port,) = free_ports(1)
    try:
        retain_states(broker, vehicles)
        targets = folder / "fleet"
        targets.mkdir()
        subprocess.run(
            [
                *(ROOT / "examples/fleet/targets", targets / "vehicles.json"),
                *(f"127.0.0.1:{port}/DEVICE/metrics", "-h", broker.host, "-p", str(broker.port)),
            ],
            check=True,
            env={**os.environ, "SECONDS_TO_READ": "3"},
        )
    finally:
        broker.kill()
    queries = [
        target["expr"].replace("$instance", ".*")
        for panel in json.loads((ROOT / "examples/observability/dashboard.json").read_text())[
            "panels"
        ]
        for target in panel.get("targets", ())
    ]
    rules = [
        line.split()[-1]
        for line in (ROOT / "examples/fleet/fleet_rules.yml").read_text().splitlines()
        if "- record:" in line
    ]
    with vehicles_at(port, pages):
        prometheus = Prometheus(folder)
        try:
            wait_until(lambda: prometheus.number("sum(up)") == vehicles, WAIT_S, every_s=0.5)
            cpu, begin = cpu_s(prometheus.process.pid), time.monotonic()
            time.sleep(60 * minutes)
            spent = (cpu_s(prometheus.process.pid) - cpu) / (time.monotonic() - begin)
            found = {
                "targets": prometheus.number("count(up)"),
                "targets_online": prometheus.number('fleet:vehicles:count{said="online"}'),
                "series": prometheus.get("status/tsdb")["headStats"]["numSeries"],
                "page_bytes": statistics.mean(map(len, pages)),
                "cpu_percent": 100 * spent,
                "memory_mib": resident_bytes(prometheus.process.pid) / 2**20,
                "rules_ms": 0.0,
            }
            groups = prometheus.get("rules")["groups"]
            bad = [r["name"] for g in groups for r in g["rules"] if r["health"] == "err"]
            assert not bad, bad
            for group in groups:
                found[f"rules_{group['name']}_ms"] = 1e3 * group["evaluationTime"]
            found["rules_ms"] = sum(1e3 * group["evaluationTime"] for group in groups)
            asked = times_ms(prometheus, queries, minutes)
            slowest = queries[asked.index(max(asked))]
            read = times_ms(prometheus, rules, minutes)
            found |= {
                "dashboard_ms_p50": statistics.median(asked),
                "dashboard_ms_max": max(asked),
                "dashboard_ms_sum": sum(asked),
                "recorded_ms_p50": statistics.median(read),
                "recorded_ms_max": max(read),
                "memory_after_queries_mib": resident_bytes(prometheus.process.pid) / 2**20,
            }
            print(f"the slowest of {len(queries)} queries: {slowest}")
        finally:
            prometheus.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--vehicles", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=3, help="of scraping before the queries")
    add_option(parser)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), chosen.vehicles, chosen.minutes)
    for key, value in found.items():
        print(f"{key:30} {value:12.1f}")
    record(chosen.record, found)
    return 0 if found["targets"] == chosen.vehicles else 1


if __name__ == "__main__":
    sys.exit(main())
