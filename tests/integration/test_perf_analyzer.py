"""Fifty invocations of Triton's own perf_analyzer, a binary of C++ clients for gRPC and HTTP.

Its wheel is NVIDIA's, for glibc 2.38 and newer; on an older system it runs with the libraries of
Ubuntu 24.04's root (`make_root`)."""

from __future__ import annotations

import csv
import json
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.daemon_process import Process
from support.systemd_machine import make_root

from edge_server.process.disk import cache_directory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

WHEEL = "perf-analyzer==2.60.0"
GLIBC = (2, 38)
# Three short windows, however different they are: these tests are of calls, not of speed.
SHORT = ("-p", "300", "-s", "999", "-r", "3")
SIMPLE = """
platform: "onnxruntime_onnx" max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: 16 },
        { name: "INPUT1" data_type: TYPE_INT32 dims: 16 } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: 16 },
         { name: "OUTPUT1" data_type: TYPE_INT32 dims: 16 } ]
dynamic_batching { }
"""
IDENTITY = """
backend: "identity" max_batch_size: 8
input {{ name: "x" data_type: TYPE_{kind} dims: [ {dims} ] }}
output {{ name: "y" data_type: TYPE_{kind} dims: [ {dims} ] }}
"""
SEQUENCE = """
platform: "onnxruntime_onnx" max_batch_size: 8
input { name: "INPUT" data_type: TYPE_INT32 dims: 1 }
output { name: "OUTPUT" data_type: TYPE_INT32 dims: 1 }
instance_group { count: 2 kind: KIND_CPU }
sequence_batching {
  max_sequence_idle_microseconds: 5000000
  %s
  control_input [
    { name: "START"
      control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } },
    { name: "READY"
      control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }
  ]
}
"""
REPEAT = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
model_transaction_policy { decoupled: true }
"""
REPEAT_PY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            sender = request.get_response_sender()
            for _ in range(3):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input [ { name: "A" data_type: TYPE_INT32 dims: 16 }, { name: "B" data_type: TYPE_INT32 dims: 16 } ]
output [ { name: "C" data_type: TYPE_INT32 dims: 16 } ]
ensemble_scheduling { step [
  { model_name: "simple" model_version: -1
    input_map [ { key: "INPUT0" value: "A" }, { key: "INPUT1" value: "B" } ]
    output_map [ { key: "OUTPUT0" value: "sum" }, { key: "OUTPUT1" value: "difference" } ] },
  { model_name: "simple" model_version: -1
    input_map [ { key: "INPUT0" value: "sum" }, { key: "INPUT1" value: "difference" } ]
    output_map [ { key: "OUTPUT0" value: "C" } ] }
] }
"""
GRPC = "-i grpc"
SEQUENCES = "-m sequence --sequence-length 10"
PERIODIC = "--periodic-concurrency-range 1:3:1 --request-period 3 {profile}"
# {here} has the files of the fixture; a line that begins with a model's name is one of HTTP.
INVOCATIONS = f"""
-m simple
-m simple --sync
-m simple --async
-m simple --concurrency-range 1:4
-m simple --concurrency-range 2:6:2 --async
-m simple --concurrency-range 64 --async
-m simple --request-rate-range 50:100:50
-m simple --request-rate-range 80 --request-distribution poisson
-m simple --request-intervals {{here}}/intervals
-m simple -b 4
-m simple -b 8 --concurrency-range 4
-m simple --shared-memory system
-m simple --shared-memory system -b 4 --async --concurrency-range 4
-m simple --input-data zero
-m simple --input-data {{here}}/data.json
-m simple --input-data {{here}}/data
-m floats --shape x:128
-m image
-m strings --string-length 40
-m strings --string-data hello -b 2
-m simple --percentile 95
-m simple --latency-threshold 900 --concurrency-range 1:4 --binary-search
-m simple --request-count 50
-m simple --warmup-request-count 20 --request-count 50
-m simple --input-tensor-format json
-m simple --output-tensor-format json
-m simple -x 1 -f {{here}}/report.csv --verbose-csv
-m simple --profile-export-file {{here}}/profile.json
-m simple --collect-metrics --metrics-url {{metrics}}
-m simple --trace-level TIMESTAMPS --trace-rate 1 --trace-count 5
-m ensemble
-m simple -H 'x-drive: 7'
{SEQUENCES}
{GRPC} -m simple
{GRPC} -m simple --async --concurrency-range 8
{GRPC} -m simple --streaming
{GRPC} -m simple --streaming --async --concurrency-range 4 -b 2
{GRPC} -m simple --shared-memory system
{GRPC} -m simple --shared-memory system --output-shared-memory-size 1024 --async
{GRPC} -m simple --request-rate-range 80 --async
{GRPC} -m simple --request-intervals {{here}}/intervals --streaming
{GRPC} -m floats --shape x:128 -b 8
{GRPC} -m strings --string-length 40 --streaming
{GRPC} -m simple --grpc-compression-algorithm gzip
{GRPC} {SEQUENCES}
{GRPC} {SEQUENCES} --streaming --sequence-length-variation 50 --concurrency-range 3
{GRPC} {SEQUENCES} --request-rate-range 80 --num-of-sequences 4 --sequence-id-range 1000:1100
{GRPC} -m oldest --sequence-length 5 --streaming --request-rate-range 50 --serial-sequences
{GRPC} -m repeat --streaming --async
{GRPC} -m repeat --streaming --async {PERIODIC}
""".strip().splitlines()


