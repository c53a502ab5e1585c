"""The simulated TensorRT offers what the real classes do, and has no more than a version has."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.workshop import two_inputs

if TYPE_CHECKING:
    from support.workshop import Workshop
VERSIONS = {
    "8.6": "8.6.1.6",
    "10.3": "10.3.0.30",
    "10.16": "10.16.2.1",
    "11.4": "11.4.1.1",
}
REFUSED = """
import sys
import tensorrt as trt
from pathlib import Path
class Log(trt.ILogger):
    def __init__(self): super().__init__()
    def log(self, severity, msg): pass
log = Log()
engine = trt.Runtime(log).deserialize_cuda_engine(Path(sys.argv[1]).read_bytes())
context = engine.create_execution_context()
try:
    if sys.argv[2] == "shapes":
        context.set_input_shape("a", (2, 3)), context.set_input_shape("b", (2, 4))
        context.infer_shapes()
    else:
        context.set_optimization_profile_async(7, 0)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("refused", "expected_text"),
    [
        ("shapes", "infer_shapes error code: -1"),
        ("profile", "Error in set optimization profile async."),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_it_dies_where_the_real_bindings_do_and_raises_where_they_do(
    workshop: Workshop, version: str, refused: str, expected_text: str
) -> None:
    """What the real ones do is in tests/integration/test_tensorrt_refusals.py."""
    workshop.tensorrt(f"version={VERSIONS[version]}")
    workshop.write(two_inputs(), profiles=[dict.fromkeys("ab", ((2, 2), (2, 4), (2, 8)))])
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, workshop.plan, refused],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    dies = tuple(map(int, version.split("."))) < (10, 13)
    expected = (139, "") if dies else (0, expected_text)
    assert (done.returncode, done.stdout.strip()) == expected, done.stderr
