"""Hundreds of vehicles follow one channel of Docker's registry: what each has at every step.

    python benchmarks/fleet.py [--vehicles 300] [--interval 10]

Real are the registry with TLS, the broker, the verbs `models publish` and `fleet status`, and of
each vehicle what follows the channel: requests, signature, serial, decision, the fetched archive,
its repository and its durable store. Not real are inference and canary: a model that was marked as
bad counts as rolled back, every other as good. The vehicles share this process and its threads.

The exit code is 1 where one of these did not hold:

- a bad model reaches the vehicles of its first share and no other, and `fleet status` reports it;
- a good one reaches its share at 1, 10 and 100 %, and every vehicle at the end, also those that
  slept; none of these ever gets the bad one;
- while the registry is away, after its tag was moved back, and with a changed index, nothing
  changes.

`unshare --net sh -c 'ip link set lo up && python benchmarks/fleet.py'` also counts the bytes.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import oras.client
import paho.mqtt.client as mqtt

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.certificates import Authority
from support.mosquitto import Mosquitto
from support.oci_registry import Registry

from edge_server.mqtt import payloads
from edge_server.repository.channel import ChannelFollower, Surroundings, position
from edge_server.repository.content import take_inventory
from edge_server.repository.manifest import make_keys
from edge_server.repository.store import ModelStore
from edge_server.repository.verdicts import GOOD, ROLLED_BACK, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.repository.channel import ChannelReport

CONFIG = (
    'backend: "identity" input { name: "a" data_type: TYPE_FP32 dims: -1 } '
    'output { name: "b" data_type: TYPE_FP32 dims: -1 }'
)
STEP_S = 180.0
INDEX = "edge-server.channel"


class SimulatedVehicle:
    """One vehicle: its repository, its store, and what follows the channel."""

    def __init__(
        self,
        folder: Path,
        number: int,
        source: str,
        key: Path,
        *,
        ca: Path,
        interval_s: float,
    ) -> None:
        self.device = f"truck-{number}"
        self.awake = True
        self.had: list[str] = []  # every content that was placed, in order
        self.published: ChannelReport | None = None
        self.bad: set[str] = set()
        self._home = folder / self.device
        self._repository = self._home / "repository"
        self._repository.mkdir(parents=True)
        self._seen: tuple[object, ...] = ()
        self._verdict = Verdict()
        self.follower = ChannelFollower(
            "lanes",
            source,
            [Path(f"{key}.pub")],
            self.device,
            interval_s=interval_s,
            ca_file=str(ca),
            repositories=[self._repository],
            cache=self._home / "cache",
            marks=ModelStore(self._home / "store", repositories=[self._repository]),
            surroundings=lambda: Surroundings(datetime.now(timezone.utc)),
            verdict=self._judge,
            on_news=self._note,
        )

    def _note(self, cause: str, report: ChannelReport) -> None:
        if cause == "placed":
            self.had.append(report.content)

    def _judge(self, model: str) -> Verdict:
        try:
            status = (self._repository / model).stat()
        except FileNotFoundError:
            return Verdict()
        if (seen := (status.st_ino, status.st_ctime_ns)) != self._seen:
            self._seen = seen
            digest = take_inventory(self._repository, model).content.digest
            is_bad = digest in self.bad
            self._verdict = Verdict(
                ROLLED_BACK if is_bad else GOOD,
                digest,
                "requests fail" if is_bad else "",
                time.monotonic_ns(),
                self._verdict.serves if is_bad else digest,
            )
        return self._verdict


class Fleet:
    """All vehicles, the registry and the broker."""

    def __init__(self, folder: Path, count: int, interval_s: float, threads: int) -> None:
        self.folder, self.interval_s = folder, interval_s
        authority = Authority(folder, "authority")
        os.environ["REQUESTS_CA_BUNDLE"] = str(authority.ca)
        self.registry = Registry(folder, authority)
        self.registry.start()
        self.broker = Mosquitto(folder)
        self.broker.start()
        self.key = folder / "fleet.key"
        make_keys(self.key)
        self.source = f"oci://{self.registry.host}/fleet/lanes:stable"
        self.bad: set[str] = set()
        self._client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        self._client.connect(self.broker.host, self.broker.port)
        self._client.loop_start()
        self.vehicles = []
        for number in range(count):
            vehicle = SimulatedVehicle(
                folder, number, self.source, self.key, ca=authority.ca, interval_s=interval_s
            )
            vehicle.bad = self.bad
            self.vehicles.append(vehicle)
            self._tell(vehicle, "status", b'{"state":"online","version":"0"}')
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._drive, args=(self.vehicles[n::threads],))
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._client.loop_stop()
        self.registry.stop()
        self.broker.kill()

    def _drive(self, vehicles: list[SimulatedVehicle]) -> None:
        while not self._stop.wait(0.2):
            for each in vehicles:
                if each.awake and not self._stop.is_set():
                    each.follower.step(time.monotonic())
                    if each.follower.report != each.published:
                        each.published = each.follower.report
                        self._tell(each, "channels/lanes", msgspec.json.encode(each.published))

    def _tell(self, vehicle: SimulatedVehicle, topic: str, payload: bytes) -> None:
        self._client.publish(f"{payloads.PREFIX}/{vehicle.device}/{topic}", payload, 1, retain=True)

    def publish(self, *arguments: object) -> str:
        """Run `models publish`; the content that it names."""
        said = verb("models", "publish", "--channel", self.source, "--sign", self.key, *arguments)
        assert said.returncode == 0, said.stdout + said.stderr
        return said.stdout.split(", ")[1]

    def model(self, seed: int, size: int) -> Path:
        folder = self.folder / f"made-{seed}" / "net"
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(CONFIG)
        (folder / "1" / "weights.bin").write_bytes(seed.to_bytes(4, "big") + os.urandom(size))
        return folder

    def wait(self, what: str, holds: Callable[[ChannelReport], bool]) -> float:
        """Wait until it holds of every vehicle that is awake; the seconds that this took."""
        begin = time.monotonic()
        while lacking := [
            v.follower.report for v in self.vehicles if v.awake and not holds(v.follower.report)
        ]:
            if time.monotonic() - begin > STEP_S + 3 * self.interval_s:
                raise AssertionError(f"{what}: {len(lacking)} vehicles lack it, as {lacking[0]}")
            time.sleep(0.1)
        took_s = time.monotonic() - begin
        print(f"{what:60} {took_s:6.1f} s", flush=True)
        return took_s

    def status(self) -> int:
        """Run `fleet status`; its exit code."""
        heard = datetime.now(timezone.utc).isoformat()
        for each in self.vehicles:
            if each.awake:
                self._tell(each, "health", f'{{"time":{{"time":"{heard}"}}}}'.encode())
        address = f"{self.broker.host}:{self.broker.port}"
        done = verb("fleet", "status", "--mqtt", address)
        print("\n".join(f"    {line}" for line in done.stdout.splitlines()[-2:]), done.stderr)
        return done.returncode

    def manifest(self, put: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the tag's manifest, or write another one."""
        client = oras.client.OrasClient()
        container = client.get_container(self.source.removeprefix("oci://"))
        try:
            if put is not None:
                assert client.upload_manifest(put, container).status_code == 201
            found: dict[str, Any] = client.get_manifest(container)
            return found
        finally:
            client.session.close()

    def requests(self) -> int:
        """How many manifests the registry has served, by its own metrics."""
        url = f"http://127.0.0.1:{self.registry.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as page:
            lines = page.read().decode().splitlines()
        counted = [
            line
            for line in lines
            if line.startswith("registry_http_requests_total") and 'handler="manifest"' in line
        ]
        return sum(int(float(line.split()[-1])) for line in counted)


