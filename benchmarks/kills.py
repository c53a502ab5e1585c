"""Kill -9 of whole daemons while they swap models, write events and record.

    python benchmarks/kills.py [--kills 300] [--seed 1]

A daemon follows a repository in mode poll, reads a rendered camera, keeps events and records all
the time; models are delivered without a pause, well and badly, as in `reload.py`. At a random
moment, from its first instant to some seconds after it is ready, it is killed, and started again on
what it left. The exit code is 1 where one of these did not hold:

- no daemon ends by itself, and each becomes ready;
- what is served first is the last known good model of the run before or a newer one, and never one
  that was broken;
- an event that a reader has seen is there after the kill, unchanged; ids only grow, and no id is
  used twice;
- every recording is whole, with its summary, once the next daemon has started.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
from mcap.reader import make_reader
from record import add_option, record
from reload import METHOD, NEVER, Deliveries
from tritonclient.grpc import service_pb2 as pb

from edge_server.proto.edge.lanes.v1 import lane_service_pb2 as lanes_pb

READY_S = 60.0
EVENTS = "/edge.lanes.v1.LaneService/StreamEvents"
CONFIG = """\
[repository]
paths = ["{folder}/repository"]
mode = "poll"
poll_s = 0.3
settle_s = 0.2
probation_requests = 10
probation_s = 0.2
store = "{folder}/store"
[grpc]
socket = "{folder}/grpc"
port = 0
[http]
port = 0
[metrics]
port = 0
[recorder]
mode = "continuous"
directory = "{folder}/recordings"
file_s = 1
width = 160
[cameras.front]
uri = "synthetic://road?seed=7&fps=10"
"""


class Daemon:
    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self._channel = grpc.insecure_channel(
            f"unix:{folder}/grpc", [("grpc.use_local_subchannel_pool", 1)]
        )
        command = [sys.executable, "-m", "edge_server", "run", "--config", f"{folder}/config.toml"]
        with self._log.open("w") as stderr:
            self.process = subprocess.Popen(
                command, stderr=stderr, env={**os.environ, "STATE_DIRECTORY": f"{folder}/state"}
            )

    def log(self) -> str:
        return self._log.read_text()

    def served(self) -> int | None:
        """The number of the model that answers; None where none does."""
        request = pb.ModelInferRequest(model_name="m")
        request.inputs.add(name="x", datatype="FP32", shape=[1])
        request.raw_input_contents.append(np.zeros(1, np.float32).tobytes())
        call: Any = self._channel.unary_unary(METHOD)
        try:
            answer = pb.ModelInferResponse.FromString(call(request.SerializeToString(), timeout=5))
        except grpc.RpcError:
            return None
        return int(np.frombuffer(answer.raw_output_contents[0], np.float32)[0])

    def events(self, seconds: float) -> list[Any]:
        """All that are kept, and those of so many seconds."""
        found = []
        request = lanes_pb.StreamEventsRequest(after_id=0).SerializeToString()
        call: Any = self._channel.unary_stream(EVENTS)
        with suppress(grpc.RpcError):
            for data in call(request, timeout=seconds):
                found.append(lanes_pb.StreamEventsResponse.FromString(data).event)  # noqa: PERF401
        return found

    def kill(self) -> int | None:
        """Its exit code, where it has ended before."""
        ended = self.process.poll()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._channel.close()
        return ended


class Campaign:
    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._random = random.Random(seed)  # noqa: S311 - the same kills each time
        (folder / "repository").mkdir()
        (folder / "config.toml").write_text(CONFIG.format(folder=folder))
        models = Path(__file__).parents[1] / "models"
        for model in models.iterdir():
            shutil.copytree(model, folder / "repository" / model.name)
        self._deliveries = Deliveries(folder / "repository", seed)
        self._delivered = self._least = 0
        self._deliveries.renamed(0)
        self._over = threading.Event()
        self._seen: dict[int, bytes] = {}
        self._checked: set[Path] = set()
        self.faults: list[str] = []
        self.starts_s: list[float] = []

    def run(self, kills: int) -> None:
        deliverer = threading.Thread(target=self._deliver)
        deliverer.start()
        try:
            for number in range(kills):
                self._one(number)
                if number % 20 == 19:
                    print(*self.faults[-3:], sep="\n")
                    counts = (f"{count:g} {name}" for name, count in self.counts().items())
                    print(f"{number + 1:4} kills, {', '.join(counts)}", flush=True)
        finally:
            self._over.set()
            deliverer.join()

    def counts(self) -> dict[str, float]:
        """Return how much was delivered, kept, seen and found wrong."""
        return {
            "deliveries": self._delivered,
            "kept": self._least,
            "events": len(self._seen),
            "recordings": len(self._checked),
            "faults": len(self.faults),
        }

    def _deliver(self) -> None:
        while not self._over.wait(0.3):
            self._deliveries.deliver(self._delivered + 1)
            self._delivered += 1

    def _one(self, number: int) -> None:
        daemon = Daemon(self._folder)
        begun = time.monotonic()
        if self._random.random() < 0.2:
            time.sleep(self._random.random() * 2)  # before it is ready
        else:
            self._watch(daemon, begun)
        ended = daemon.kill()
        log = daemon.log()
        if ended is not None:
            self.faults.append(f"kill {number}: it had ended with {ended}: {log[-2000:]}")
        if "Traceback" in log:
            self.faults.append(f"kill {number}: {log[log.index('Traceback') :][:2000]}")

    def _watch(self, daemon: Daemon, begun: float) -> None:
        while (first := daemon.served()) is None:
            if daemon.process.poll() is not None or time.monotonic() - begun > READY_S:
                self.faults.append(f"model m was not served: {daemon.log()[-2000:]}")
                return
            time.sleep(0.02)
        self.starts_s.append(time.monotonic() - begun)
        if not self._least <= first <= self._delivered:
            self.faults.append(f"{first} is served, not {self._least} to {self._delivered}")
        until = time.monotonic() + self._random.random() * 4
        self._see(daemon)
        while time.monotonic() < until:
            number = daemon.served()
            if number is None or number >= NEVER:
                self.faults.append(f"{number} is served")
            self._least = max(self._least, self._committed())
            time.sleep(0.02)
        self._see(daemon)
        self._see_recordings()

    def _committed(self) -> int:
        """The number of the copy that the store's state names as the last known good."""
        store = self._folder / "store"
        with suppress(OSError, LookupError):
            state = json.loads((store / "state.json").read_text())["state"]
            copy = store / "copies" / state["models"]["m"][0]["key"]
            (constant,) = onnx.load(copy / "m" / "1" / "model.onnx").graph.initializer
            return int(constant.float_data[0])
        return self._least

    def _see(self, daemon: Daemon) -> None:
        for seconds in (0.2, 5.0, 60.0):
            events = daemon.events(seconds)
            ids = [event.id for event in events]
            if max(ids, default=0) >= max(self._seen, default=0):
                break  # else the machine may have been too busy for so short a time
        if ids != sorted(set(ids)):
            self.faults.append(f"ids of events: {ids}")
        for event in events:
            data = event.SerializeToString()
            if self._seen.setdefault(event.id, data) != data:
                self.faults.append(f"event {event.id} is another one: {event}")
        kept = [number for number in self._seen if ids and number >= ids[0]]
        if missing := sorted(set(kept) - set(ids)):
            self.faults.append(f"events {missing} are gone")

    def _see_recordings(self) -> None:
        for path in set((self._folder / "recordings").glob("*.mcap")) - self._checked:
            self._checked.add(path)
            try:
                with path.open("rb") as file:
                    reader = make_reader(file, validate_crcs=True)
                    count = sum(1 for _ in reader.iter_messages())
                    summary = reader.get_summary()
                assert summary is not None
                assert summary.statistics is not None
                assert summary.statistics.message_count == count
            except Exception as error:  # noqa: BLE001 - each is a fault of the file
                self.faults.append(f"recording {path.name}: {error!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    add_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), arguments.seed)
        campaign.run(arguments.kills)
    print(*campaign.faults, sep="\n")
    p50_s, p99_s = np.percentile(campaign.starts_s, (50, 99))
    print(f"{len(campaign.faults)} faults; served again after {p50_s:.1f} s, p99 {p99_s:.1f} s")
    found = campaign.counts() | {"served p50 s": p50_s, "served p99 s": p99_s}
    record(arguments.record, found)
    return bool(campaign.faults)


if __name__ == "__main__":
    sys.exit(main())
