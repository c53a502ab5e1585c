"""Malformed messages by the million and attacks by the hundred: what they do to lanes and callers.

    python benchmarks/hostile.py [--messages 1000000] [--attacks 300] [--seed 1]

One daemon with two rendered cameras at 10 frames a second serves gRPC, HTTP, its page and a broker.
First come malformed messages over gRPC (a third), HTTP (a third), MQTT (a quarter) and WebSocket:
valid ones that were cut, mixed and overwritten. Then each attack of `ATTACKS` in turn, until there
were so many, and each for ten seconds at least: a percentile of fewer lanes is their maximum. The
MQTT broker is part of the attack: a program of a hundred lines, not a real one.

Throughout, a process apart reads the lanes over the Unix socket, and asks there whether the server
is live. Printed are the ends of the daemon, its memory above rest, the age of lanes when they
arrive, the slowest answer, and how many cores the daemon and the clients used. The exit code is 1
where the daemon ended, took more than a GB, let the age's 99th percentile reach 300 ms or answered
later than within a second; also in a baseline, where the machine is too busy for a verdict.

JSON that is malformed is answered 500, which is Triton's status for it. An error that the daemon
did not foresee has a traceback in its log, and the exit code is 1 then, too.

Hostile clients are other machines and have their own processors. Here they share the daemon's, so
they run at the lowest priority (`--nice 0` takes that from them). Before them come two baselines:
no clients at all, and clients that compute on every core at the same priority and never connect.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import os
import random
import resource
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import Process, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from record import add_option, record
from tritonclient.grpc import service_pb2 as pb

from edge_server.proto.edge.lanes.v1 import lane_service_pb2 as lanes_pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.synchronize import Event

MIB = 1024 * 1024
MOST_MORE_BYTES = 10**9
MOST_AGE_MS = 300
MOST_ANSWER_S = 1.0
TIMEOUT_S = 20.0
LARGE_BYTES = 60 * MIB
# What an attack leaves behind may show when it is over.
AFTERWARDS_S = 3
TRITON = "/inference.GRPCInferenceService/"
LANES = "/edge.lanes.v1.LaneService/StreamLanes"
DEVICE = "edge/v1/hostile"
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
LEAST_S = 10
# A packet whose framing is wrong ends the connection: one in so many.
BAD_FRAME_EVERY = 4000


def mutated(chance: random.Random, data: bytes) -> bytes:
    """Return `data` with one to four mistakes."""
    made = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        place = chance.randrange(len(made) + 1)
        kind = chance.randrange(5)
        if kind == 0:
            del made[place : place + chance.randrange(1, 20)]
        elif kind == 1:
            made[place:place] = chance.randbytes(chance.randrange(1, 8))
        elif kind == 2 and made:
            made[place % len(made)] = chance.randrange(256)
        elif kind == 3:
            made[place:place] = chance.choice((b"[[", b"}", b"null", b"1e999", b"\xff", b"\0" * 9))
        else:
            other = chance.randrange(len(made) + 1)
            made[place:place] = made[other : other + 30]
    return bytes(made)


class Broker:
    """What the daemon takes for its MQTT broker; `packets` are sent on every connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connack = b"\x20\x03\0\0\0"
        self.connections = self.sent = 0
        self._packets: Iterator[bytes] = iter(())
        threading.Thread(target=self._accept, daemon=True).start()

    def send_all(self, packets: Iterator[bytes], timeout_s: float) -> int:
        """Send them, on as many connections as it takes; return how many were sent."""
        before, self._packets = self.sent, packets
        end_s = time.monotonic() + timeout_s
        while self._packets is packets and time.monotonic() < end_s:
            time.sleep(0.05)
        return self.sent - before

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            self.connections += 1
            with connection, suppress(OSError):
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(0.5)
        reader = threading.Thread(target=self._answer, args=(connection,), daemon=True)
        reader.start()
        time.sleep(0.05)
        while reader.is_alive():
            packet = next(self._packets, None)
            if packet is None:
                self._packets = iter(())
                time.sleep(0.05)
                continue
            self.sent += 1
            while packet:
                try:
                    packet = packet[connection.send(packet) :]
                except TimeoutError:
                    if not reader.is_alive():
                        return

    def _answer(self, connection: socket.socket) -> None:
        """Accept the connection, subscriptions and QoS 1, until the daemon closes it."""
        data = b""
        with suppress(OSError):
            while True:
                try:
                    part = connection.recv(65536)
                except TimeoutError:
                    continue
                if not part:
                    return
                data += part
                while (packet := _packet(data)) is not None:
                    head, body, data = packet
                    if head >> 4 == 1:
                        connection.sendall(self.connack)
                    elif head >> 4 == 8:
                        connection.sendall(b"\x90\x04" + body[:2] + b"\0\0")
                    elif head >> 4 == 12:
                        connection.sendall(b"\xd0\0")
                    elif head & 6 == 2 and head >> 4 == 3:
                        at = 2 + int.from_bytes(body[:2], "big")
                        connection.sendall(b"\x40\x02" + body[at : at + 2])


