"""Many vehicles in one process: of each the daemon's own publisher, outbox and event log, and a
mosquitto with the bridge of examples/fleet. The lanes are those of a recording, without inference.

    python -m support.fleet_vehicles ORDER.json

reads `Order`, and a command a line from stdin: `drive LANES_HZ BURST EVERY_S`, `report` (answers
with a `Report`), `end`.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from itertools import count, cycle
from pathlib import Path

import msgspec
import numpy as np

from edge_server.board.board import Identity
from edge_server.lanes.types import lanes_from_rows
from edge_server.mqtt.publisher import Publisher
from edge_server.pipeline.event_log import Event, EventLog
from edge_server.settings import Mqtt
from support.broker_cluster import cpu_s
from support.fleet_recipes import bridge_lines
from support.lane_frames import lane_frame
from support.mosquitto import mosquitto_binary
from support.processes import resident_bytes

FIRST_PORT = 20_000
# mosquitto connects again at the full second of its clock, and vehicles have not the same one.
_OWN_CLOCK = """
import ctypes, os, sys
new_time = 0x80
if ctypes.CDLL(None, use_errno=True).unshare(new_time):
    raise OSError(ctypes.get_errno(), "unshare")
with open("/proc/self/timens_offsets", "w") as file:
    file.write(f"monotonic 0 {sys.argv[1]}")
os.execv(sys.argv[2], sys.argv[2:])
"""


class Order(msgspec.Struct):
    """What to run.

    Attributes:
        certificates: the folder of the authority's and the vehicles' certificates; empty for none.
        lanes: the `.npz` of points_N (K, 72, 2) and scores_N (K) of the lane network.
    """

    folder: str
    vehicles: list[int]
    nodes: list[str]
    certificates: str
    lanes: str
    payload: str


class Report(msgspec.Struct):
    """How it stands.

    Attributes:
        events: of each vehicle, by name.
        lanes: of all vehicles, that were given to their publishers.
        daemon_bytes: resident memory of this process, for each vehicle.
        broker_bytes: of the largest mosquitto.
    """

    events: dict[str, int]
    lanes: int
    daemon_bytes: float
    broker_bytes: int
    daemons_cpu_s: float
    brokers_cpu_s: float


class Vehicle:
    """One vehicle; it begins at once."""

    def __init__(self, order: Order, number: int) -> None:
        self.name = f"truck-{number}"
        self.given = 0
        self._frame = 0
        folder = Path(order.folder, self.name)
        port = FIRST_PORT + number
        # Each prefers another node, and goes on with the next one.
        turn = number % len(order.nodes)
        nodes = [*order.nodes[turn:], *order.nodes[:turn]]
        config = folder.with_suffix(".conf")
        restart_s = 1 + number % 10
        bridge = bridge_lines(self.name, folder, nodes, order.certificates, restart_s)
        config.write_text("\n".join([f"listener {port} 127.0.0.1", "user root", *bridge, ""]))
        phase_ns = int(number * 0.618 % 1 * 1e9)
        own_clock = [sys.executable, "-S", "-c", _OWN_CLOCK, str(phase_ns)]
        self.broker = subprocess.Popen(
            [*own_clock, mosquitto_binary(), "-c", str(config)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.log = EventLog(folder / "events.db")
        mqtt = Mqtt("127.0.0.1", port, payload=order.payload)
        identity = Identity(self.name, "0", "boot", f"edge-{self.name}")
        self.publisher = Publisher(mqtt, identity, events=self.log)
        self.log.worker.start()
        self.publisher.start()
        self.publisher.publish_online()

    def lanes(self, points: np.ndarray, scores: np.ndarray) -> None:
        self._frame += 1
        lanes = lanes_from_rows(points, scores)
        self.publisher.publish_lanes(lane_frame(self._frame, lanes=lanes))

    def events(self, number: int) -> None:
        for _ in range(number):
            mono_ns, epoch_ns = time.monotonic_ns(), time.time_ns()
            self.log.put(
                Event("lane_departure", "begin", "left", "", mono_ns, epoch_ns, camera="front")
            )
        self.given += number

    def end(self) -> None:
        self.publisher.stop()
        self.log.stop()
        self.broker.terminate()
        self.broker.wait()


class Vehicles:
    """All of this process, and the thread that drives them."""

    def __init__(self, order: Order) -> None:
        with np.load(order.lanes) as recorded:
            self._recording = [
                (recorded[f"points_{frame}"], recorded[f"scores_{frame}"])
                for frame in range(len(recorded) // 2)
            ]
        self._all = [Vehicle(order, number) for number in order.vehicles]
        self._lanes = 0
        self._rate: tuple[float, int, float] = (0, 0, 1)
        self._changed = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._drive)
        self._thread.start()

    def drive(self, lanes_hz: float, burst: int, every_s: float) -> None:
        """Each vehicle has so many lanes a second, and so many events at once every so often."""
        self._rate = lanes_hz, burst, every_s
        self._changed.set()

    def _drive(self) -> None:
        while not self._over:
            self._changed.clear()
            lanes_hz, burst, every_s = self._rate
            if not lanes_hz:
                self._changed.wait()
                continue
            step_s = 1 / lanes_hz / len(self._all)
            turns = zip(count(1), cycle(self._all), cycle(self._recording), strict=False)
            begin = time.monotonic()
            bursts = dict.fromkeys(self._all, begin)
            for turn, vehicle, (points, scores) in turns:
                vehicle.lanes(points, scores)
                self._lanes += 1
                if burst and time.monotonic() >= bursts[vehicle]:
                    bursts[vehicle] += every_s
                    vehicle.events(burst)
                if self._changed.wait(max(0.0, begin + turn * step_s - time.monotonic())):
                    break

    def report(self) -> Report:
        brokers = [vehicle.broker.pid for vehicle in self._all]
        return Report(
            {vehicle.name: vehicle.given for vehicle in self._all},
            self._lanes,
            resident_bytes() / len(self._all),
            max(map(resident_bytes, brokers)),
            time.process_time(),
            sum(map(cpu_s, brokers)),
        )

    def end(self) -> None:
        self._over = True
        self._changed.set()
        self._thread.join()
        for vehicle in self._all:
            vehicle.end()


def main() -> int:
    logging.getLogger("edge_server").setLevel(logging.ERROR)
    vehicles = Vehicles(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Order))
    try:
        for line in sys.stdin:
            verb, *values = line.split()
            if verb == "drive":
                lanes_hz, burst, every_s = map(float, values)
                vehicles.drive(lanes_hz, int(burst), every_s)
            elif verb == "report":
                print(msgspec.json.encode(vehicles.report()).decode(), flush=True)
            else:
                break
    finally:
        vehicles.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
