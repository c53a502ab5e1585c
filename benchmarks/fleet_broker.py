"""A fleet's broker of three nodes: what hundreds of vehicles cost it, and what it loses.

    python benchmarks/fleet_broker.py [--vehicles 60] [--lanes 10] [--payload json] [--no-tls]
    python benchmarks/fleet_broker.py --faults

Real are the three nodes (Debian's NATS and mosquitto, with examples/fleet's nats.conf and
fleet_lanes.conf), TLS with an account for each vehicle, each vehicle's mosquitto with its bridges,
and of the daemon publisher, outbox and event log on a disk. Not real is what comes before: the
lanes are those that the shipped network finds on a drawn road, played again. The vehicles share
four processes, and one machine.

With --faults the nodes are killed, cut off, filled and restarted one after another. The exit code
is 1 where an event was lost or out of order, or a vehicle has no lanes at the end.
Needs root, for a network of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import paho.mqtt.client as paho
from record import add_option, record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.broker_cluster import Cluster, isolated
from support.certificates import Authority
from support.fleet_recipes import EVENTS_PORT, LANES_PORT
from support.fleet_vehicles import Order, Report
from support.waiting import wait_until

from edge_server.proto.edge.lanes.v1 import events_pb2
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor
from edge_server.tools.plan import load_models
from edge_server.tools.road.renderer import render
from edge_server.tools.road.scene import RoadScene

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.broker_cluster import Node

ROOT = Path(__file__).parents[1]
PROCESSES = 4
RECORDED = 12
WAIT_S = 120.0
LAME_DUCK_S = 60.0
LATE_S = 3.0
SESSION = "fleet-archive"


def recorded_lanes(path: Path) -> None:
    """Write what the shipped network finds on frames of a drawn road."""
    with ExitStack() as stack:
        data_plane = load_models(ROOT / "models", stack)
        scene = RoadScene.for_camera(seed=7)
        found = [
            data_plane.infer(
                InferRequest(
                    "lane_detection", {"image": Tensor.of(render(scene, 0.2 * frame)[0][None])}
                )
            ).outputs
            for frame in range(RECORDED)
        ]
    arrays = {
        f"{name}_{frame}": outputs[f"lane_{name}"].array[0]
        for frame, outputs in enumerate(found)
        for name in ("points", "scores")
    }
    np.savez(path, **arrays)


class Subscription:
    """A client with that id that stays subscribed, and goes on to the next address where one is
    lost.

    Args:
        topic: and its QoS; a session is kept for 1.
        take: called with each message.

    Attributes:
        absences: from when to when it was not subscribed, in monotonic seconds.
    """

    def __init__(
        self,
        client_id: str,
        addresses: list[tuple[str, int]],
        topic: tuple[str, int],
        certificates: Path | None,
        take: Callable[[paho.MQTTMessage], None],
    ) -> None:
        self.absences: list[tuple[float, float]] = []
        self.ready = threading.Event()
        self._id, self._addresses = client_id, itertools.cycle(addresses)
        self._topic = topic
        self._certificates, self._take = certificates, take
        self._over = False
        self._client: paho.Client | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        lost = time.monotonic()
        while not self._over:
            client = paho.Client(
                paho.CallbackAPIVersion.VERSION2,
                self._id,
                protocol=paho.MQTTv311,
                clean_session=not self._topic[1],
                reconnect_on_failure=False,
            )
            if self._certificates:
                client.tls_set(
                    self._certificates / "fleet.pem",
                    self._certificates / "fleet-dashboard.crt",
                    self._certificates / "fleet-dashboard.key",
                    tls_version=ssl.PROTOCOL_TLS_CLIENT,
                )
            client.connect_timeout = 2.0

            def subscribed(*_: object, lost: float = lost) -> None:
                self.absences.append((lost, time.monotonic()))
                self.ready.set()

            client.on_connect = lambda client, *_: client.subscribe([self._topic])
            client.on_subscribe = subscribed
            client.on_message = lambda _client, _data, message: self._take(message)
            self._client = client
            try:
                client.connect(*next(self._addresses), keepalive=2)
                client.loop_forever(retry_first_connection=False)
                lost = time.monotonic()
            except OSError:
                time.sleep(0.2)

    def close(self) -> None:
        self._over = True
        if self._client is not None:
            self._client.disconnect()
        self._thread.join()


class Reader:
    """A program of the fleet that may miss no event, with a session that the nodes keep, and reads
    lanes at all nodes.

    Attributes:
        events: of each vehicle, the ids in the order of their first arrival.
        repeated: events that came again.
        arrivals: of each vehicle, when lanes came, in monotonic seconds.
        payload_bytes: of all messages.
    """

    def __init__(self, nodes: list[Node], certificates: Path | None) -> None:
        self.events: defaultdict[str, list[int]] = defaultdict(list)
        self.repeated = 0
        self.arrivals: defaultdict[str, list[float]] = defaultdict(list)
        self.payload_bytes: defaultdict[str, int] = defaultdict(int)
        self.ages_s: list[float] = []
        self._seen: defaultdict[str, set[int]] = defaultdict(set)
        events, lanes = ("edge/v1/+/cameras/+/events/#", 1), ("edge/v1/+/cameras/+/lanes", 0)
        addresses = [(node.host, EVENTS_PORT) for node in nodes]
        self._session = Subscription(SESSION, addresses, events, certificates, self._take_event)
        self._lanes = [
            Subscription(
                f"{SESSION}-lanes",
                [(node.host, LANES_PORT)],
                lanes,
                certificates,
                self._take_lanes,
            )
            for node in nodes
        ]

    @property
    def absences(self) -> list[tuple[float, float]]:
        """When its session had no node."""
        return self._session.absences

    def is_ready(self, within_s: float) -> bool:
        return all(each.ready.wait(within_s) for each in (self._session, *self._lanes))

    def _take_lanes(self, message: paho.MQTTMessage) -> None:
        now = time.monotonic()
        self.payload_bytes["lanes"] += len(message.payload)
        self.arrivals[message.topic.split("/")[2]].append(now)
        if captured := re.search(rb'"capture_mono_ns":"?(\d+)', message.payload):
            self.ages_s.append(now - int(captured[1]) / 1e9)

    def _take_event(self, message: paho.MQTTMessage) -> None:
        vehicle = message.topic.split("/")[2]
        self.payload_bytes["events"] += len(message.payload)
        number = event_id(message.payload)
        if number in self._seen[vehicle]:
            self.repeated += 1
        else:
            self._seen[vehicle].add(number)
            self.events[vehicle].append(number)

    def close(self) -> None:
        for each in (self._session, *self._lanes):
            each.close()


def event_id(payload: bytes) -> int:
    if payload.startswith(b"{"):
        return int(json.loads(payload)["id"])
    event = events_pb2.Event.FromString(payload)
    return int(event.id)


def check_accounts(node: Node, certificates: Path) -> None:
    """A vehicle neither writes nor reads another one's topics; `fleet-dashboard` reads all."""
    heard: list[tuple[str, bytes]] = []
    answers: list[bool] = []

    def client(name: str, topic: str) -> paho.Client:
        made = paho.Client(paho.CallbackAPIVersion.VERSION2, f"{name}-try", protocol=paho.MQTTv311)
        made.tls_set(
            certificates / "fleet.pem", certificates / f"{name}.crt", certificates / f"{name}.key"
        )
        made.on_message = lambda _c, _d, m: heard.append((name, m.payload))
        made.on_subscribe = lambda _c, _d, _m, codes, _p: answers.append(codes[0].is_failure)
        made.connect(node.host, EVENTS_PORT)
        made.loop_start()
        before = len(answers)
        made.subscribe(topic, 0)
        wait_until(lambda: len(answers) > before)
        return made

    clients = [
        client("fleet-dashboard", "edge/v1/+/try"),
        client("truck-0", "edge/v1/truck-0/#"),
        client("truck-1", "edge/v1/truck-0/#"),
    ]
    assert answers == [False, False, True], answers
    clients[2].publish("edge/v1/truck-0/try", b"forged", 1)
    clients[0].publish("edge/v1/truck-0/try", b"forged", 1)
    clients[1].publish("edge/v1/truck-0/try", b"real", 1)
    wait_until(lambda: {("fleet-dashboard", b"real"), ("truck-0", b"real")} <= {*heard})
    assert b"forged" not in {payload for _, payload in heard}, heard
    for each in clients:
        each.disconnect()
        each.loop_stop()
    print("a vehicle has its own topics alone", flush=True)


