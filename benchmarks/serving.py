"""ModelInfer against a bare grpcio server that parses with protobuf and does the same work.

    python benchmarks/serving.py [--clients 1 2 4 8] [--seconds 3] [--rounds 3]

Both servers answer an identity model, in turn within one run, to clients that send prepared bytes
(so that the client's cost is the same and small). Figures are medians over the rounds; the last
columns are the ratios ours / bare of throughput and of server CPU per request. Then the lane
network and the ensemble, which the bare server does not have.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

METHOD = "/inference.GRPCInferenceService/ModelInfer"
OPTIONS = [("grpc.max_receive_message_length", 2**26), ("grpc.max_send_message_length", 2**26)]
MODELS = Path(__file__).parent.parent / "models"
IDENTITY = (
    'backend: "identity" input {{ name: "x" data_type: TYPE_UINT8 dims: -1 }} '
    'output {{ name: "y" data_type: TYPE_UINT8 dims: -1 }} '
    "instance_group {{ count: 8 }}"
)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Load:
    """What one run of clients measured."""

    per_s: float
    p50_ms: float
    p99_ms: float
    server_cpu_ms: float


class BareServicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """What a page of grpcio gives: parse, answer the input as the output, serialise."""

    def ModelInfer(  # noqa: N802 - the protocol names it
        self, request: pb.ModelInferRequest, _context: object
    ) -> pb.ModelInferResponse:
        array = np.frombuffer(request.raw_input_contents[0], np.uint8)
        response = pb.ModelInferResponse(model_name=request.model_name, model_version="1")
        response.outputs.add(name="y", datatype="UINT8", shape=array.shape)
        response.raw_output_contents.append(array.tobytes())
        return response


def serve_bare(port: int) -> None:
    server = grpc.server(ThreadPoolExecutor(32), options=OPTIONS)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(BareServicer(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


def request_bytes(model: str, **inputs: np.ndarray) -> bytes:
    request = pb.ModelInferRequest(model_name=model)
    types = {np.dtype(np.uint8): "UINT8", np.dtype(np.float32): "FP32"}
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype=types[array.dtype], shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request.SerializeToString()


def ask(port: int, data: bytes, seconds: float) -> list[float]:
    """One client: the latencies, in s, of as many requests as fit into `seconds`."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        call = channel.unary_unary(METHOD)
        call(data, wait_for_ready=True)
        latencies = []
        end = time.monotonic() + seconds
        while (begun := time.monotonic()) < end:
            call(data)
            latencies.append(time.monotonic() - begun)
    return latencies


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def measure(
    server: subprocess.Popen[bytes], port: int, data: bytes, clients: int, s: float
) -> Load:
    with get_context("spawn").Pool(clients) as pool:
        pool.starmap(ask, [(port, data, 0.2)] * clients)
        cpu_before = cpu_s(server.pid)
        latencies = [*chain.from_iterable(pool.starmap(ask, [(port, data, s)] * clients))]
        cpu = cpu_s(server.pid) - cpu_before
    p50, p99 = np.percentile(latencies, (50, 99)) * 1e3
    return Load(len(latencies) / s, p50, p99, 1e3 * cpu / len(latencies))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def median(loads: list[Load], figure: str) -> float:
    return statistics.median(getattr(load, figure) for load in loads)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="WORK", help="works that start with this")
    parser.add_argument("--serve-bare", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_bare:
        serve_bare(arguments.serve_bare)
        return 0

    works = {
        "identity 1 kB": request_bytes("identity", x=np.zeros(1024, np.uint8)),
        "identity 2.76 MB": request_bytes("identity", x=np.zeros(2_764_800, np.uint8)),
        "lane network": request_bytes(
            "laneDetect_model", input=np.zeros((1, 3, 360, 640), np.float32)
        ),
        "lane ensemble": request_bytes(
            "lane_detection", image=np.zeros((1, 720, 1280, 3), np.uint8)
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(shutil.copytree(MODELS, f"{folder}/models"))
        (repository / "identity" / "1").mkdir(parents=True)
        (repository / "identity" / "config.pbtxt").write_text(IDENTITY.format())
        ports = {"ours": free_port(), "bare": free_port()}
        run = [sys.executable, "-m", "edge_server", "run", "--metrics-port=0", "--http-port=0"]
        run += ["--model-repository", str(repository)]
        servers = {
            "ours": subprocess.Popen([*run, f"--grpc-port={ports['ours']}"], stderr=-3),
            "bare": subprocess.Popen([sys.executable, __file__, f"--serve-bare={ports['bare']}"]),
        }
        try:
            report(works, servers, ports, arguments)
        finally:
            for server in servers.values():
                server.terminate()
                server.wait()
    return 0


def report(
    works: dict[str, bytes],
    servers: dict[str, subprocess.Popen[bytes]],
    ports: dict[str, int],
    arguments: argparse.Namespace,
) -> None:
    print(f"{'':18}{'clients':>8}{'req/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'CPU ms':>9}", end="")
    print(f"{'x req/s':>9}{'x CPU':>9}")
    for work, data in works.items():
        if not work.startswith(arguments.only):
            continue
        asked = ("ours", "bare") if work.startswith("identity") else ("ours",)
        for clients in arguments.clients:
            loads: dict[str, list[Load]] = {name: [] for name in asked}
            for _ in range(arguments.rounds):
                for name in asked:
                    load = measure(servers[name], ports[name], data, clients, arguments.seconds)
                    loads[name].append(load)
            ours = loads["ours"]
            row = f"{work:18}{clients:8}{median(ours, 'per_s'):9.0f}{median(ours, 'p50_ms'):9.2f}"
            row += f"{median(ours, 'p99_ms'):9.2f}{median(ours, 'server_cpu_ms'):9.2f}"
            if "bare" in loads:
                pairs = list(zip(ours, loads["bare"], strict=True))
                speed = statistics.median(a.per_s / b.per_s for a, b in pairs)
                cpu = statistics.median(a.server_cpu_ms / b.server_cpu_ms for a, b in pairs)
                row += f"{speed:9.2f}{cpu:9.2f}"
            print(row, flush=True)


if __name__ == "__main__":
    sys.exit(main())
