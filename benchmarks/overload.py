"""Goodput under overload: what is answered in time at ten times the load that can be served.

    python benchmarks/overload.py [--seconds 4] [--rounds 3] [--only WORK]

Requests come at a given rate, whatever becomes of those before them, from client processes with
several connections each; every request has a deadline. First the rate rises past what the model
can do, and the most that is answered in time per second is the peak; then it is ten times the
peak. Figures are medians over the rounds. `late` is how far a client fell behind its own schedule:
where it is more than the deadline, the clients were the bottleneck and the row says little.

The models take a fixed time without a processor, as one on a GPU does: `direct` 10 ms per request,
`batched` 40 ms per batch of up to 4, with a queue of 8. The lane network computes on this machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
from record import add_option, record
from serving import METHOD, MODELS, OPTIONS, cpu_s, free_port, request_bytes
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Sequence

TIMES = 10
RISING = (0.5, 0.8, 1.0, 1.25, 1.6, 2.0)
CLIENTS = 2
# A connection carries 16 calls at once; more of them wait within the client.
CONNECTIONS = 6
OK = grpc.StatusCode.OK.name

CONFIG = """
backend: "python"
max_batch_size: {batch}
input {{ name: "x" data_type: TYPE_UINT8 dims: -1 }}
output {{ name: "y" data_type: TYPE_UINT8 dims: -1 }}
instance_group {{ kind: KIND_CPU count: 1 }}
{more}
"""
SLEEPER = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep({seconds})
        inputs = [pb_utils.get_input_tensor_by_name(request, "x") for request in requests]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", each.as_numpy())]) for each in inputs
        ]
"""
QUEUE = "dynamic_batching { default_queue_policy { max_queue_size: 8 } }"


@dataclass(frozen=True)
class Work:
    """What is asked, how many of it per second can be hoped for, how long a client waits."""

    name: str
    data: bytes
    capacity_per_s: float
    deadline_s: float


@dataclass(frozen=True)
class Load:
    """What one run of all clients measured; refusals are all answers but OK."""

    offered_per_s: float
    goodput_per_s: float
    codes: Counter[str]
    ok_p99_ms: float
    refused_p50_ms: float
    refused_p99_ms: float
    late_ms: float
    server_cpu: float
    client_cpu: float


class Client:
    """Asks at a steady rate and notes when and how each request ended."""

    def __init__(self, port: int) -> None:
        # Channels of one process share a connection unless each has a pool of its own.
        options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        self._channels = [
            grpc.insecure_channel(f"127.0.0.1:{port}", options=options) for _ in range(CONNECTIONS)
        ]
        for channel in self._channels:
            grpc.channel_ready_future(channel).result(30)
        self._calls = [channel.unary_unary(METHOD) for channel in self._channels]
        self._ended: list[tuple[str, float]] = []
        self._all = threading.Semaphore(0)

    def offer(self, data: bytes, per_s: float, seconds: float, deadline_s: float) -> float:
        """Returns when all have ended: how late the latest request was sent, in s."""
        latest_s = 0.0
        count = int(per_s * seconds)
        start = time.monotonic()
        for number in range(count):
            due = start + number / per_s
            if (wait_s := due - time.monotonic()) > 0:
                time.sleep(wait_s)
            begun = time.monotonic()
            latest_s = max(latest_s, begun - due)
            call = self._calls[number % CONNECTIONS].future(data, timeout=deadline_s)
            call.add_done_callback(lambda call, begun=begun: self._note(call, begun))
        for _ in range(count):
            self._all.acquire()
        return latest_s

    def close(self) -> list[tuple[str, float]]:
        """The code and the latency, in s, of each request."""
        for channel in self._channels:
            channel.close()
        return self._ended

    def _note(self, call: grpc.Call, begun: float) -> None:
        self._ended.append((call.code().name, time.monotonic() - begun))
        self._all.release()


def offer(
    port: int, data: bytes, per_s: float, seconds: float, deadline_s: float
) -> tuple[list[tuple[str, float]], float, float]:
    """One client process: how each request ended, how late it was, its processor time in s."""
    client = Client(port)
    cpu_before = time.process_time()
    late_s = client.offer(data, per_s, seconds, deadline_s)
    return client.close(), late_s, time.process_time() - cpu_before


