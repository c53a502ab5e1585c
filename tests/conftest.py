"""What unit and integration tests share."""

from __future__ import annotations

import ctypes
import datetime
import gc
import importlib.util
import ipaddress
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# How long an example takes says something of the machine only.
settings.register_profile(
    "quick", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=20
)
# `scripts/test --all` takes this one, by --hypothesis-profile.
settings.register_profile("deep", settings.get_profile("quick"), max_examples=100)
settings.load_profile("quick")


# By marker: campaigns, and what boots systemd and installs packages in it.
TIMEOUTS_S = {"long": 3600, "paired": 600}


# Under `nohup` a hang-up is ignored, which the processes that tests start would inherit.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give what takes longer more than the usual time."""
    for item in items:
        for marker, timeout_s in TIMEOUTS_S.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.timeout(timeout_s))
                break


def pytest_collection_finish() -> None:
    """Leave thousands of collected tests out of every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Daemons keep their copies of models among the tests' own files, where those that are killed
    may leave them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        yield


class Authority:
    """Signs certificates for 127.0.0.1; its own is `ca`, in PEM form."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(_pem(self._sign(self._name, self._key.public_key(), ca=True)))

    def issue(self, name: str, *, days: int = 1) -> tuple[Path, Path]:
        """The files of a certificate and its key; negative `days` have passed since its end."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate_path, key_path = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        certificate_path.write_bytes(_pem(self._sign(subject, key.public_key(), days=days)))
        key_path.touch(mode=0o600)
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return certificate_path, key_path

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        *,
        ca: bool = False,
        days: int = 1,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.timezone.utc)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=10))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


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


class WriteModel(Protocol):
    def __call__(self, name: str, config: str, version: int = 1) -> Path: ...


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
        import onnx
        from onnx import TensorProto, helper

        graph = helper.make_graph(
            [helper.make_node("Add", ["x", "one"], ["y"])],
            "add_one",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
            [helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
        model.ir_version = 8
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, path)

    return write


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    """One that nobody trusts."""
    return Authority(tmp_path, "stranger")


SIMULATED_GPU = Path(__file__).parent / "simulated_gpu"
TIMEOUT_S = 60.0


class SimulatedGpu:
    """The simulated driver library, as tests see it; libcuda.c tells what can be set.

    Args:
        folder: holds the compiled libcuda.so.1.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Whoever loads libcuda.so.1 in this process from now on gets this one.
        self._library = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
        self._library.simulated_device_bytes.restype = ctypes.c_size_t
        self._library.simulated_allocations.restype = ctypes.c_size_t
        self._library.simulated_calls.restype = ctypes.c_size_t

    def set(self, words: str) -> None:
        """As EDGE_SIMULATED_CUDA, at once."""
        self._library.simulated_settings(words.encode())

    def reset(self) -> None:
        self._library.simulated_reset()

    @property
    def device_bytes(self) -> int:
        """Device memory that is allocated."""
        return self._library.simulated_device_bytes()

    def comes_to(self, device_bytes: int) -> bool:
        """Whether so much device memory is allocated once what is garbage has been freed."""
        end_s = time.monotonic() + TIMEOUT_S
        while self.device_bytes != device_bytes and time.monotonic() < end_s:
            time.sleep(0.01)
        return self.device_bytes == device_bytes

    def keep_busy(self, most_ms: int) -> None:
        """Whoever frees memory waits until `let_go_on`, or for `most_ms`."""
        self._library.simulated_keep_busy(most_ms)

    @contextmanager
    def nothing_is_freed(self) -> Iterator[None]:
        """Memory that other threads free meanwhile is freed afterwards: to free it ends all work
        of every stream, here as on a real GPU."""
        self.keep_busy(int(1000 * TIMEOUT_S))
        try:
            yield
        finally:
            self.keep_busy(0)

    def let_go_on(self, while_true: Callable[[], bool]) -> bool:
        """Let the GPU be idle once somebody waits for that; whether somebody did, `while_true`."""
        while while_true():
            if self._library.simulated_is_waited_for():
                self._library.simulated_go_on()
                return True
            time.sleep(0.001)
        return False

    @property
    def allocations(self) -> int:
        """How often memory was allocated, on the device or pinned."""
        return self._library.simulated_allocations()

    @property
    def calls(self) -> int:
        """How often the driver was called."""
        return self._library.simulated_calls()

    def environment(self, words: str = "") -> dict[str, str]:
        """For a process of its own that shall find this GPU."""
        path = os.pathsep.join(filter(None, [str(SIMULATED_GPU), os.environ.get("PYTHONPATH")]))
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self._folder),
            "PYTHONPATH": path,
            "EDGE_SIMULATED_CUDA": words,
        }


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