def _packet(data: bytes) -> tuple[int, bytes, bytes] | None:
    """Split off the first MQTT packet: its first byte, its body, the rest; None if incomplete."""
    length = shift = 0
    for place, byte in enumerate(data[1:5], 1):
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 128:
            end = place + 1 + length
            return None if len(data) < end else (data[0], data[place + 1 : end], data[end:])
    return None


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def publication(topic: bytes, payload: bytes, flags: int = 0) -> bytes:
    """A PUBLISH of MQTT 5 without properties; `flags` are retain (1) and QoS (2 or 4)."""
    body = struct.pack(">H", len(topic)) + topic + (b"\0\1" if flags & 6 else b"") + b"\0" + payload
    return bytes([0x30 | flags]) + varint(len(body)) + body


class Target:
    """The daemon, its addresses, and the broker that it is connected to."""

    def __init__(self, folder: Path) -> None:
        self.broker = Broker()
        self.socket = folder / "grpc.sock"
        models = folder / "models"
        for datatype in ("FP32", "UINT8", "STRING"):
            (models / datatype / "1").mkdir(parents=True)
            (models / datatype / "config.pbtxt").write_text(
                f'backend: "identity" input {{ name: "x" data_type: TYPE_{datatype} dims: -1 }} '
                f'output {{ name: "y" data_type: TYPE_{datatype} dims: -1 }}'
            )
        self.grpc_port, self.http_port, self.metrics_port = _free_ports(3)
        self.log = folder / "log"
        shipped = Path(__file__).parent.parent / "models"
        settings = folder / "config.toml"
        settings.write_text(
            f"""
[device]
id = "hostile"
[repository]
paths = [{str(models)!r}, {str(shipped)!r}]
mode = "explicit"
load = ["*"]
[grpc]
port = {self.grpc_port}
socket = {str(self.socket)!r}
[http]
port = {self.http_port}
[metrics]
port = {self.metrics_port}
[mqtt]
host = "127.0.0.1"
port = {self.broker.port}
vehicle_state = true
[cameras.front]
uri = "synthetic://road?seed=1&fps=10"
[cameras.rear]
uri = "synthetic://road?seed=2&fps=10"
"""
        )
        with self.log.open("w") as log:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "edge_server", "run", "--config", str(settings)], stderr=log
            )
        self.target = f"unix:{self.socket}"
        self._wait_until_ready()

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}", OPTIONS)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.http_port), TIMEOUT_S)

    def post(self, path: str, body: bytes, *headers: str) -> bytes:
        """Return the first bytes of the answer; none where the connection was closed."""
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
        return self.raw("\r\n".join([*lines, *headers, "", ""]).encode() + body)

    def raw(self, request: bytes) -> bytes:
        with self.connect() as connection, suppress(OSError):
            connection.sendall(request)
            return connection.recv(4096)
        return b""

    def upgrade(self) -> socket.socket | None:
        """Open the page's WebSocket; None where it is refused."""
        key = base64.b64encode(os.urandom(16)).decode()
        connection = self.connect()
        connection.sendall(
            f"GET /page/live HTTP/1.1\r\nHost: localhost:{self.http_port}\r\n"
            f"Connection: Upgrade\r\nUpgrade: websocket\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n"
            f"Origin: http://localhost:{self.http_port}\r\n\r\n".encode()
        )
        with suppress(OSError):
            if connection.recv(4096).startswith(b"HTTP/1.1 101"):
                return connection
        connection.close()
        return None

    def _wait_until_ready(self) -> None:
        end_s = time.monotonic() + 60
        with grpc.insecure_channel(self.target, OPTIONS) as channel:
            ready = channel.unary_unary(TRITON + "ServerReady")
            while time.monotonic() < end_s:
                with suppress(grpc.RpcError):
                    if ready(b"", timeout=1) == b"\x08\x01":
                        return
                time.sleep(0.1)
        raise SystemExit(f"the daemon does not become ready:\n{self.log.read_text()}")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in made]


