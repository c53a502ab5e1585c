"""NVIDIA's own Python bindings refuse, and the backend raises; no GPU is needed.

Behind the bindings is a small library of ours that refuses what it is told to
(tests/support/tensorrt_api/fake_nvinfer.c), under the backend a simulated CUDA driver. Up to 10.12
the bindings end the process where they mean to raise: that is shown first. The simulation that
other tests use ends it too (tests/unit/backends/tensorrt/test_simulation.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.tensorrt_api import real_bindings

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.simulated_gpu import SimulatedGpu

    Run = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "tensorrt_bindings"

CONTEXT = """
import os
import tensorrt as trt
class Log(trt.ILogger):
    def __init__(self): super().__init__()
    def log(self, severity, msg): pass
log = Log()
engine = trt.Runtime(log).deserialize_cuda_engine(b"fake")
context = engine.create_execution_context()
def refuse(what): os.environ["EDGE_FAKE_NVINFER"] = what
def tell(call):
    try:
        print(repr(call()))
    except Exception as error:
        print(type(error).__name__, error)
"""
BACKEND = """
import os, sys
from pathlib import Path
from edge_server.backends.tensorrt.io_buffers import Context
from edge_server.backends.tensorrt.engine import Engine
from edge_server.gpu.device import open_device
from edge_server.gpu.stream import Stream
from edge_server.errors import EdgeServerError

def refuse(what): os.environ["EDGE_FAKE_NVINFER"] = what
def tell(call):
    try:
        print(repr(call()))
    except EdgeServerError as error:
        print(f"{type(error).__name__}: {error}")
device = open_device(0)
plan = Path(sys.argv[1])
plan.write_bytes(b"none")
tell(lambda: Engine(device, plan, None, "m"))
plan.write_bytes(b"fake")
engine = Engine(device, plan, None, "m")
stream = Stream(device)
with device.current():
    refuse("context")
    tell(lambda: Context(engine, stream, "m_0"))
    refuse("")
    context = Context(engine, stream, "m_0")
    tell(lambda: context.set_shapes(0, {"x": (2, 4)}))
    tell(lambda: context.set_shapes(0, {"x": (9, 4), "z": (9, 4)}))
    tell(lambda: context.set_shapes(0, {"x": (2, 4), "z": (3, 4)}))
    tell(lambda: context.set_shapes(0, {"x": (2, 4), "z": (2, 4)}))
    tell(lambda: context.output_shape("y"))
    tell(lambda: context.set_shapes(2, {"x": (2, 4), "z": (2, 4)}))
    tell(lambda: context.set_shapes(1, {"x": (4, 4), "z": (4, 4)}))
    tell(lambda: context.output_shape("y"))
    for what, call in (
        ("address", lambda: context.bind("x", 512)),
        ("allocator", lambda: context.allocate_with("y", None)),
        ("enqueue", lambda: context.enqueue()),
    ):
        refuse(what)
        tell(call)
        refuse("")
        tell(call)
    # Only where the bindings can raise it.
    if sys.argv[2] == "raises":
        refuse("profile")
        tell(lambda: context.set_shapes(0, {"x": (2, 4), "z": (2, 4)}))
    context.close()