def check_status(fleet: Fleet, certificates: Path) -> None:
    """`fleet status` reads the retained states from every node."""
    for node in fleet.cluster.nodes:
        config = certificates / "dashboard.toml"
        config.write_text(
            f'[mqtt]\nhost = "{node.host}"\nport = {EVENTS_PORT}\n'
            f'ca_file = "{certificates}/fleet.pem"\n'
            f'cert_file = "{certificates}/fleet-dashboard.crt"\n'
            f'key_file = "{certificates}/fleet-dashboard.key"\n'
        )
        command = [sys.executable, "-m", "edge_server", "fleet", "status", f"--config={config}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
        missing = [name for name in fleet.vehicles if name not in done.stdout]
        assert not missing, f"{node.name}: {len(missing)} missing: {done.stdout}{done.stderr}"
    print("fleet status has all vehicles, from every node", flush=True)


class Fleet:
    """Nodes, vehicles and the reader."""

    def __init__(self, folder: Path, vehicles: int, payload: str, *, tls: bool) -> None:
        certificates = folder / "certificates"
        certificates.mkdir()
        authority = Authority(certificates, "fleet")
        names = [f"truck-{number}" for number in range(vehicles)]
        if tls:
            for name in (*names, "fleet-dashboard"):
                authority.issue(name)
        self.cluster = Cluster(folder, authority, names, tls=tls)
        self.cluster.start()
        self.reader = Reader(self.cluster.nodes, certificates if tls else None)
        assert self.reader.is_ready(WAIT_S), self.cluster.nodes[0].log.read_text()[-2000:]
        recorded_lanes(folder / "lanes.npz")
        self.vehicles = names
        self._processes = []
        for process in range(PROCESSES):
            order = Order(
                str(folder),
                [*range(vehicles)][process::PROCESSES],
                [node.host for node in self.cluster.nodes],
                str(certificates) if tls else "",
                str(folder / "lanes.npz"),
                payload,
            )
            path = folder / f"order-{process}.json"
            path.write_bytes(msgspec.json.encode(order))
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "support.fleet_vehicles", str(path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
                )
            )

    def drive(self, lanes_hz: float, burst: int = 0, every_s: float = 1.0) -> None:
        for process in self._processes:
            self._tell(process, f"drive {lanes_hz} {burst} {every_s}")

    def reports(self) -> list[Report]:
        for process in self._processes:
            self._tell(process, "report")
        answers = [process.stdout.readline() for process in self._processes if process.stdout]
        return [msgspec.json.decode(answer, type=Report) for answer in answers]

    @staticmethod
    def _tell(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()

    def wait(self, what: str, holds: Callable[[], bool], within_s: float = WAIT_S) -> float:
        begin = time.monotonic()
        while not holds():
            if time.monotonic() - begin > within_s:
                logs = "\n".join(n.log.read_text()[-1500:] for n in self.cluster.nodes)
                raise AssertionError(f"not within {within_s:g} s: {what}\n{logs}")
            time.sleep(0.1)
        return time.monotonic() - begin

    def wait_for_lanes(self, since: float | None = None) -> float:
        """Until lanes of every vehicle have come since that moment, now by default."""
        since = time.monotonic() if since is None else since
        arrivals = self.reader.arrivals
        return self.wait(
            f"lanes of all {len(self.vehicles)} vehicles",
            lambda: all(arrivals[name][-1:] > [since] for name in self.vehicles),
        )

    def close(self) -> None:
        for process in self._processes:
            process.communicate("end\n", timeout=WAIT_S)
        self.reader.close()
        self.cluster.end()


def sent_bytes() -> int:
    """Return what the vehicles' bridges have sent, with TLS's own bytes and without TCP's; and the
    reader's acknowledgements."""
    found = subprocess.run(
        ["ss", "-tinH", f"( dport = :{EVENTS_PORT} or dport = :{LANES_PORT} )"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return sum(map(int, re.findall(r"\bbytes_sent:(\d+)", found)))


def measure(fleet: Fleet, seconds: float) -> dict[str, float]:
    """Return what so many seconds cost."""
    reader, cluster = fleet.reader, fleet.cluster

    def now() -> np.ndarray[Any, np.dtype[np.float64]]:
        reports = fleet.reports()
        lanes = sum(map(len, reader.arrivals.values()))
        events = sum(map(len, reader.events.values()))
        return np.array(
            [
                time.monotonic(),
                lanes,
                events,
                cluster.cpu_s(),
                sum(r.brokers_cpu_s for r in reports),
                sum(r.daemons_cpu_s for r in reports),
                sent_bytes(),
                reader.payload_bytes["lanes"],
                sum(r.lanes for r in reports),
            ]
        )

    before, aged = now(), len(reader.ages_s)
    time.sleep(seconds)
    took, lanes, events, nodes, brokers, daemons, sent, payload, given = now() - before
    vehicles, messages = len(fleet.vehicles), lanes + events
    hours = took / 3600 * vehicles
    ages = reader.ages_s[aged:] or [float("nan")]
    return {
        "messages_per_s": messages / took,
        "lanes_given_per_s": given / took,
        "events_per_s": events / took,
        "node_messages_per_core_s": messages / nodes,
        "node_cpu_percent": 100 * nodes / took,
        "bridge_cpu_us": 1e6 * brokers / messages,
        "daemon_cpu_us": 1e6 * daemons / messages,
        "sent_mb_per_vehicle_h": sent / 1e6 / hours,
        "lane_payload_bytes": payload / max(lanes, 1),
        "bytes_per_message": sent / messages,
        "age_ms_p50": 1e3 * float(np.percentile(ages, 50)),
        "age_ms_p95": 1e3 * float(np.percentile(ages, 95)),
    }


def busiest(cluster: Cluster) -> Node:
    """Return the node where most vehicles have their lanes."""

    def vehicles(node: Node) -> int:
        command = ["ss", "-tnH", "state", "established", "dst", node.host]
        command += ["dport", "=", f":{LANES_PORT}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.count(
            "\n"
        )

    return max(cluster.nodes, key=vehicles)


def kill(cluster: Cluster) -> None:
    node = busiest(cluster)
    node.end(signal.SIGKILL)
    time.sleep(10)
    node.start()


def partition(cluster: Cluster) -> None:
    node = busiest(cluster)
    node.partition()
    time.sleep(20)
    node.heal()


def full(cluster: Cluster) -> None:
    node = busiest(cluster)
    node.fill()
    time.sleep(15)
    node.has_room()
    # JetStream ends on a full disk, until the node is started again; 2.9.10 may hang in doing so.
    node.end()
    node.start()


def rolling_restart(cluster: Cluster) -> None:
    for node in cluster.nodes:
        # Leaders move to other nodes first, and its clients leave one after another.
        node.end(signal.SIGUSR2, LAME_DUCK_S)
        node.start()
        cluster.wait()


FAULTS = {each.__name__: each for each in (partition, kill, full, rolling_restart)}


def faults(
    fleet: Fleet, names: list[str], chosen: argparse.Namespace
) -> tuple[dict[str, float], bool]:
    """Do each of these `rounds` times; return figures, and whether nothing was lost."""
    lanes_hz, rounds = chosen.lanes, chosen.rounds
    found: dict[str, float] = {}
    before = fleet.reports()
    fleet.drive(lanes_hz, chosen.burst, 5.0)
    fleet.wait_for_lanes()
    for name in names:
        longest, returned_s, absent_s, in_100_ms = [], [], [], 0
        for _ in range(rounds):
            begin = time.monotonic()
            FAULTS[name](fleet.cluster)
            fleet.cluster.wait()
            fleet.wait_for_lanes()
            time.sleep(max(2 / lanes_hz, LATE_S))
            gaps, returns = [], []
            for times in fleet.reader.arrivals.values():
                recent = np.array([t for t in times if t > begin - 2 / lanes_hz])
                steps = np.diff(recent)
                gaps.append(float(steps.max()))
                returns += list(recent[1:][steps > 1 / lanes_hz + 1.0])
            longest.append(max(gaps))
            returned_s += [float(gap) for gap in gaps if gap > 1 / lanes_hz + 1.0]
            bins = ((np.array(returns) - begin) * 10).astype(int)
            in_100_ms = max([in_100_ms, *np.bincount(bins)])
            absent_s += [e - b for b, e in fleet.reader.absences if e > begin]
        found |= {
            f"{name}_lanes_gap_s_p50": float(np.median(returned_s or [0.0])),
            f"{name}_lanes_gap_s_max": max(longest),
            f"{name}_vehicles_with_a_gap": len(returned_s),
            f"{name}_most_back_in_100_ms": float(in_100_ms),
            f"{name}_reader_absent_s": max(absent_s, default=0.0),
        }
        print(
            f"{name}, {rounds} times: lanes of a vehicle away at most "
            f"{', '.join(f'{gap:.1f}' for gap in longest)} s; {len(returned_s)} longer than 1 s, "
            f"median {np.median(returned_s or [0.0]):.1f} s, at most {in_100_ms} back within "
            f"100 ms; events' reader away {max(absent_s, default=0):.1f} s",
            flush=True,
        )
    fleet.drive(0)
    reports = fleet.reports()
    given = {name: n for report in reports for name, n in report.events.items()}
    events = fleet.reader.events
    try:
        waited_s = fleet.wait(
            "every event", lambda: all(len(events[n]) >= count for n, count in given.items())
        )
    except AssertionError:
        waited_s = float("nan")
    lost = sum(n - len(events[name]) for name, n in given.items())
    wrong = [name for name, n in given.items() if events[name] != [*range(1, n + 1)]]
    early = sum(int((np.diff(events[name]) < 0).sum()) for name in given)
    print(
        f"{sum(given.values())} events: {lost} lost, {early} out of order, "
        f"{fleet.reader.repeated} came again, the last after {waited_s:.1f} s"
    )
    grown = max(r.daemon_bytes for r in reports) - max(r.daemon_bytes for r in before)
    found |= {
        "events": sum(given.values()),
        "events_lost": lost,
        "events_out_of_order": early,
        "events_repeated": fleet.reader.repeated,
        "daemon_mib": max(r.daemon_bytes for r in reports) / 2**20,
        "daemon_grown_mib": grown / 2**20,
        "vehicle_broker_mib": max(r.broker_bytes for r in reports) / 2**20,
    }
    print(
        f"a vehicle: publisher and log {found['daemon_mib']:.1f} MiB "
        f"({found['daemon_grown_mib']:+.1f}), mosquitto {found['vehicle_broker_mib']:.1f} MiB"
    )
    return found, not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--vehicles", type=int, default=60)
    parser.add_argument("--lanes", type=float, default=10, help="a second, of each vehicle")
    parser.add_argument("--payload", choices=("json", "protobuf"), default="json")
    parser.add_argument("--no-tls", action="store_true", help="nor accounts")
    parser.add_argument("--seconds", type=float, default=30, help="that are measured")
    parser.add_argument(
        "--faults", nargs="*", choices=[*FAULTS], help="these, or all, instead of a measurement"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of each fault")
    parser.add_argument("--burst", type=int, default=10, help="events each 5 s, with --faults")
    add_option(parser)
    chosen = parser.parse_args()
    isolated()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fleet = Fleet(folder, chosen.vehicles, chosen.payload, tls=not chosen.no_tls)
        is_right = True
        try:
            fleet.drive(chosen.lanes, 5, 10.0)
            print(f"lanes of all vehicles after {fleet.wait_for_lanes():.1f} s", flush=True)
            if not chosen.no_tls:
                check_accounts(fleet.cluster.nodes[1], folder / "certificates")
                check_status(fleet, folder / "certificates")
            if chosen.faults is not None:
                found, is_right = faults(fleet, chosen.faults or [*FAULTS], chosen)
            else:
                time.sleep(5)
                found = measure(fleet, chosen.seconds)
                for key, value in found.items():
                    print(f"{key:30} {value:12.2f}")
        finally:
            fleet.close()
    record(chosen.record, found)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
