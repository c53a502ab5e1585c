"""What the backend derives from TensorRT's real Python classes, on every version; no GPU is needed.

See test_tensorrt_bindings.py for where the classes come from.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.tensorrt_api import real_bindings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "tensorrt_bindings"

DERIVED = """
import os
from edge_server.backends.tensorrt import engine
from edge_server.backends.tensorrt.io_buffers import OutputAllocator
from edge_server.backends.tensorrt.engine import trt_log, version_here
from edge_server.errors import Unavailable
import tensorrt as trt

allocator = OutputAllocator(None)
assert isinstance(allocator, trt.IOutputAllocator)
allocator.notify_shape("y", trt.Dims([2, 3]))
assert allocator.shape == (2, 3)
mark = trt_log().mark
trt_log().log(trt.ILogger.WARNING, "a warning")
trt_log().log(trt.ILogger.ERROR, "first")
trt_log().log(trt.ILogger.INTERNAL_ERROR, "second")
assert trt_log() is trt_log()
assert trt_log().since(mark) == "first; second", trt_log().since(mark)
try:
    # Of a library that is empty.
    engine.open_runtime(None)
except Unavailable as error:
    print(version_here(), str(error), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("version", [*sorted(real_bindings.WHEELS), "lean"])
def test_what_is_derived_from_the_real_classes_can_be_made_and_called(
    version: str, tmp_path: Path
) -> None:
    try:
        found = real_bindings.importing(version, FOLDER)
    except real_bindings.NotHere as error:
        pytest.skip(str(error)[:300])
    module = "tensorrt_lean_bindings" if version == "lean" else "tensorrt_bindings"
    (tmp_path / "tensorrt.py").write_text(
        f"from {module} import *\nfrom {module} import __version__\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", DERIVED],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path), found["PYTHONPATH"]]),
            "LD_LIBRARY_PATH": found["LD_LIBRARY_PATH"],
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    number = tuple(map(int, ("10.3" if version == "lean" else version).split(".")))
    assert done.stdout.startswith(f"{number} unable to create TensorRT runtime: "), done.stdout