def watch(target: str, pid: int, hears: Event, done: Event, results: Any) -> None:
    """In a process apart: lanes' ages, answers on the socket, and the daemon's memory."""
    ages_ms: list[float] = []
    gaps_s: list[float] = []
    answers_s: list[float] = []
    failed: Counter[str] = Counter()
    resident = []

    def lanes() -> None:
        while not done.is_set():
            with suppress(grpc.RpcError), grpc.insecure_channel(target, OPTIONS) as channel:
                stream = channel.stream_stream(
                    LANES, response_deserializer=lanes_pb.StreamLanesResponse.FromString
                )
                call = stream(iter([lanes_pb.StreamLanesRequest().SerializeToString()]))
                heard_at = time.monotonic()
                for response in call:
                    now = time.monotonic_ns()
                    ages_ms.append((now - response.frame.time.capture_mono_ns) / 1e6)
                    gaps_s.append(now / 1e9 - heard_at)
                    heard_at = now / 1e9
                    hears.set()
                    if done.is_set():
                        break
                call.cancel()

    def live() -> None:
        with grpc.insecure_channel(target, OPTIONS) as channel:
            ask = channel.unary_unary(TRITON + "ServerLive")
            while not done.wait(0.05):
                asked_at = time.monotonic()
                try:
                    ask(b"", timeout=TIMEOUT_S)
                except grpc.RpcError as error:
                    failed[str(error.code())] += 1
                answers_s.append(time.monotonic() - asked_at)

    threads = [threading.Thread(target=each, daemon=True) for each in (lanes, live)]
    for thread in threads:
        thread.start()
    while not done.wait(0.05):
        with suppress(OSError):
            statm = Path(f"/proc/{pid}/statm").read_text()
            resident.append(int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    for thread in threads:
        thread.join(3)
    results.send((ages_ms, gaps_s, answers_s, dict(failed), resident))


def malformed_grpc(target: Target, chance: random.Random, count: int) -> Counter[str]:
    seeds = [
        ("ModelInfer", _request("FP32", [3], bytes(12))),
        ("ModelInfer", _request("STRING", [2], b"\1\0\0\0a" * 2)),
        ("ModelInfer", _request("UINT8", [5], b"hello")),
        ("ModelStatistics", pb.ModelStatisticsRequest(name="FP32").SerializeToString()),
        ("RepositoryIndex", pb.RepositoryIndexRequest(ready=True).SerializeToString()),
        ("ModelConfig", pb.ModelConfigRequest(name="UINT8", version="1").SerializeToString()),
        ("LogSettings", b""),
        ("SystemSharedMemoryStatus", b"\n\1r"),
    ]
    codes: Counter[str] = Counter()
    room = threading.Semaphore(32)

    def note(call: Any) -> None:
        codes[call.code().name] += 1
        room.release()

    with target.channel() as channel:
        calls = {name: channel.unary_unary(TRITON + name) for name, _ in seeds}
        for _ in range(count):
            name, seed = chance.choices(seeds, (6, 3, 6, 1, 1, 1, 1, 1))[0]
            room.acquire()
            calls[name].future(mutated(chance, seed), timeout=TIMEOUT_S).add_done_callback(note)
        for _ in range(32):
            room.acquire()
    return codes


def malformed_http(target: Target, chance: random.Random, count: int) -> Counter[str]:
    tensor = {"name": "x", "shape": [3], "datatype": "FP32", "data": [1, 2, 3]}
    body = json.dumps({"id": "1", "inputs": [tensor], "outputs": [{"name": "y"}]}).encode()
    paths = ("/v2/models/FP32/infer",) * 5
    paths += ("/v2/models/UINT8/infer", "/v2/repository/index", "/v2", "/page/token", "/metrics")

    def request() -> tuple[bytes, bool]:
        """Return a request, and whether its head is whole: then the server reads all of it."""
        data = mutated(chance, body) if chance.random() < 0.8 else body
        head = (
            f"POST {chance.choice(paths)} HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        ).encode()
        is_whole = chance.random() < 0.6
        return (head if is_whole else mutated(chance, head)) + data, is_whole

    def send(requests: list[tuple[bytes, bool]]) -> Counter[str]:
        codes: Counter[str] = Counter()
        for each, is_whole in requests:
            with target.connect() as connection, suppress(OSError):
                connection.sendall(each)
                if not is_whole:  # the server would wait for the rest, and so would this client
                    connection.shutdown(socket.SHUT_WR)
                said = connection.recv(65536)
                codes[said[9:12].decode("latin-1") or "closed"] += 1
        return codes

    codes: Counter[str] = Counter()
    with ThreadPoolExecutor(8) as pool:
        for begin in range(0, count, 8000):
            many = min(8000, count - begin)
            parts = [[request() for _ in range(many // 8)] for _ in range(8)]
            for each in pool.map(send, parts):
                codes += each
    return codes


def malformed_web_socket(target: Target, chance: random.Random, count: int) -> Counter[str]:
    look = json.dumps({"look_at": {"front": "small"}}).encode()
    codes: Counter[str] = Counter()
    while codes.total() < count:
        connection = target.upgrade()
        if connection is None:
            codes["refused"] += 1
            continue
        with connection, suppress(OSError):
            for _ in range(50):
                data = mutated(chance, look)[:125]
                kind = 0x81 if chance.random() < 0.9 else chance.randrange(256)
                mask = chance.randbytes(4)
                masked = bytes(byte ^ mask[place % 4] for place, byte in enumerate(data))
                length = len(data) if chance.random() < 0.97 else chance.randrange(128)
                connection.sendall(bytes([kind, 0x80 | length]) + mask + masked)
                codes["sent"] += 1
    return codes


def malformed_mqtt(target: Target, chance: random.Random, count: int) -> Counter[str]:
    speed = json.dumps({"speed_mps": 12.5, "indicator": "left", "valid_ms": 500}).encode()
    topics = [f"{DEVICE}/{each}".encode() for each in ("vehicle", "status", "meta", "acknowledged")]

    def packets() -> Iterator[bytes]:
        for number in range(count):
            topic = chance.choice(topics)
            if chance.random() < 0.1:
                topic = mutated(chance, topic)
            packet = publication(topic, mutated(chance, speed), chance.randrange(2))
            yield mutated(chance, packet) if number % BAD_FRAME_EVERY == 0 else packet

    return Counter(sent=target.broker.send_all(packets(), timeout_s=3600))


def _request(datatype: str, shape: list[int], raw: bytes) -> bytes:
    request = pb.ModelInferRequest(model_name=datatype, raw_input_contents=[raw])
    name = "BYTES" if datatype == "STRING" else datatype
    request.inputs.add(name="x", datatype=name, shape=shape)
    data: bytes = request.SerializeToString()
    return data


def no_clients(_: Target) -> None:
    time.sleep(LEAST_S)


def clients_that_compute(_: Target) -> None:
    """As many processes as cores, which never connect."""
    until_s = time.monotonic() + LEAST_S
    processes = [Process(target=_compute, args=(until_s,)) for _ in range(os.cpu_count() or 1)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()


def _compute(until_s: float) -> None:
    while time.monotonic() < until_s:
        pass


def foreign_page_posts(target: Target) -> None:
    for path in ("/v2/logging", "/v2/trace/setting", "/v2/repository/models/UINT8/unload"):
        said = target.post(path, b"{}", "Content-Type: text/plain", "Origin: http://evil.example")
        assert said.startswith(b"HTTP/1.1 403"), said


def rebound_name(target: Target) -> None:
    for path in ("/v2", "/metrics", "/"):
        said = target.raw(f"GET {path} HTTP/1.1\r\nHost: evil.example\r\n\r\n".encode())
        assert said.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400", b"HTTP/1.1 421")), said


def tiny_frames(target: Target) -> None:
    def flood(_: int) -> None:
        connection = target.upgrade()
        if connection is not None:
            with connection, suppress(OSError):
                connection.settimeout(5)
                for _ in range(40):
                    connection.sendall(b"\x81\x81\0\0\0\0x" * 9000)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(flood, range(6)))


def pipelined_gets(target: Target) -> None:
    def flood(_: int) -> None:
        with target.connect() as connection, suppress(OSError):
            connection.settimeout(5)
            connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(flood, range(50)))


def long_headers(target: Target) -> None:
    head = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n"
    for shape in (
        b"a: " + b"x" * 57_000,
        b"a: b\r\n" * 9_000,
        b", " * 28_000,
        b"cookie: " + b"a=b;" * 14_000,
    ):
        target.raw(head + shape + b"\r\n\r\n")


def load_parameters(target: Target) -> None:
    entry = b'\x1a\x12\n\x06file:a\x12\x08"\x06abcdef'
    with target.channel() as channel:
        load = channel.unary_unary(TRITON + "RepositoryModelLoad")
        with suppress(grpc.RpcError):
            load(b"\x12\1m" + entry * (LARGE_BYTES // len(entry)), timeout=TIMEOUT_S)


def index_bodies(target: Target) -> None:
    body = b"{" + b'"a":1,' * (4 * MIB // 6) + b'"b":1}'
    with ThreadPoolExecutor(45) as pool:
        list(pool.map(lambda _: target.post("/v2/repository/index", body), range(45)))


def long_json(target: Target) -> None:
    """Requests of JSON alone, as long as is read: parsing them lets no other thread run."""
    many = (4 * MIB - 200) // 2
    tensor = b'{"inputs": [{"name": "x", "shape": [%d], "datatype": "UINT8", "data": [' % many
    body = tensor + b",".join([b"1"] * many) + b"]}]}"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: target.post("/v2/models/UINT8/infer", body), range(8)))


def json_output(target: Target) -> None:
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "x",
                    "shape": [LARGE_BYTES],
                    "datatype": "UINT8",
                    "parameters": {"binary_data_size": LARGE_BYTES},
                }
            ],
            "outputs": [{"name": "y"}],
        }
    ).encode()
    length = f"Inference-Header-Content-Length: {len(head)}"
    target.post("/v2/models/UINT8/infer", head + bytes(LARGE_BYTES), length)


def compressed_requests(target: Target) -> None:
    request = _request("UINT8", [LARGE_BYTES], bytes(LARGE_BYTES))

    def send(_: int) -> None:
        with target.channel() as channel, suppress(grpc.RpcError):
            infer = channel.unary_unary(TRITON + "ModelInfer")
            infer(request, timeout=TIMEOUT_S, compression=grpc.Compression.Gzip)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(send, range(12)))
    target.post(
        "/v2/models/UINT8/infer", gzip.compress(bytes(LARGE_BYTES)), "Content-Encoding: gzip"
    )


