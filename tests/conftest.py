"""What unit and integration tests share."""

from __future__ import annotations

import gc
import importlib.util
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from support.certificates import Authority
from support.simulated_gpu import SIMULATED_GPU, SimulatedGpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.model_folders import WriteModel

# How long an example takes says something of the machine only. The same examples each time: a
# change is judged by what it changed.
settings.register_profile(
    "quick",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=20,
    derandomize=True,
)
# `scripts/test --all` takes this one, by --hypothesis-profile; it looks for new examples.
settings.register_profile(
    "deep", settings.get_profile("quick"), max_examples=100, derandomize=False
)
settings.load_profile("quick")


# Of a campaign.
LONG_S = 3600


# Under `nohup` a hang-up is ignored, and in a shell's background an interrupt, which the processes
# that tests start would inherit.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give what takes longer more than the usual time."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.timeout(LONG_S))


def pytest_collection_finish() -> None:
    """Leave thousands of collected tests out of every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is killed may leave its scratch, which is among the tests' own files: daemons their
    copies of models, `oras` its downloads."""
    folder = str(tmp_path_factory.mktemp("temporary"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(autouse=True)
def log_settings_go_back() -> Iterator[None]:
    """What a test changes of the process's logging is over with it."""
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    handlers = [(h, h.level, h.formatter, list(h.filters)) for h in root.handlers]
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    for handler, level, formatter, filters in handlers:
        handler.setLevel(level)
        handler.setFormatter(formatter)
        handler.filters[:] = filters


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    return path


@pytest.fixture
def write_model(repository: Path) -> WriteModel:
    """Writes `repository/name/config.pbtxt` and a version directory; the model's directory."""

    def write(name: str, config: str, version: int = 1) -> Path:
        directory = repository / name
        (directory / str(version)).mkdir(parents=True, exist_ok=True)
        (directory / "config.pbtxt").write_text(config)
        return directory

    return write


@pytest.fixture
def write_onnx() -> Callable[..., None]:
    """Writes an ONNX file that adds 1 to its FP32 input `x`, giving `y`."""

    def write(path: Path, shape: tuple[object, ...] = (1, 4)) -> None:
        from support.adding_models import network

        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(network(1, shape))

    return write


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    """One that nobody trusts."""
    return Authority(tmp_path, "stranger")


@pytest.fixture(scope="session")
def simulated_libcuda(tmp_path_factory: pytest.TempPathFactory) -> SimulatedGpu:
    folder = tmp_path_factory.mktemp("libcuda")
    subprocess.run([SIMULATED_GPU / "build_libcuda", folder], check=True)
    return SimulatedGpu(folder)


@pytest.fixture(scope="session")
def kernels_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped kernels' source, compiled for this CPU: what the simulated GPU runs where
    EDGE_SIMULATED_KERNELS names it."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here: the kernels are compiled for the CPU with it")
    library = tmp_path_factory.mktemp("kernels") / "kernels.so"
    subprocess.run([SIMULATED_GPU / "kernel_shim/build_shim", library], check=True)
    return library


# Where the real pycuda is installed, it runs over the simulated driver, too.
@pytest.fixture(params=["simulated"] + ["real"] * bool(importlib.util.find_spec("pycuda")))
def simulated_gpu(
    request: pytest.FixtureRequest,
    simulated_libcuda: SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[SimulatedGpu]:
    """A GPU that is simulated, in this process, until the test ends."""
    simulated_libcuda.reset()
    if request.param == "simulated":
        monkeypatch.syspath_prepend(SIMULATED_GPU)
    for name in [name for name in sys.modules if name.partition(".")[0] == "pycuda"]:
        del sys.modules[name]
    yield simulated_libcuda
    for name in [name for name in sys.modules if name.partition(".")[0] == "pycuda"]:
        del sys.modules[name]
    simulated_libcuda.set("init=100")
