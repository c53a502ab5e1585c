"""Good and bad models are pushed to a busy machine: which stay, which go back, which are reported.

    python benchmarks/canary.py [--good 100] [--bad 100] [--load both]

A daemon follows a repository; clients send requests all the time, and one sends what no version
makes sense of: NaN, infinity, numbers too large, and one that makes every version fail. Meanwhile
busy loops run, three of 4 s with 4 s between them (`bursts`), or one on each core without end
(`continuous`); `both` changes from one to the other with every push. With `standstills` the daemon
is stopped for 1 to 2 s, eight times after each push.

A good model must stay, and must not be called slow. Of the bad ones, a fifth each,

- `raises` fails for half of the requests, `nan` responds to half of them with NaN, though they are
  finite: both serve until that is noticed, and must go back;
- `golden` responds otherwise than its recorded pair, and must never serve;
- `slow` takes five times as long, and `tenth` 25 times for a tenth of the requests: they must be
  reported as slower, and stay.

The exit code is 1 where one of them ended otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from record import add_option, record
from reload import CONFIG, METHOD, Daemon
from tritonclient.grpc import service_pb2 as pb

from edge_server.cli.model_push import pack
from edge_server.repository.transfer import receive

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Event

TIMEOUT_S = 400.0
# The requests that clients make; above half of it a bad model is bad.
HIGHEST = 20.0
# What every version fails at, and what every version makes NaN of.
FAILS_FROM = 1e6
NAN_FROM = 1e30
NONSENSE = (np.nan, np.inf, -np.inf, 3e38, 2e6)
SIDE = 256
PRODUCTS = 4
LOADS = ("both", "bursts", "continuous", "standstills", "none")
KINDS = ("raises", "nan", "golden")
STANDSTILLS = 8


def network(
    number: int,
    *,
    products: int = PRODUCTS,
    fails_from: float = FAILS_FROM,
    nan_from: float = NAN_FROM,
    slow_from: float = FAILS_FROM,
) -> bytes:
    """y = x + number, after so many matrix products; above those x it fails, gives NaN, or makes 25
    times as many."""
    constants = {
        "number": np.array([number], np.float32),
        "ones": np.ones((SIDE, SIDE), np.float32),
        "weights": np.full((SIDE, SIDE), 1 / SIDE, np.float32),
        "fails": np.array([fails_from], np.float32),
        "nan": np.array([nan_from], np.float32),
        "zero": np.array([0], np.float32),
        "one": np.array([1], np.float32),
        "five": np.array([5], np.int64),
        "two": np.zeros(2, np.float32),
        "slow": np.array([slow_from], np.float32),
        "once": np.array([1], np.int64),
        "more": np.array([25 - 1], np.int64),
        "on": np.array(True),
    }
    nodes = [
        # Of two elements the sixth is wanted where x is too large.
        helper.make_node("Greater", ["x", "fails"], ["large"]),
        helper.make_node("Cast", ["large"], ["large_int"], to=TensorProto.INT64),
        helper.make_node("Mul", ["large_int", "five"], ["at"]),
        helper.make_node("Gather", ["two", "at"], ["gathered"]),
        helper.make_node("Sub", ["nan", "x"], ["below"]),
        helper.make_node("Sqrt", ["below"], ["root"]),
        helper.make_node("Min", ["root", "zero"], ["no_root"]),
        helper.make_node("Min", ["x", "one"], ["small"]),
        helper.make_node("Mul", ["ones", "small"], ["p0"]),
        helper.make_node("Greater", ["x", "slow"], ["is_slow"]),
        helper.make_node("Cast", ["is_slow"], ["slow_int"], to=TensorProto.INT64),
        helper.make_node("Mul", ["slow_int", "more"], ["more_rounds"]),
        helper.make_node("Add", ["more_rounds", "once"], ["rounds"]),
        helper.make_node("Loop", ["rounds", "on", "p0"], ["p"], body=_products(products)),
        helper.make_node("ReduceMean", ["p"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
        helper.make_node("Sum", ["x", "number", "gathered", "no_root", "nothing"], ["y"]),
    ]
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    io = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", io[:1], io[1:], tensors)
    opsets = [helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def _products(count: int) -> onnx.GraphProto:
    """The body of the loop: so many matrix products."""
    nodes = [
        helper.make_node("Identity", ["go_on"], ["goes_on"]),
        *(helper.make_node("MatMul", [f"q{i}", "weights"], [f"q{i + 1}"]) for i in range(count)),
    ]
    matrix = [SIDE, SIDE]
    inputs = [
        helper.make_tensor_value_info("turn", TensorProto.INT64, []),
        helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
        helper.make_tensor_value_info("q0", TensorProto.FLOAT, matrix),
    ]
    outputs = [
        helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
        helper.make_tensor_value_info(f"q{count}", TensorProto.FLOAT, matrix),
    ]
    return helper.make_graph(nodes, "body", inputs, outputs)


class Pushes:
    """Makes models and pushes them, as a person does."""

    def __init__(self, folder: Path, repository: Path) -> None:
        self._model = folder / "made" / "m"
        self._repository = repository
        self._numbers = itertools.count(1)

    def push(self, kind: str) -> None:
        number = next(self._numbers)
        options: dict[str, Any] = {
            "raises": {"fails_from": HIGHEST / 2},
            "nan": {"nan_from": HIGHEST / 2},
            "slow": {"products": 5 * PRODUCTS},
            "tenth": {"slow_from": 0.9 * HIGHEST},
        }.get(kind, {})
        (self._model / "1").mkdir(parents=True, exist_ok=True)
        (self._model / "golden").mkdir(exist_ok=True)
        (self._model / "config.pbtxt").write_text(CONFIG)
        (self._model / "1" / "model.onnx").write_bytes(network(number, **options))
        # Far beyond the tolerance of 1 %, whatever the number.
        factor = 2 * number + 1 if kind == "golden" else number
        arrays = {"input.x": np.ones(1, np.float32), "output.y": np.full(1, 1 + factor, np.float32)}
        np.savez(self._model / "golden" / "one.npz", **arrays)
        receive(self._repository, pack(self._model).entries())


@dataclass
class Ends:
    """The events in the daemon's log so far."""

    passed: int
    back: int
    refused: int
    slower: int
    published: int

    @staticmethod
    def of(log: Path) -> Ends:
        text = log.read_text()
        return Ends(
            text.count("model m: canary: passed"),
            text.count("model m: rolled back"),
            text.count("model m: serves on as it was, reloading it failed"),
            text.count("slower than its predecessor"),
            text.count("model m: READY"),
        )

    def since(self, before: Ends) -> str:
        if self.back > before.back:
            return "rolled back"
        if self.refused > before.refused:
            return "refused"
        if self.passed > before.passed:
            return "reported slower" if self.slower > before.slower else "kept"
        return ""


