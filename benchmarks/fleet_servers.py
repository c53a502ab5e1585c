"""One, two and three servers side by side, behind gRPC's own balancer and behind nginx: throughput,
and the calls that fail while all are restarted one after another.

    python benchmarks/fleet_servers.py [--seconds 5]

The model stands in for an accelerator: each server has one, and each call takes it for 20 ms, in
which no processor of this machine works. With the shipped network all servers would share the same
processors, and a second one could add nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from record import add_option, record
from tritonclient.utils import InferenceServerException

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.preloaded import PRELOADED
from support.several_servers import Nginx, Servers

CLIENTS = 24
MODEL = """import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.02 * len(requests))
        tensor = [pb_utils.get_input_tensor_by_name(r, "x").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each)]) for each in tensor]
"""
CONFIG = """backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""


def build(folder: Path, _number: int) -> None:
    (folder / "m/1").mkdir(parents=True)
    (folder / "m/config.pbtxt").write_text(CONFIG)
    (folder / "m/1/model.py").write_text(MODEL)


class Clients:
    """Calls without a pause, of several threads of one client."""

    def __init__(self, target: str, *, balances: bool) -> None:
        doc = (Path(__file__).parents[1] / "docs/fleet.md").read_text()
        config = json.loads(re.findall(r"```json\n(.*?)```", doc, re.DOTALL)[0])
        if not balances:
            del config["loadBalancingConfig"], config["healthCheckConfig"]
        options = [("grpc.service_config", json.dumps(config))]
        self.client = triton.InferenceServerClient(target, channel_args=options)
        self.answered = self.failed = 0
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._call) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _call(self) -> None:
        x = triton.InferInput("x", [1], "FP32")
        x.set_data_from_numpy(np.zeros(1, np.float32))
        while not self._over.is_set():
            try:
                self.client.infer("m", [x])
            except InferenceServerException:
                with self._lock:
                    self.failed += 1
            else:
                with self._lock:
                    self.answered += 1

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self.client.close()


def measure(folder: Path, count: int, seconds: float) -> dict[str, float]:
    found: dict[str, float] = {}
    servers = Servers(folder, count, build)
    nginx = Nginx(folder / "nginx", servers.ports)
    direct = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in servers.ports)
    try:
        for name, target in (("grpc", direct), ("nginx", f"127.0.0.1:{nginx.port}")):
            clients = Clients(target, balances=name == "grpc")
            try:
                time.sleep(2)
                before, begin = clients.answered, time.monotonic()
                time.sleep(seconds)
                per_s = (clients.answered - before) / (time.monotonic() - begin)
                found[f"{name}_{count}_per_s"] = per_s
                if count > 1:
                    before, begin = clients.answered, time.monotonic()
                    for number in range(count):
                        servers.stop(number)
                        nginx.reload(servers.ports[number])
                        servers.start(number)
                        nginx.reload()
                        time.sleep(2)
                    took = time.monotonic() - begin
                    found[f"{name}_{count}_per_s_restarting"] = (clients.answered - before) / took
            finally:
                clients.end()
            found[f"{name}_{count}_failed"] = clients.failed
    finally:
        nginx.close()
        servers.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=5)
    add_option(parser)
    chosen = parser.parse_args()
    found: dict[str, float] = {}
    PRELOADED.begin()
    try:
        for count in (1, 2, 3):
            with tempfile.TemporaryDirectory() as folder:
                found |= measure(Path(folder), count, chosen.seconds)
    finally:
        PRELOADED.end()
    for key, value in found.items():
        print(f"{key:30} {value:10.1f}")
    record(chosen.record, found)
    return 1 if sum(value for key, value in found.items() if key.endswith("failed")) else 0


if __name__ == "__main__":
    sys.exit(main())
