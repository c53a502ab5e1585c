"""Hot reload under load: models are delivered, well and badly, while clients ask all the time.

    python benchmarks/reload.py [--reloads 1000] [--clients 2] [--quiet-s 5]

Every model adds its own number to what it is given, so an answer tells which model gave it. A
failed request is one that was refused or lost, or an answer of a model that never was complete.

Each delivery waits until the daemon has said what became of the one before, so that every good one
is a model of its own that was published. Twenty times in between nothing is delivered for a while:
those times are what the latencies are compared with, as whatever else the machine does goes on in
both.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import onnx
from onnx import TensorProto, helper
from record import add_option, record
from tritonclient.grpc import service_pb2 as pb

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Event

METHOD = "/inference.GRPCInferenceService/ModelInfer"
CONFIG = 'backend: "onnxruntime"'
# Its answers would be recognised: nobody may ever see them.
NEVER = 1_000_000
ROUNDS = 20
PATIENCE_S = 30.0


def network(number: int) -> bytes:
    """y = x + number."""
    tensor = helper.make_tensor("k", TensorProto.FLOAT, [1], [float(number)])
    io = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "k"], ["y"])], "g", io[:1], io[1:], [tensor]
    )
    opsets = [helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


class Deliveries:
    """Puts models into a repository in every way that people do."""

    def __init__(self, repository: Path, seed: int) -> None:
        self._repository = repository
        self._model = repository / "m"
        self._random = random.Random(seed)  # noqa: S311 - the same deliveries each time
        self._old = (repository.parent / f"old-{n}" for n in itertools.count())
        self.kinds = {
            self.renamed: 6,
            self.with_manifest: 3,
            self.truncated: 1,
            self.broken_config: 1,
            self.torn: 1,
            self.damaged: 1,
        }
        self.made = dict.fromkeys((kind.__name__ for kind in self.kinds), 0)

    def deliver(self, number: int) -> bool:
        """One delivery: a good model answers with `number`, a bad one must not be served.

        Returns:
            Whether it is a good one.
        """
        kind = self._random.choices(list(self.kinds), list(self.kinds.values()))[0]
        self.made[kind.__name__] += 1
        kind(number)
        return kind in (self.renamed, self.with_manifest, self.torn)

    def renamed(self, number: int) -> None:
        self._swap(network(number))

    def with_manifest(self, number: int) -> None:
        """Written in place, the manifest last."""
        data = network(number)
        self._begin_in_place()
        (self._model / "1" / "model.onnx").write_bytes(data)
        self._write_manifest(self._model, data)

    def truncated(self, _: int) -> None:
        self._swap(network(NEVER)[:-7])

    def broken_config(self, _: int) -> None:
        self._swap(network(NEVER), 'backend: "onnxruntime" max_batch_size: many')

    def torn(self, number: int) -> None:
        """Written slowly, in pieces, without a manifest; whole in the end."""
        self._begin_in_place()
        data = network(number)
        with (self._model / "1" / "model.onnx").open("wb") as file:
            for piece in (data[:20], data[20:60], data[60:]):
                file.write(piece)
                file.flush()
                time.sleep(0.1)

    def damaged(self, _: int) -> None:
        """One bit differs from what the manifest says."""
        data = bytearray(network(NEVER))
        folder = self._built(bytes(data))
        self._write_manifest(folder, bytes(data))
        data[self._random.randrange(len(data))] ^= 1
        (folder / "1" / "model.onnx").write_bytes(data)
        self._put(folder)

    def _begin_in_place(self) -> None:
        (self._model / "manifest.json").unlink(missing_ok=True)
        (self._model / "config.pbtxt").write_text(CONFIG)

    def _swap(self, data: bytes, config: str = CONFIG) -> None:
        self._put(self._built(data, config))

    def _built(self, data: bytes, config: str = CONFIG) -> Path:
        folder = self._repository / ".incoming-m"
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(config)
        (folder / "1" / "model.onnx").write_bytes(data)
        return folder

    def _put(self, folder: Path) -> None:
        old = next(self._old)
        if self._model.exists():
            self._model.rename(old)
        folder.rename(self._model)
        shutil.rmtree(old, ignore_errors=True)

    def _write_manifest(self, folder: Path, data: bytes) -> None:
        config = (folder / "config.pbtxt").read_bytes()
        files = {
            path: {"sha256": sha256(content).hexdigest(), "size": len(content)}
            for path, content in (("1/model.onnx", data), ("config.pbtxt", config))
        }
        text = json.dumps({"format": 1, "model": "m", "files": files})
        (folder / "manifest.json").write_text(text)


@dataclass
class Times:
    """What happened when, in monotonic s; `ends` of a time with deliveries and one without."""

    busy: list[tuple[float, float]] = field(default_factory=list)
    quiet: list[tuple[float, float]] = field(default_factory=list)

    def percentiles(
        self, spans: list[tuple[float, float]], answers: list[tuple[float, float, int]]
    ) -> tuple[float, float, float]:
        """The p50, the p99 and the longest of the answers that were asked for in `spans`, in ms."""
        begun = [at for at, _, _ in answers]
        took = [
            s
            for start, end in spans
            for _, s, _ in answers[bisect.bisect(begun, start) : bisect.bisect(begun, end)]
        ]
        p50, p99, longest = np.percentile(took, (50, 99, 100)) * 1e3
        return float(p50), float(p99), float(longest)


class Daemon:
    """`edge-server run` in mode poll, and what it says of itself."""

    def __init__(self, folder: Path, repository: Path, probation_s: float) -> None:
        self.address = f"unix:{folder}/grpc"
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self._metrics_port = listener.getsockname()[1]
        self.log = folder / "log"
        config = folder / "config.toml"
        config.write_text(f"[repository]\nprobation_requests = 100\nprobation_s = {probation_s}\n")
        command = [sys.executable, "-m", "edge_server", "run", "--grpc-socket", f"{folder}/grpc"]
        command += ["--grpc-port=0", f"--metrics-port={self._metrics_port}", "--http-port=0"]
        command += ["--model-control-mode=poll", "--config", str(config)]
        command += ["--repository-poll-secs=0.5", "--repository-settle-secs=0.3"]
        command += ["--model-repository", str(repository), "--repository-copies", f"{folder}/s"]
        with self.log.open("w") as stderr:
            self._process = subprocess.Popen(command, stderr=stderr)

    def wait_ready(self) -> None:
        with grpc.insecure_channel(self.address) as channel:
            call: Any = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")
            while not pb.ServerReadyResponse.FromString(call(b"", wait_for_ready=True)).ready:
                time.sleep(0.05)

    def outcomes(self) -> dict[str, int]:
        """How many changes have come to which end."""
        url = f"http://127.0.0.1:{self._metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as page:
            text = page.read().decode()
        found = re.findall(r'^edge_model_reload_total\{result="(\w+)"\} (\d+)', text, re.MULTILINE)
        return {result: int(count) for result, count in found}

    def memory_mb(self) -> float:
        """What it has for itself; what it shares with others depends on them too."""
        lines = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:")) / 1024

    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self._process.pid}/fd").iterdir())

    def stand_still(self, seconds: float) -> None:
        """Stop the process as a whole, and let it go on."""
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def client(address: str, pause_s: float, over: Event, result: Connection) -> None:
    result.send(ask(address, pause_s, over))


def ask(
    address: str, pause_s: float, over: Event
) -> tuple[list[tuple[float, float, int]], list[str]]:
    """One client until `over`: (when, how long in s, answer) of each request; what failed."""
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="x", datatype="FP32", shape=[1])
    request.raw_input_contents.append(np.zeros(1, np.float32).tobytes())
    data = request.SerializeToString()
    answers: list[tuple[float, float, int]] = []
    failures: list[str] = []
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(METHOD)
        while not over.wait(pause_s):
            begun = time.monotonic()
            try:
                answer = pb.ModelInferResponse.FromString(call(data))
                number = int(np.frombuffer(answer.raw_output_contents[0], np.float32)[0])
                answers.append((begun, time.monotonic() - begun, number))
            except grpc.RpcError as error:
                failures.append(f"{error.code().name}: {error.details()}")
    return answers, failures


class Run:
    """Deliveries, one after another, until so many of them were published."""

    def __init__(self, daemon: Daemon, deliveries: Deliveries, quiet_s: float) -> None:
        self.times = Times()
        self.samples: list[tuple[int, float, int]] = []
        self.not_followed: list[str] = []
        self._daemon = daemon
        self._deliveries = deliveries
        self._quiet_s = quiet_s
        self._number = 0

    def go(self, reloads: int) -> None:
        self._rest()
        for part in range(ROUNDS):
            while (loaded := self._daemon.outcomes()["loaded"]) < reloads * (part + 1) // ROUNDS:
                self._deliver()
            self._rest()
            self.samples.append((loaded, self._daemon.memory_mb(), self._daemon.descriptors()))
            print("{:6} reloads  {:7.1f} MB  {:4} files".format(*self.samples[-1]), flush=True)

    def _rest(self) -> None:
        # What the last delivery has set off ends first.
        time.sleep(1.0)
        begun = time.monotonic()
        time.sleep(self._quiet_s)
        self.times.quiet.append((begun, time.monotonic()))

    def _deliver(self) -> None:
        self._number += 1
        before = self._daemon.outcomes()
        begun = time.monotonic()
        outcome = "loaded" if self._deliveries.deliver(self._number) else "failed"
        while (now := self._daemon.outcomes())[outcome] == before[outcome]:
            if time.monotonic() - begun > PATIENCE_S:
                self.not_followed.append(f"{outcome} was awaited: {before} -> {now}")
                break
            time.sleep(0.03)
        self.times.busy.append((begun, time.monotonic()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reloads", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--pause-s", type=float, default=0.004, help="of a client after an answer")
    parser.add_argument("--quiet-s", type=float, default=5.0, help="each time without deliveries")
    parser.add_argument("--probation-s", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=1)
    add_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        repository.mkdir()
        deliveries = Deliveries(repository, arguments.seed)
        deliveries.renamed(0)
        daemon = Daemon(Path(folder), repository, arguments.probation_s)
        try:
            daemon.wait_ready()
            return report(daemon, deliveries, arguments)
        finally:
            daemon.stop()


def report(daemon: Daemon, deliveries: Deliveries, arguments: argparse.Namespace) -> int:
    context = get_context("spawn")
    over = context.Event()
    pipes = [context.Pipe(duplex=False) for _ in range(arguments.clients)]
    for _, result in pipes:
        what = (daemon.address, arguments.pause_s, over, result)
        context.Process(target=client, args=what, daemon=True).start()
    run = Run(daemon, deliveries, arguments.quiet_s)
    begun = time.monotonic()
    run.go(arguments.reloads)
    took_s = time.monotonic() - begun
    over.set()
    heard = [result.recv() for result, _ in pipes]
    answers = sorted(itertools.chain.from_iterable(answers for answers, _ in heard))
    failures = [text for _, failed in heard for text in failed]
    numbers = [number for _, _, number in answers]
    torn = sum(number >= NEVER for number in numbers)
    idle = run.times.percentiles(run.times.quiet, answers)
    busy = run.times.percentiles(run.times.busy, answers)
    # The first quarter fills pools and caches.
    steady = run.samples[len(run.samples) // 4 :]
    slope = statistics.linear_regression([s[0] for s in steady], [s[1] for s in steady]).slope
    kept = daemon.log.read_text().count("model m: last known good is now")
    made = ", ".join(f"{count} {kind}" for kind, count in deliveries.made.items())
    ends = ", ".join(f"{count} {result}" for result, count in daemon.outcomes().items())
    follow_s = np.percentile([end - start for start, end in run.times.busy], (50, 99))
    print(f"deliveries   {sum(deliveries.made.values())} in {took_s:.0f} s: {made}")
    print(f"what came    {ends}; not followed {len(run.not_followed)}")
    print(f"reloads      {len(set(numbers))} different models answered; {kept} kept as last good")
    print(f"followed in  {follow_s[0]:.2f} s, p99 {follow_s[1]:.2f} s, the writing included")
    print(f"requests     {len(numbers) + len(failures)}, failed {len(failures)}, torn {torn}")
    for name, (p50, p99, longest) in (("quiet", idle), ("reloading", busy)):
        print(f"{name:12} p50 {p50:.2f} ms, p99 {p99:.2f} ms, longest {longest:.1f} ms")
    goal = 1.5 * idle[1] + 5.0
    print(f"p99          {busy[1] / idle[1]:.2f} times the quiet one; the goal is {goal:.2f} ms")
    print(f"memory       {1000 * slope:+.1f} MB per 1000 reloads")
    print(f"descriptors  {run.samples[0][2]} at first, {run.samples[-1][2]} in the end")
    record(
        arguments.record,
        {
            "deliveries": sum(deliveries.made.values()),
            "took s": took_s,
            "reloads": len(set(numbers)),
            "requests": len(numbers) + len(failures),
            "failed": len(failures),
            "torn": torn,
            "quiet p99 ms": idle[1],
            "reloading p99 ms": busy[1],
            "followed p50 s": follow_s[0],
            "memory MB per 1000": 1000 * slope,
            "more descriptors": run.samples[-1][2] - run.samples[0][2],
        },
    )
    for text in sorted(set(failures))[:10] + run.not_followed[:10]:
        print(f"failed       {text}")
    return 1 if failures or torn or run.not_followed else 0


if __name__ == "__main__":
    sys.exit(main())