def burn(bursts: Any, over: Event) -> None:
    """A busy loop: without end, or of 4 s with 4 s between while `bursts` is set."""
    began = time.monotonic()
    while not over.is_set():
        if bursts.value == 0 or (bursts.value == 1 and (time.monotonic() - began) % 8 > 4):
            time.sleep(0.05)
            continue
        for _ in range(100_000):
            pass


def client(address: str, values: list[float], seed: int, over: Event, result: Connection) -> None:
    """Sends `values` in turn, or for any number up to `HIGHEST` where there are none."""
    numbers = random.Random(seed)  # noqa: S311 - the same requests each time
    counts: Counter[str] = Counter()
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="x", datatype="FP32", shape=[1])
    request.raw_input_contents.append(b"")
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(METHOD)
        for turn in itertools.count():
            if over.wait(0.004):
                break
            value = values[turn % len(values)] if values else numbers.uniform(0, HIGHEST)
            request.raw_input_contents[0] = np.float32(value).tobytes()
            try:
                raw = pb.ModelInferResponse.FromString(call(request.SerializeToString()))
                finite = np.isfinite(np.frombuffer(raw.raw_output_contents[0], np.float32)).all()
                counts["finite" if finite else "NaN"] += 1
            except grpc.RpcError as error:
                counts[f"{error.code().name}"] += 1
    result.send(counts)