engine.close()
device.close()
print("the end")
"""
SAID = """\
ModelConfigError: PLAN: unable to create TensorRT engine: Magic tag does not match; TensorRT \
VERSION is here: run `edge-server plan build m`, or copy the plan again if it is cut short (4 bytes)
Unavailable: model 'm': no execution context on GPU 0: out of memory; fewer instances, models or \
smaller batches fit
InternalError: m_0: TensorRT does not know the shapes for z: TensorRT gave no reason
InvalidRequest: request specifies invalid shape for input 'x' for m_0. Error details: the shape is \
out of the profile's range
InvalidRequest: request specifies invalid shapes for m_0: they do not go together: the shapes do \
not go together
None
(2, 4)
InternalError: Can not set the specified optimization profile 2[2] for m_0. Expected optimization \
profile index range 0-1
None
(4, 4)
InternalError: m_0: TensorRT does not take 'x' where it is
None
InternalError: m_0: TensorRT takes no allocator for 'y'
None
InternalError: failed to run TRT inference: unable to enqueue for inference m_0: the run is refused
None
"""
PROFILE_SAID = """\
InternalError: Can not set the specified optimization profile 0[0] for m_0. Expected optimization \
profile index range 0-1: the profile is refused
"""


# Of JetPack 6.0 (with wheels for Python 3.10 alone), 6.1, 7.0 and 7.2; and the last with NVDLA.
@pytest.fixture(
    params=[
        "8.6",
        "10.3",
        pytest.param("10.7", marks=pytest.mark.long),
        pytest.param("10.13", marks=pytest.mark.long),
        "10.16",
    ]
)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def can_raise(version: str) -> bool:
    return tuple(map(int, version.split("."))) >= (10, 13)


@pytest.fixture
def run(version: str, simulated_libcuda: SimulatedGpu, tmp_path: Path) -> Run:
    """Runs a program that finds the real bindings of `version` under the name of TensorRT."""
    try:
        found = real_bindings.refusing(version, FOLDER)
    except real_bindings.NotHere as error:
        pytest.skip(str(error)[:300])
    (tmp_path / "tensorrt.py").write_text(
        "from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n"
    )
    driver = simulated_libcuda.environment("compute=87")
    paths = [ROOT, tmp_path, found["PYTHONPATH"], ROOT / "tests/support/stand_ins/pycuda"]
    libraries = [found["LD_LIBRARY_PATH"], driver["LD_LIBRARY_PATH"]]

    def start(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env={
                **driver,
                "PYTHONPATH": os.pathsep.join(map(str, paths)),
                "LD_LIBRARY_PATH": os.pathsep.join(libraries),
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return start


@pytest.mark.parametrize(
    ("call", "raises"),
    [
        (
            'context.set_input_shape("x", (2, 4)), context.set_input_shape("z", (3, 4))\n'
            "tell(context.infer_shapes)",
            "RuntimeError infer_shapes error code: -1",
        ),
        (
            'refuse("profile")\ntell(lambda: context.set_optimization_profile_async(1, 0))',
            "RuntimeError Error in set optimization profile async.",
        ),
    ],
)
def test_up_to_10_12_the_bindings_die_where_later_ones_raise(
    run: Run, can_raise: bool, call: str, raises: str
) -> None:
    done = run(CONTEXT + call)
    if can_raise:
        assert (done.returncode, done.stdout.strip()) == (0, raises), done.stderr
    else:
        assert (done.returncode, done.stdout) == (-signal.SIGSEGV, ""), done.stderr


def test_what_the_bindings_give_where_they_do_not_raise(run: Run) -> None:
    """As the simulation has it, in tests/simulated_gpu/tensorrt."""
    asked = (
        "tell(lambda: context.set_optimization_profile_async(1, 0)); tell(context.infer_shapes)\n"
        "tell(lambda: context.all_binding_shapes_specified)\n"
        'tell(lambda: tuple(context.get_tensor_shape("y")))\n'
        'for n, rows in (("x", 2), ("x", 9), ("z", 3)):\n'
        "    tell(lambda: context.set_input_shape(n, (rows, 4)))\n"
        "tell(lambda: context.all_binding_shapes_specified)\n"
        'tell(lambda: tuple(context.get_tensor_shape("y")))\n'
    )
    done = run(CONTEXT + asked)
    assert done.stdout.splitlines() == [
        "True",
        "['x', 'z']",
        "False",
        "(-1, 4)",
        "True",
        "False",
        "True",
        "True",
        "ValueError __len__() should return >= 0",
    ], done.stderr


def test_the_backend_raises_or_returns_whatever_tensorrt_refuses(
    run: Run, version: str, can_raise: bool, tmp_path: Path
) -> None:
    plan = tmp_path / "m" / "1" / "model.plan"
    plan.parent.mkdir(parents=True)
    done = run(BACKEND, str(plan), "raises" if can_raise else "dies")
    assert done.returncode == 0, done.stdout + done.stderr
    number = real_bindings.WHEELS[version][0].partition("==")[2]
    said = SAID.replace("PLAN", str(plan)).replace("VERSION", number)
    assert done.stdout == said + PROFILE_SAID * can_raise + "the end\n"