def unread_responses(target: Target) -> None:
    """Responses of 60 kB to a client whose HTTP/2 window is 0."""
    request = _request("UINT8", [60_000], bytes(60_000))
    message = b"\0" + struct.pack(">I", len(request)) + request
    names = {
        ":method": "POST",
        ":scheme": "http",
        ":path": TRITON + "ModelInfer",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(
        b"\0" + bytes([len(n)]) + n.encode() + bytes([len(v)]) + v.encode()
        for n, v in names.items()
    )
    call = b""
    for number in range(1, 3, 2):
        call += _frame(1, 4, number, block)
        for begin in range(0, len(message), 16384):
            part = message[begin : begin + 16384]
            call += _frame(0, begin + 16384 >= len(message), number, part)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, struct.pack(">HI", 4, 0))
    with ExitStack() as stack:
        for _ in range(60):
            connection = socket.create_connection(("127.0.0.1", target.grpc_port), TIMEOUT_S)
            stack.enter_context(connection)
            with suppress(OSError):
                connection.sendall(preface + call)
        time.sleep(2)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def retained_wildcard(target: Target) -> None:
    topics = (b"a/+/b", f"{DEVICE}/models/+/state".encode(), b"#", b"\0", b"$SYS/x", b"")
    target.broker.send_all(iter([publication(each, b"x", 1) for each in topics]), 5)