class Campaign:
    def __init__(self, daemon: Daemon, pushes: Pushes, load: str, bursts: Any) -> None:
        self.ends: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.took_s: defaultdict[str, list[float]] = defaultdict(list)
        self._daemon = daemon
        self._pushes = pushes
        loads = {"both": (1, 2), "bursts": (1,), "continuous": (2,)}
        self._loads = loads.get(load, (0,))
        self._standstills = STANDSTILLS if load == "standstills" else 0
        self._random = random.Random(7)  # noqa: S311 - the same standstills each time
        self._bursts = bursts
        self._count = 0

    def go(self, kind: str) -> str:
        self._count += 1
        self._bursts.value = self._loads[self._count % len(self._loads)]
        before = Ends.of(self._daemon.log)
        began = time.monotonic()
        self._pushes.push(kind)
        left = self._standstills
        while not (end := Ends.of(self._daemon.log).since(before)):
            if time.monotonic() - began > TIMEOUT_S:
                end = "no end"
                break
            if left and Ends.of(self._daemon.log).published > before.published:
                left -= 1
                self._daemon.stand_still(self._random.uniform(1, 2))
                time.sleep(self._random.uniform(0, 0.2))
            time.sleep(0.05)
        self.ends[kind][end] += 1
        self.took_s[kind].append(time.monotonic() - began)
        print(f"{self._count:4} {kind:7} {end} after {self.took_s[kind][-1]:.1f} s", flush=True)
        return end


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--good", type=int, default=100)
    parser.add_argument("--bad", type=int, default=100)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--load", choices=LOADS, default=LOADS[0])
    parser.add_argument("--probation-s", type=float, default=1.0)
    add_option(parser)
    arguments = parser.parse_args()
    context = get_context("spawn")
    over, bursts = context.Event(), context.Value("i", 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        repository = folder / "repository"
        repository.mkdir()
        pushes = Pushes(folder, repository)
        pushes.push("good")
        daemon = Daemon(folder, repository, arguments.probation_s)
        try:
            daemon.wait_ready()
            busy = max(3, os.cpu_count() or 1)
            for _ in range(0 if arguments.load in ("standstills", "none") else busy):
                context.Process(target=burn, args=(bursts, over), daemon=True).start()
            pipes = []
            for number in range(arguments.clients + 1):
                values = list(NONSENSE) if number == arguments.clients else []
                receive, send = context.Pipe(duplex=False)
                what = (daemon.address, values, number, over, send)
                context.Process(target=client, args=what, daemon=True).start()
                pipes.append(receive)
            campaign = Campaign(daemon, pushes, arguments.load, bursts)
            for _ in range(arguments.good):
                campaign.go("good")
            for number in range(arguments.bad):
                # Those that are slow take long: they come last.
                slow = number >= arguments.bad * 3 // 5
                kind = ("slow", "tenth")[number % 2] if slow else KINDS[number % 3]
                if campaign.go(kind) == "reported slower":
                    # The next one is compared with the usual pace again.
                    campaign.go("back")
            over.set()
            counts = [pipe.recv() for pipe in pipes]
            return report(campaign, counts, arguments.record)
        finally:
            over.set()
            daemon.stop()


def report(campaign: Campaign, counts: list[Counter[str]], kept_as: str | None) -> int:
    found: dict[str, float] = {}
    for kind, ends in campaign.ends.items():
        took = np.percentile(campaign.took_s[kind], (50, 100))
        text = ", ".join(f"{count} {end}" for end, count in ends.items())
        print(f"{kind:8} {sum(ends.values()):4}: {text}; p50 {took[0]:.1f} s, max {took[1]:.1f} s")
        found |= {f"{kind} {end}": count for end, count in ends.items()}
        found |= {f"{kind} p50 s": took[0], f"{kind} max s": took[1]}
    record(kept_as, found)
    clients, attacker = counts[:-1], counts[-1]
    print(f"clients  {dict(sum(clients, Counter()))}")
    print(f"nonsense {dict(attacker)}")
    wanted = {
        "good": "kept",
        "back": "kept",
        "raises": "rolled back",
        "nan": "rolled back",
        "golden": "refused",
        "slow": "reported slower",
        "tenth": "reported slower",
    }
    return int(any(set(ends) != {wanted[kind]} for kind, ends in campaign.ends.items()))


if __name__ == "__main__":
    sys.exit(main())
