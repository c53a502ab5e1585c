"""One network in each format beside ONNX Runtime, through one daemon each: start, memory, latency.

    python benchmarks/formats.py [openvino pytorch tensorflow paddle]

The lane model's twin of the tests, made by each framework, with one instance and one thread, asked
by one client over gRPC. Environments: `.venv-pytorch` and so on, as scripts/test --all makes them.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from integration.frameworks import networks  # noqa: E402 - of this checkout
from integration.frameworks.daemon import Served  # noqa: E402 - likewise

REQUESTS = 50
_ONE_THREAD = {
    "pytorch": "INTRA_OP_THREAD_COUNT",
    "tensorflow": "TF_NUM_INTRA_THREADS",
    "openvino": "INFERENCE_NUM_THREADS",
    "onnxruntime": "intra_op_thread_count",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "formats", nargs="*", default=["openvino", "pytorch", "tensorflow", "paddle"]
    )
    chosen = parser.parse_args().formats
    print(f"{'format':12} {'ready s':>8} {'memory MB':>10} {'median ms':>10} {'p95 ms':>8}")
    for backend in chosen:
        with tempfile.TemporaryDirectory() as folder:
            served = Served(backend, Path(folder))
            try:
                measure(served, "lane", backend)
                if backend == chosen[0]:
                    onnx = served.repository / "onnx" / "1" / "model.onnx"
                    onnx.parent.mkdir(parents=True)
                    shutil.copy(Path(folder) / "lane.onnx", onnx)
                    measure(served, "onnx", "onnxruntime")
            finally:
                served.close()


def measure(served: Served, model: str, backend: str) -> None:
    config = served.repository / model / "config.pbtxt"
    text = config.read_text() if config.exists() else ""
    if backend in _ONE_THREAD:
        key = _ONE_THREAD[backend]
        text += f' parameters {{ key: "{key}" value {{ string_value: "1" }} }}'
    if backend == "paddle":
        text += (
            " optimization { execution_accelerators { cpu_execution_accelerator { "
            'name: "mkldnn" parameters { key: "cpu_threads" value: "1" } } } }'
        )
    config.write_text(f"{text} instance_group {{ kind: KIND_CPU count: 1 }}")
    before_mb = memory_mb(served.process.popen.pid)
    began = time.monotonic()
    served.load(model)
    ready_s = time.monotonic() - began
    x = np.random.default_rng(0).random((1, *networks.LANE_SHAPE), np.float32)
    took_ms = []
    for _ in range(REQUESTS):
        began = time.monotonic()
        served.only(model, x)
        took_ms.append(1e3 * (time.monotonic() - began))
    children = served.children(f"{model}_")
    # ONNX Runtime is in the daemon.
    used_mb = sum(map(memory_mb, children)) or memory_mb(served.process.popen.pid) - before_mb
    median, p95 = statistics.median(took_ms), statistics.quantiles(took_ms, n=20)[-1]
    print(
        f"{backend:12} {ready_s:8.1f} {used_mb:10.0f} {median:10.1f} {p95:8.1f}",
        flush=True,
    )


def memory_mb(pid: int) -> float:
    """The process's proportional share of memory."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    main()