def packets_too_large(target: Target) -> None:
    topic = f"{DEVICE}/vehicle".encode()
    target.broker.send_all(iter([publication(topic, bytes(200 * MIB))]), 15)


def unreleased_qos_2(target: Target) -> None:
    topic = f"{DEVICE}/vehicle".encode()

    def packets() -> Iterator[bytes]:
        for number in range(20_000):
            body = struct.pack(">H", len(topic)) + topic
            body += struct.pack(">H", number % 65535 + 1) + b"\0" + bytes(30_000)
            yield b"\x34" + varint(len(body)) + body

    target.broker.send_all(packets(), 10)


def receive_maximum_0(target: Target) -> None:
    before, target.broker.connack = target.broker.connack, b"\x20\x06\0\0\x03\x21\0\0"
    target.broker.send_all(iter([b"\xff\xff\xff\xff\xff"]), 5)
    time.sleep(1)
    target.broker.connack = before


BASELINES: tuple[Callable[[Target], None], ...] = (no_clients, clients_that_compute)
ATTACKS: tuple[Callable[[Target], None], ...] = (
    foreign_page_posts,
    rebound_name,
    tiny_frames,
    pipelined_gets,
    long_headers,
    load_parameters,
    index_bodies,
    long_json,
    json_output,
    compressed_requests,
    unread_responses,
    retained_wildcard,
    packets_too_large,
    unreleased_qos_2,
    receive_maximum_0,
)


