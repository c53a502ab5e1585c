"""Inference over gRPC and HTTP against bare servers that parse and do the same work.

    python benchmarks/serving.py [--clients 1 2 4 8] [--seconds 3] [--rounds 3]

Both servers answer an identity model, in turn within one run, to clients that send prepared bytes
(so that the client's cost is the same and small). Figures are medians over the rounds; the last
columns are the ratios ours / bare of throughput and of server CPU per request. The bare server of
gRPC parses with protobuf, that of HTTP is a Starlette application on uvicorn, httptools and uvloop;
HTTP carries the tensors as binary data; in shared memory lies the input alone. Then the lane
network and the ensemble, which the bare servers do not have.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from http.client import HTTPConnection
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
from record import add_option, record
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

SHM = Path("/dev/shm")  # noqa: S108 - that is POSIX's place
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
        tensor = request.inputs[0]
        if "shared_memory_region" in tensor.parameters:
            array = region(tensor.parameters["shared_memory_region"].string_param)
        else:
            array = np.frombuffer(request.raw_input_contents[0], np.uint8)
        response = pb.ModelInferResponse(model_name=request.model_name, model_version="1")
        response.outputs.add(name="y", datatype="UINT8", shape=array.shape)
        response.raw_output_contents.append(array.tobytes())
        return response


@cache
def region(name: str) -> np.ndarray:
    """The object in shared memory as a mapping: a client that shortens it ends this process."""
    with (SHM / name).open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


def serve_bare(port: int) -> None:
    server = grpc.server(ThreadPoolExecutor(32), options=OPTIONS)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(BareServicer(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


def serve_bare_http(port: int) -> None:
    import uvicorn  # noqa: PLC0415 - of this server alone
    from starlette.applications import Starlette  # noqa: PLC0415 - likewise
    from starlette.requests import Request  # noqa: PLC0415, TC002 - likewise
    from starlette.responses import Response  # noqa: PLC0415 - likewise
    from starlette.routing import Route  # noqa: PLC0415 - likewise

    async def infer(request: Request) -> Response:
        body = await request.body()
        length = int(request.headers["inference-header-content-length"])
        given = json.loads(body[:length])["inputs"][0]
        array = np.frombuffer(body, np.uint8, offset=length)
        size = {"binary_data_size": array.nbytes}
        output = {"name": "y", "datatype": "UINT8", "shape": given["shape"], "parameters": size}
        text = json.dumps({"model_name": "identity", "outputs": [output]}).encode()
        headers = {"inference-header-content-length": str(len(text))}
        return Response(text + array.tobytes(), headers=headers)

    app = Starlette(routes=[Route("/v2/models/identity/infer", infer, methods=["POST"])])
    uvicorn.run(app, port=port, log_level="error", http="httptools", loop="uvloop")


@dataclass(frozen=True)
class HttpRequest:
    """A request over HTTP with one binary tensor."""

    model: str
    length: int
    body: bytes


def http_request(model: str, name: str, array: np.ndarray) -> HttpRequest:
    kind = {np.dtype(np.uint8): "UINT8", np.dtype(np.float32): "FP32"}[array.dtype]
    size = {"binary_data_size": array.nbytes}
    given = {"name": name, "datatype": kind, "shape": array.shape, "parameters": size}
    request = {"inputs": [given], "parameters": {"binary_data_output": True}}
    text = json.dumps(request).encode()
    return HttpRequest(model, len(text), text + array.tobytes())


def ask_http(port: int, request: HttpRequest, seconds: float) -> list[float]:
    """One client, see `ask`."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Inference-Header-Content-Length": str(request.length)}

    def call() -> None:
        connection.request("POST", f"/v2/models/{request.model}/infer", request.body, headers)
        response = connection.getresponse()
        received = response.read()
        assert response.status == 200, received

    call()
    latencies = []
    end = time.monotonic() + seconds
    while (begun := time.monotonic()) < end:
        call()
        latencies.append(time.monotonic() - begun)
    connection.close()
    return latencies


def request_bytes(model: str, **inputs: np.ndarray) -> bytes:
    request = pb.ModelInferRequest(model_name=model)
    types = {np.dtype(np.uint8): "UINT8", np.dtype(np.float32): "FP32"}
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype=types[array.dtype], shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request.SerializeToString()


def region_request(model: str, name: str, key: str, size_bytes: int) -> bytes:
    request = pb.ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name=name, datatype="UINT8", shape=[size_bytes])
    tensor.parameters["shared_memory_region"].string_param = key
    tensor.parameters["shared_memory_byte_size"].int64_param = size_bytes
    return request.SerializeToString()