def write_onnx(repository: Path, name: str, operators: dict[str, str], tensors: list[Any]) -> None:
    """Write a model whose outputs are the operators of its first two inputs, added to the rest."""
    names = [tensor.name for tensor in tensors]
    nodes, outputs = [], []
    for output, operator in operators.items():
        first, second, *rest = names
        nodes.append(helper.make_node(operator, [first, second], [f"{output}0"]))
        for index, each in enumerate(rest):
            nodes.append(
                helper.make_node("Add", [f"{output}{index}", each], [f"{output}{index + 1}"])
            )
        nodes.append(helper.make_node("Identity", [f"{output}{len(rest)}"], [output]))
        shape = [dim.dim_param or dim.dim_value for dim in tensors[0].type.tensor_type.shape.dim]
        outputs.append(helper.make_tensor_value_info(output, TensorProto.INT32, shape))
    graph = helper.make_graph(nodes, name, tensors, outputs)
    opset = [helper.make_opsetid("", 17)]
    path = repository / name / "1"
    path.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path / "model.onnx")


def int32(name: str, size: int) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.INT32, ["n", size])


def write_models(repository: Path) -> None:
    configs = {
        "simple": SIMPLE,
        "floats": IDENTITY.format(kind="FP32", dims=-1),
        "image": IDENTITY.format(kind="FP32", dims="3, 32, 32"),
        "strings": IDENTITY.format(kind="STRING", dims=1),
        "sequence": SEQUENCE % "direct { }",
        "oldest": SEQUENCE % "oldest { max_candidate_sequences: 4 }",
        "repeat": REPEAT,
        "ensemble": ENSEMBLE,
    }
    both = {"OUTPUT0": "Add", "OUTPUT1": "Sub"}
    write_onnx(repository, "simple", both, [int32("INPUT0", 16), int32("INPUT1", 16)])
    controlled = [int32(each, 1) for each in ("INPUT", "START", "READY")]
    for name in ("sequence", "oldest"):
        write_onnx(repository, name, {"OUTPUT": "Add"}, controlled)
    for name, config in configs.items():
        (repository / name / "1").mkdir(parents=True, exist_ok=True)
        (repository / name / "config.pbtxt").write_text(config)
    (repository / "repeat" / "1" / "model.py").write_text(REPEAT_PY)


def write_inputs(folder: Path) -> None:
    (folder / "intervals").write_text("10000\n20000\n5000\n")
    row = {"INPUT0": list(range(16)), "INPUT1": [1] * 16}
    (folder / "data.json").write_text(json.dumps({"data": [row, row]}))
    (folder / "data").mkdir()
    for name, values in row.items():
        np.array(values, np.int32).tofile(folder / "data" / name)


@cache
def perf_analyzer() -> tuple[str, ...]:
    """The command of the binary; the test is skipped where it cannot be had."""
    if (installed := shutil.which("perf_analyzer")) is not None:
        return (installed,)
    folder = cache_directory() / "perf_analyzer" / WHEEL
    binary = folder / "perf_analyzer" / "bin" / "perf_analyzer"
    if not binary.exists():
        where = ["--dest", str(folder), "--platform", f"manylinux_{GLIBC[0]}_{GLIBC[1]}_x86_64"]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *where, WHEEL],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"pip brings no {WHEEL}: {done.stderr.strip()}")
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        binary.chmod(0o755)
    if tuple(map(int, platform.libc_ver()[1].split("."))) >= GLIBC:
        return (str(binary),)
    libraries = make_root("noble-amd64") / "usr/lib/x86_64-linux-gnu"
    return (
        str(libraries / "ld-linux-x86-64.so.2"),
        *("--library-path", str(libraries)),
        str(binary),
    )


class Loaded:
    """A daemon with the models, and the folder of their inputs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_models(folder / "models")
        write_inputs(folder)
        settings = folder / "config.toml"
        settings.write_text("[grpc]\nmax_decompressed_bytes = 1000000\n")
        self.process = Process(
            folder,
            f"--config={settings}",
            f"--model-repository={folder / 'models'}",
            "--allow-client-shm=true",
            f"--trace-config=triton,file={folder / 'trace'}",
        )

    def words(self, invocation: str) -> list[str]:
        here, metrics = self.folder, f"127.0.0.1:{self.process.metrics_port}/metrics"
        profile = f"--profile-export-file {here}/periodic.json"
        text = invocation.format(here=here, metrics=metrics, profile=profile)
        words = [each.strip("'") for each in re.findall(r"'[^']*'|\S+", text)]
        port = self.process.port if "grpc" in words else self.process.http_port
        counted = {"--request-count", "--periodic-concurrency-range"} & set(words)
        return [*words, "-u", f"127.0.0.1:{port}", *(() if counted else SHORT)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    perf_analyzer()
    found = Loaded(tmp_path_factory.mktemp("perf_analyzer"))
    try:
        found.process.wait_for("READY=1")
        yield found
    finally:
        found.process.close()


def test_there_are_fifty() -> None:
    assert len(set(INVOCATIONS)) == 50


@pytest.mark.parametrize("invocation", INVOCATIONS, ids=INVOCATIONS)
def test_perf_analyzer_measures(loaded: Loaded, invocation: str) -> None:
    done = subprocess.run(
        [*perf_analyzer(), *loaded.words(invocation)],
        cwd=loaded.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    rates = re.findall(r"throughput: ([\d.]+) infer/sec", done.stdout)
    if "periodic" in invocation:
        experiments = json.loads((loaded.folder / "periodic.json").read_text())["experiments"]
        assert all(experiment["requests"] for experiment in experiments)
        return
    assert rates, done.stdout
    assert all(float(rate) > 0 for rate in rates), done.stdout
    if "-f" in invocation.split():
        rows = list(csv.DictReader((loaded.folder / "report.csv").read_text().splitlines()))
        assert float(rows[0]["Inferences/Second"]) > 0