class Watched:
    """Watches the daemon while the block runs, and prints a line of it."""

    def __init__(self, target: Target, name: str, rest_bytes: int) -> None:
        self._target, self._name, self._rest = target, name, rest_bytes
        self.failed: list[str] = []
        self.values: dict[str, float] = {}

    def __enter__(self) -> Watched:
        context = get_context("spawn")
        hears, self._done = context.Event(), context.Event()
        self._receiver, sender = context.Pipe()
        daemon = self._target.daemon.pid
        self._process = context.Process(
            target=watch, args=(self._target.target, daemon, hears, self._done, sender)
        )
        self._process.start()
        hears.wait(TIMEOUT_S)
        self._begin = time.monotonic(), _cpu_s(), _cpu_s_of(self._target.daemon.pid)
        return self

    def __exit__(self, *_: object) -> None:
        end = time.monotonic(), _cpu_s(), _cpu_s_of(self._target.daemon.pid)
        took_s, clients_s, daemon_s = (b - a for a, b in zip(self._begin, end, strict=True))
        time.sleep(AFTERWARDS_S)
        self._done.set()
        ages_ms, gaps_s, answers_s, failed, resident = self._receiver.recv()
        self._process.join()
        ended = self._target.daemon.poll()
        more = max(resident, default=0) - self._rest
        p99 = statistics.quantiles(ages_ms, n=100)[98] if len(ages_ms) > 1 else float("nan")
        slowest = max(answers_s, default=float("nan"))
        p50 = statistics.median(ages_ms or [0])
        print(
            f"{self._name:<22} {len(ages_ms):6} lanes  age p50 {p50:4.0f} p99 {p99:4.0f} ms  "
            f"gap {max(gaps_s, default=0):5.2f} s  answer {slowest:5.2f} s  "
            f"memory +{more / MIB:5.0f} MiB  "
            f"cores {daemon_s / took_s:4.2f} + {clients_s / took_s:4.2f}  {failed or ''}",
            flush=True,
        )
        self.values = {
            f"{self._name} age p50 ms": p50,
            f"{self._name} age p99 ms": p99,
            f"{self._name} answer s": slowest,
            f"{self._name} more MiB": more / MIB,
        }
        if ended is not None:
            self.failed.append(f"{self._name}: the daemon ended with {ended}")
        if not p99 < MOST_AGE_MS:
            self.failed.append(f"{self._name}: lanes were {p99:.0f} ms old")
        if not slowest < MOST_ANSWER_S or failed:
            self.failed.append(f"{self._name}: answered after {slowest:.2f} s, {failed}")
        if more > MOST_MORE_BYTES:
            self.failed.append(f"{self._name}: took {more / MIB:.0f} MiB more")