@contextmanager
def registered(port: int, array: np.ndarray) -> Iterator[str]:
    """Register an object in shared memory with `array` as a region of the same name, its key."""
    key = f"edge-benchmark-{os.getpid()}"
    (SHM / key).write_bytes(array.tobytes())
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).SystemSharedMemoryRegister(
                pb.SystemSharedMemoryRegisterRequest(name=key, key=key, byte_size=array.nbytes),
                wait_for_ready=True,
            )
        yield key
    finally:
        (SHM / key).unlink()


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
    server: subprocess.Popen[bytes], port: int, data: bytes | HttpRequest, clients: int, s: float
) -> Load:
    client = ask_http if isinstance(data, HttpRequest) else ask
    with get_context("spawn").Pool(clients) as pool:
        pool.starmap(client, [(port, data, 0.2)] * clients)
        cpu_before = cpu_s(server.pid)
        latencies = [*chain.from_iterable(pool.starmap(client, [(port, data, s)] * clients))]
        cpu = cpu_s(server.pid) - cpu_before
    p50, p99 = np.percentile(latencies, (50, 99)) * 1e3
    return Load(len(latencies) / s, p50, p99, 1e3 * cpu / len(latencies))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_for(port: int) -> None:
    """Return once somebody listens there, 30 s later at most."""
    end = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            return


def median(loads: list[Load], figure: str) -> float:
    return statistics.median(getattr(load, figure) for load in loads)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="WORK", help="works that start with this")
    parser.add_argument("--serve-bare", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--serve-bare-http", type=int, metavar="PORT", help=argparse.SUPPRESS)
    add_option(parser)
    arguments = parser.parse_args()
    if arguments.serve_bare:
        serve_bare(arguments.serve_bare)
        return 0
    if arguments.serve_bare_http:
        serve_bare_http(arguments.serve_bare_http)
        return 0

    small, large = np.zeros(1024, np.uint8), np.zeros(2_764_800, np.uint8)
    frame = np.zeros((1, 720, 1280, 3), np.uint8)
    network = np.zeros((1, 3, 360, 640), np.float32)
    works: dict[str, bytes | HttpRequest] = {
        "identity 1 kB": request_bytes("identity", x=small),
        "identity 1 kB HTTP": http_request("identity", "x", small),
        "identity 2.76 MB": request_bytes("identity", x=large),
        "identity 2.76 MB HTTP": http_request("identity", "x", large),
        "lane network": request_bytes("laneDetect_model", input=network),
        "lane ensemble": request_bytes("lane_detection", image=frame),
        "lane ensemble HTTP": http_request("lane_detection", "image", frame),
    }
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(shutil.copytree(MODELS, f"{folder}/models"))
        (repository / "identity" / "1").mkdir(parents=True)
        (repository / "identity" / "config.pbtxt").write_text(IDENTITY.format())
        ports = {name: free_port() for name in ("ours", "ours HTTP", "bare", "bare HTTP")}
        run = [sys.executable, "-m", "edge_server", "run", "--metrics-port=0"]
        run += [f"--grpc-port={ports['ours']}", f"--http-port={ports['ours HTTP']}"]
        run += ["--model-repository", str(repository), "--allow-client-shm=true"]
        bare = [sys.executable, __file__]
        servers = {
            "ours": subprocess.Popen(run, stderr=-3),
            "bare": subprocess.Popen([*bare, f"--serve-bare={ports['bare']}"]),
            "bare HTTP": subprocess.Popen([*bare, f"--serve-bare-http={ports['bare HTTP']}"]),
        }
        for port in ports.values():
            wait_for(port)
        try:
            with registered(ports["ours"], large) as key:
                works["identity 2.76 MB shm"] = region_request("identity", "x", key, large.nbytes)
                report(works, {**servers, "ours HTTP": servers["ours"]}, ports, arguments)
        finally:
            for server in servers.values():
                server.terminate()
                server.wait()
    return 0


def report(
    works: dict[str, bytes | HttpRequest],
    servers: dict[str, subprocess.Popen[bytes]],
    ports: dict[str, int],
    arguments: argparse.Namespace,
) -> None:
    print(f"{'':22}{'clients':>8}{'req/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'CPU ms':>9}", end="")
    print(f"{'x req/s':>9}{'x CPU':>9}")
    found = {}
    for work, data in works.items():
        if not work.startswith(arguments.only):
            continue
        over = " HTTP" if isinstance(data, HttpRequest) else ""
        asked = ("ours", "bare") if work.startswith("identity") else ("ours",)
        for clients in arguments.clients:
            loads: dict[str, list[Load]] = {name: [] for name in asked}
            for _ in range(arguments.rounds):
                for name in asked:
                    server, port = servers[name + over], ports[name + over]
                    load = measure(server, port, data, clients, arguments.seconds)
                    loads[name].append(load)
            ours = loads["ours"]
            values = {each.name: median(ours, each.name) for each in fields(Load)}
            row = f"{work:22}{clients:8}{values['per_s']:9.0f}{values['p50_ms']:9.2f}"
            row += f"{values['p99_ms']:9.2f}{values['server_cpu_ms']:9.2f}"
            if "bare" in loads:
                pairs = list(zip(ours, loads["bare"], strict=True))
                speed = statistics.median(a.per_s / b.per_s for a, b in pairs)
                cpu = statistics.median(a.server_cpu_ms / b.server_cpu_ms for a, b in pairs)
                row += f"{speed:9.2f}{cpu:9.2f}"
                values |= {"times per_s": speed, "times cpu": cpu}
            print(row, flush=True)
            found |= {f"{work} {clients} {key}": value for key, value in values.items()}
    record(arguments.record, found)


if __name__ == "__main__":
    sys.exit(main())
