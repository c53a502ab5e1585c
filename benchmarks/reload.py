"""Hot reload under load: models are delivered, well and badly, while clients ask all the time.

    python benchmarks/reload.py [--deliveries 1000] [--clients 2] [--idle-s 10]

Every model adds its own number to what it is given, so an answer tells which model gave it. A
failed request is one that was refused or lost, or an answer of a model that never was complete.
The first seconds, without deliveries, are what the latencies are compared with.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import onnx
from onnx import TensorProto, helper
from tritonclient.grpc import service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Event

METHOD = "/inference.GRPCInferenceService/ModelInfer"
CONFIG = 'backend: "onnxruntime"'
# Its answers would be recognised: nobody may ever see them.
NEVER = 1_000_000


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

    def deliver(self, number: int) -> None:
        """One delivery: a good model answers with `number`, a bad one must not be served."""
        kind = self._random.choices(list(self.kinds), list(self.kinds.values()))[0]
        self.made[kind.__name__] += 1
        kind(number)

    def renamed(self, number: int) -> None:
        self._swap(network(number))

    def with_manifest(self, number: int) -> None:
        """Written in place, the manifest last."""
        data = network(number)
        (self._model / "manifest.json").unlink(missing_ok=True)
        (self._model / "1" / "model.onnx").write_bytes(data)
        self._write_manifest(self._model, data)

    def truncated(self, _: int) -> None:
        self._swap(network(NEVER)[:-7])

    def broken_config(self, _: int) -> None:
        self._swap(network(NEVER), 'backend: "onnxruntime" max_batch_size: many')

    def torn(self, number: int) -> None:
        """Written slowly, in pieces, without a manifest; whole in the end."""
        (self._model / "manifest.json").unlink(missing_ok=True)
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


def client(address: str, over: Event, result: Connection) -> None:
    result.send(ask(address, over))


def ask(address: str, over: Event) -> tuple[list[tuple[float, float, int]], list[str]]:
    """One client until `over`: (when, how long in s, answer) of each request; what failed."""
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="x", datatype="FP32", shape=[1])
    request.raw_input_contents.append(np.zeros(1, np.float32).tobytes())
    data = request.SerializeToString()
    answers: list[tuple[float, float, int]] = []
    failures: list[str] = []
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(METHOD)
        while not over.is_set():
            begun = time.monotonic()
            try:
                answer = pb.ModelInferResponse.FromString(call(data))
                number = int(np.frombuffer(answer.raw_output_contents[0], np.float32)[0])
                answers.append((begun, time.monotonic() - begun, number))
            except grpc.RpcError as error:
                failures.append(f"{error.code().name}: {error.details()}")
    return answers, failures


def memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def wait_ready(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")
        while not pb.ServerReadyResponse.FromString(call(b"", wait_for_ready=True)).ready:
            time.sleep(0.05)


def deliver_all(
    deliveries: Deliveries, pid: int, count: int, pause_s: float
) -> Iterator[tuple[int, float, int]]:
    """(delivery, memory in MB, descriptors), now and then."""
    for number in range(1, count + 1):
        deliveries.deliver(number)
        time.sleep(pause_s)
        if number % max(1, count // 20) == 0:
            yield number, memory_mb(pid), sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deliveries", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--idle-s", type=float, default=10.0)
    parser.add_argument("--pause-s", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        repository.mkdir()
        deliveries = Deliveries(repository, arguments.seed)
        deliveries.renamed(0)
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "edge_server", "run", "--grpc-socket", f"{folder}/grpc"]
        command += ["--grpc-port=0", "--metrics-port=0", "--model-control-mode=poll"]
        command += ["--repository-poll-secs=0.5", "--repository-settle-secs=0.3"]
        command += ["--model-repository", str(repository), "--repository-copies", f"{folder}/s"]
        with log.open("w") as stderr:
            daemon = subprocess.Popen(command, stderr=stderr)
        try:
            return report(daemon, deliveries, f"unix:{folder}/grpc", log, arguments)
        finally:
            daemon.terminate()
            daemon.wait()


def report(
    daemon: subprocess.Popen[bytes],
    deliveries: Deliveries,
    address: str,
    log: Path,
    arguments: argparse.Namespace,
) -> int:
    wait_ready(address)
    context = get_context("spawn")
    over = context.Event()
    pipes = [context.Pipe(duplex=False) for _ in range(arguments.clients)]
    for _, result in pipes:
        context.Process(target=client, args=(address, over, result), daemon=True).start()
    time.sleep(arguments.idle_s)
    begun = time.monotonic()
    samples = []
    for sample in deliver_all(deliveries, daemon.pid, arguments.deliveries, arguments.pause_s):
        samples.append(sample)
        print(f"{sample[0]:6} deliveries  {sample[1]:7.1f} MB  {sample[2]:4} files", flush=True)
    took_s = time.monotonic() - begun
    time.sleep(1.0)
    over.set()
    heard = [result.recv() for result, _ in pipes]
    answers = sorted(itertools.chain.from_iterable(answers for answers, _ in heard))
    failures = [text for _, failed in heard for text in failed]
    numbers = [number for _, _, number in answers]
    torn = sum(number >= NEVER for number in numbers)
    idle = np.percentile([s for at, s, _ in answers if at < begun], (50, 99)) * 1e3
    busy = np.percentile([s for at, s, _ in answers if at >= begun], (50, 99)) * 1e3
    # The first quarter fills pools and caches.
    steady = samples[len(samples) // 4 :]
    slope = statistics.linear_regression([s[0] for s in steady], [s[1] for s in steady]).slope
    reloads = log.read_text().count("model m: READY")
    kinds = ", ".join(f"{count} {kind}" for kind, count in deliveries.made.items())
    print(f"deliveries   {arguments.deliveries} in {took_s:.0f} s: {kinds}")
    print(f"reloads      {reloads}, {len(set(numbers))} different models answered")
    print(f"requests     {len(numbers) + len(failures)}, failed {len(failures)}, torn {torn}")
    print(f"p50, p99     {idle[0]:.2f}, {idle[1]:.2f} ms idle", end="; ")
    print(f"{busy[0]:.2f}, {busy[1]:.2f} ms reloading")
    print(f"memory       {1000 * slope:+.1f} MB per 1000 deliveries")
    print(f"descriptors  {samples[0][2]} at first, {samples[-1][2]} in the end")
    for text in sorted(set(failures))[:10]:
        print(f"failed       {text}")
    return 1 if failures or torn else 0


if __name__ == "__main__":
    sys.exit(main())
