"""Whether edge_server runs on this very Python: imports, help, doctor, check and an inference.

    .venv-3.11/bin/python scripts/smoke_test.py

Needs the extra [onnxruntime] and nothing of the tests; it takes some seconds.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
import tempfile
from pathlib import Path

import edge_server

MODELS = Path(__file__).resolve().parent.parent / "models"
PATIENCE_S = 300
# Of the libraries that a desktop need not have.
OPTIONAL = {
    *("tensorrt", "pycuda", "cryptography", "mcap", "foxglove_schemas_protobuf"),
    *("torch", "tensorflow", "keras", "openvino", "paddle", "onnx", "boto3", "oras", "requests"),
}
# They are run by the Python of a model, or start the daemon.
STARTED = ("edge_server.backends.python.child", "edge_server.__main__")


def import_everything() -> int:
    """Import each module; how many."""
    count = 0
    for found in pkgutil.walk_packages(edge_server.__path__, "edge_server."):
        if found.name.startswith(STARTED):
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in OPTIONAL:
                raise
        count += 1
    return count


def edge(*arguments: str, codes: tuple[int, ...] = (0,), cwd: str | None = None) -> str:
    """What the verb prints."""
    done = subprocess.run(
        [sys.executable, "-m", "edge_server", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=cwd,
    )
    said = f"edge-server {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode in codes, said
    assert "Traceback" not in said, said
    assert "the check itself failed" not in said, said
    return done.stdout


def main() -> None:
    """Each in turn; the first that fails ends it."""
    count = import_everything()
    for verb in ((), ("run",), ("check",), ("demo",), ("models", "push"), ("plan", "build")):
        edge(*verb, "--help")
    # 1: this machine has a fault, which is no fault of ours.
    edge("doctor", codes=(0, 1))
    json.loads(edge("doctor", "--json", codes=(0, 1)))
    port = ("--grpc-port=0", "--metrics-port=0", "--http-port=0")
    assert "laneDetect_model version 1" in edge("check", "--model-repository", str(MODELS), *port)
    with tempfile.TemporaryDirectory() as folder:
        source = "synthetic://road?seed=7&fps=10"
        said = edge("demo", "--frames=2", "--json", f"--source={source}", cwd=folder)
    frames = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert len(frames) == 2, said
    assert all(frame["lanes"] for frame in frames), said
    print(f"Python {sys.version.split()[0]}: {count} modules, the verbs and 2 frames are well")


if __name__ == "__main__":
    main()