def verb(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edge_server", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def loopback_bytes() -> int:
    line = next(each for each in Path("/proc/net/dev").read_text().splitlines() if " lo:" in each)
    return int(line.partition(":")[2].split()[0])


def run(fleet: Fleet, size: int) -> None:
    vehicles = fleet.vehicles
    good = fleet.publish(fleet.model(1, size), "--share", 100)
    first = fleet.manifest()
    fleet.wait("a first model reaches all", lambda r: r.content[:12] == good and r.state == "good")

    # At rest: what following costs.
    cpu_s, begin = time.process_time(), time.time()
    requests, received = fleet.requests(), loopback_bytes()
    time.sleep(3 * fleet.interval_s)
    polls = fleet.requests() - requests
    took_s = time.time() - begin
    cpu_ms = 1e3 * (time.process_time() - cpu_s) / polls
    each_bytes = (loopback_bytes() - received) / polls
    print(f"at rest: {polls} requests in {took_s:.0f} s, each {cpu_ms:.1f} ms of a processor")
    print(f"    and {each_bytes:.0f} bytes on the loopback, with TLS's handshake")

    bad_model = fleet.model(2, size)
    bad = take_inventory(bad_model.parent, "net").content.digest
    fleet.bad.add(bad)
    assert fleet.publish(bad_model, "--share", 1) == bad[:12]
    fleet.wait(
        "1 % gets a bad one",
        lambda r: r.content == bad and r.state in ("rolled_back", "not_in_share"),
    )
    has_bad = {v.device for v in vehicles if bad in v.had}
    expected = {v.device for v in vehicles if position(bad, v.device) < 1}
    assert has_bad == expected, has_bad ^ expected
    assert fleet.status() == (1 if expected else 0)
    print(f"    {len(has_bad)} of {len(vehicles)} vehicles had it")

    # Half of the fleet sleeps; the good one goes on without it.
    for each in vehicles[::2]:
        each.awake = False
    better = fleet.publish(fleet.model(3, size), "--share", 1)
    for share in (1, 10, 100):
        if share > 1:
            fleet.publish("--share", share)
        fleet.wait(
            f"a good one at {share} %, half of the fleet asleep",
            lambda r, share=share: (
                r.content.startswith(better)
                and r.share == share
                and r.state in ("good", "not_in_share")
            ),
        )
        have = sum(any(c.startswith(better) for c in v.had) for v in vehicles)
        print(f"    {have} have it", Counter(v.follower.report.state for v in vehicles if v.awake))
    newer = fleet.manifest()
    for each in vehicles:
        each.awake = True
    fleet.wait("the others wake up", lambda r: r.content.startswith(better) and r.state == "good")
    assert {v.device for v in vehicles if bad in v.had} == has_bad
    assert fleet.status() == 0

    placed = [list(v.had) for v in vehicles]
    fleet.registry.stop()
    fleet.wait("the registry is gone", lambda r: r.fault.startswith("unreachable"))
    fleet.registry.start()
    fleet.wait("it is back", lambda r: not r.fault)
    fleet.manifest(first)
    fleet.wait("the tag is moved back", lambda r: "is older than" in r.fault)
    index = newer["annotations"][INDEX].replace('"share":100.0', '"share":99.00')
    assert index != newer["annotations"][INDEX]
    fleet.manifest({**newer, "annotations": {**newer["annotations"], INDEX: index}})
    fleet.wait("the index is changed", lambda r: "is not signed by" in r.fault)
    assert fleet.status() == 1
    fleet.manifest(newer)
    fleet.wait("all is as before", lambda r: not r.fault and r.state == "good")
    assert placed == [list(v.had) for v in vehicles]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--vehicles", type=int, default=300)
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between two requests")
    parser.add_argument("--threads", type=int, default=8, help="that the vehicles share")
    parser.add_argument("--model-kib", type=int, default=256)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), chosen.vehicles, chosen.interval, chosen.threads)
        try:
            run(fleet, chosen.model_kib << 10)
        finally:
            fleet.close()
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(
        f"{used.ru_maxrss >> 10} MiB at most, {used.ru_utime + used.ru_stime:.0f} s of a processor"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