def _cpu_s() -> float:
    """Processor time of this process, whose threads are the clients, and of its children."""
    return sum(
        sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def _cpu_s_of(pid: int) -> float:
    """Processor time of another process; 0 once it has ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def at_priority(nice: int, work: Callable[[], Any]) -> Any:
    """Return what `work` returns, on a thread of that niceness; those that it starts inherit it."""

    def lower() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)

    with ThreadPoolExecutor(1, initializer=lower) as pool:
        return pool.submit(work).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--attacks", type=int, default=300)
    parser.add_argument(
        "--only", nargs="*", default=[""], help="campaigns or attacks whose names begin so"
    )
    parser.add_argument("--nice", type=int, default=19, help="of the clients")
    parser.add_argument("--seed", type=int, default=1)
    add_option(parser)
    arguments = parser.parse_args()
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        target = Target(Path(folder))
        try:
            failed = campaigns(target, arguments)
        finally:
            target.daemon.terminate()
            code = target.daemon.wait(30)
            log = target.log.read_text()
        # What the MQTT library cannot read ends the connection, with the library's own traceback.
        unread = log.count("the connection is ended by an error")
        print(f"{unread} MQTT connections ended by what their broker sent")
        if log.count("Traceback") > unread:
            failed.append("the log has a traceback:\n" + log[log.rindex("Traceback") :][:2000])
        if code:
            failed.append(f"the daemon ended with {code}:\n{log[-2000:]}")
    for each in failed:
        print(f"FAILED {each}")
    sys.exit(bool(failed))


def campaigns(target: Target, arguments: argparse.Namespace) -> list[str]:
    """Run what was asked for; return what went wrong."""
    time.sleep(3)
    statm = Path(f"/proc/{target.daemon.pid}/statm").read_text()
    rest = int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    print(f"at rest {rest / MIB:.0f} MiB")
    failed: list[str] = []
    found: dict[str, float] = {}
    only = tuple(arguments.only)
    for baseline in BASELINES:
        with Watched(target, baseline.__name__, rest) as watched:
            at_priority(arguments.nice, partial(baseline, target))
        failed += watched.failed
        found |= watched.values
    shares = {
        malformed_grpc: 1 / 3,
        malformed_http: 1 / 3,
        malformed_mqtt: 1 / 4,
        malformed_web_socket: 1 / 12,
    }
    for malformed, share in shares.items():
        count = round(arguments.messages * share)
        if not count or not malformed.__name__.startswith(only):
            continue
        chance = random.Random(arguments.seed)  # noqa: S311 - the same messages each time
        with Watched(target, malformed.__name__, rest) as watched:
            codes = at_priority(arguments.nice, partial(malformed, target, chance, count))
        print(f"    {codes.total()}: {dict(codes.most_common(8))}", flush=True)
        failed += watched.failed
        found |= watched.values
    attacks = [each for each in ATTACKS if each.__name__.startswith(only)]
    for place, attack in enumerate(attacks):
        rounds = arguments.attacks * (place + 1) // len(attacks) - arguments.attacks * place // len(
            attacks
        )
        if not rounds:
            continue
        with Watched(target, attack.__name__, rest) as watched:
            least_until_s = time.monotonic() + LEAST_S
            while rounds > 0 or time.monotonic() < least_until_s:
                at_priority(arguments.nice, partial(attack, target))
                rounds -= 1
        failed += watched.failed
        found |= watched.values
    record(arguments.record, found)
    return failed


if __name__ == "__main__":
    main()