def measure(
    server: subprocess.Popen[bytes], port: int, work: Work, per_s: float, seconds: float
) -> Load:
    with get_context("spawn").Pool(CLIENTS) as pool:
        pool.map(time.sleep, [0.1] * CLIENTS, chunksize=1)
        cpu_before = cpu_s(server.pid)
        asked = (port, work.data, per_s / CLIENTS, seconds, work.deadline_s)
        told = pool.starmap(offer, [asked] * CLIENTS, chunksize=1)
        server_cpu_s = cpu_s(server.pid) - cpu_before
    ended = [each for answers, _, _ in told for each in answers]
    good = [s for code, s in ended if code == OK] or [float("nan")]
    # Who waited to the deadline was not refused but kept waiting.
    refused = [s for code, s in ended if code not in (OK, "DEADLINE_EXCEEDED")] or [float("nan")]
    codes = Counter(code for code, _ in ended)
    return Load(
        len(ended) / seconds,
        codes[OK] / seconds,
        codes,
        float(np.percentile(good, 99)) * 1e3,
        float(np.percentile(refused, 50)) * 1e3,
        float(np.percentile(refused, 99)) * 1e3,
        max(late_s for _, late_s, _ in told) * 1e3,
        server_cpu_s / seconds,
        sum(cpu for _, _, cpu in told) / seconds,
    )


def row(name: str, times: str, loads: Sequence[Load], ratio: str = "") -> str:
    def middle(figure: str) -> float:
        return statistics.median(getattr(load, figure) for load in loads)

    codes = sum((load.codes for load in loads), Counter[str]())
    others = ", ".join(
        f"{code} {count / codes.total():.0%}" for code, count in codes.most_common() if code != OK
    )
    return (
        f"{name:18}{times:>5}{middle('offered_per_s'):9.0f}{middle('goodput_per_s'):9.1f}"
        f"{middle('ok_p99_ms'):9.0f}{middle('refused_p50_ms'):9.1f}{middle('refused_p99_ms'):9.1f}"
        f"{middle('late_ms'):7.0f}{middle('server_cpu'):7.2f}{middle('client_cpu'):7.2f}"
        f"{ratio:>7}  {others}"
    )


def report(
    works: Sequence[Work], server: subprocess.Popen[bytes], port: int, seconds: float, rounds: int
) -> dict[str, float]:
    """Print a table, and return each work's goodput beyond its capacity, as a share of its best."""
    print(f"{'':18}{'load':>5}{'asked/s':>9}{'good/s':>9}{'p99 ms':>9}{'ref p50':>9}", end="")
    print(f"{'ref p99':>9}{'late':>7}{'s CPU':>7}{'c CPU':>7}{'/peak':>7}  others")
    found: dict[str, float] = {}
    for work in works:
        ratios: list[float] = []
        rising: dict[float, list[Load]] = {times: [] for times in RISING}
        beyond: list[Load] = []
        for _ in range(rounds):
            for times, loads in rising.items():
                per_s = times * work.capacity_per_s
                loads.append(measure(server, port, work, per_s, seconds))
            peak = max(loads[-1].goodput_per_s for loads in rising.values())
            beyond.append(measure(server, port, work, TIMES * peak, seconds))
            ratios.append(beyond[-1].goodput_per_s / peak)
        for times, loads in rising.items():
            print(row(work.name, f"{times:g}", loads))
        found[f"{work.name} share"] = statistics.median(ratios)
        ratio = f"{found[f'{work.name} share']:.2f}"
        print(row(work.name, "peak", beyond, ratio).replace("peak", f"{TIMES}p"), flush=True)
    return found


def write_models(folder: Path) -> None:
    for name, seconds, batch, more in (("direct", 0.010, 0, ""), ("batched", 0.040, 4, QUEUE)):
        directory = folder / name / "1"
        directory.mkdir(parents=True)
        (directory / "model.py").write_text(SLEEPER.format(seconds=seconds))
        (folder / name / "config.pbtxt").write_text(CONFIG.format(batch=batch, more=more))


def wait_until_ready(port: int) -> None:
    """Returns once every model serves."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        while not stub.ServerReady(pb.ServerReadyRequest(), wait_for_ready=True).ready:
            time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="WORK", help="works that start with this")
    add_option(parser)
    arguments = parser.parse_args()
    kilobyte = np.zeros(1024, np.uint8)
    image = np.zeros((1, 3, 360, 640), np.float32)
    works = [
        Work("direct, 1 s", request_bytes("direct", x=kilobyte), 90, 1.0),
        Work("direct, 200 ms", request_bytes("direct", x=kilobyte), 90, 0.2),
        Work("batched, 1 s", request_bytes("batched", x=kilobyte[None]), 90, 1.0),
        Work("batched, 200 ms", request_bytes("batched", x=kilobyte[None]), 90, 0.2),
        Work("lane, 1 s", request_bytes("laneDetect_model", input=image), 20, 1.0),
    ]
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(shutil.copytree(MODELS, f"{folder}/models"))
        write_models(repository)
        port = free_port()
        run = [sys.executable, "-m", "edge_server", "run", "--metrics-port=0", "--http-port=0"]
        run += ["--model-repository", str(repository), f"--grpc-port={port}"]
        server = subprocess.Popen(run, stderr=None if os.environ.get("EDGE_LOG") else -3)
        try:
            wait_until_ready(port)
            chosen = [work for work in works if work.name.startswith(arguments.only)]
            found = report(chosen, server, port, arguments.seconds, arguments.rounds)
            record(arguments.record, found)
        finally:
            server.terminate()
            server.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
