"""Probes tell what they find, and touch nothing that ends a process without a driver."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from edge_server.board.device_nodes import Account
from edge_server.board.doctor import probes
from edge_server.board.doctor.examination import Probe, run_probe
from edge_server.board.doctor.hardware import ProbeResult

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.simulated_gpu import SimulatedGpu


@pytest.fixture
def start_driver(
    simulated_libcuda: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Has processes from then on find a driver whose cuInit returns what is given, and its
    version."""

    def start(init: int, version: int = 12060) -> None:
        environment = simulated_libcuda.environment(f"init={init},driver={version}")
        for name in ("LD_LIBRARY_PATH", "EDGE_SIMULATED_CUDA"):
            monkeypatch.setenv(name, environment[name])

    return start


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a module first on the path, in place of the library of that name."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def write(name: str, code: str) -> None:
        (folder / f"{name}.py").write_text(code)

    return write


def test_a_driver_tells_its_version_and_devices(start_driver: Callable[..., None]) -> None:
    start_driver(0)
    assert run_probe(Probe("edge_server.board.doctor.probes:driver")).facts == {
        "init": 0,
        "uid": os.geteuid(),
        "version": "12.6",
        "devices": [
            {
                "name": "Simulated GPU 0",
                "compute_capability": "8.7",
                "memory_bytes": 8 << 30,
                "integrated": True,
            }
        ],
    }


def test_a_driver_that_does_not_start_tells_why(start_driver: Callable[..., None]) -> None:
    start_driver(100)
    says = run_probe(Probe("edge_server.board.doctor.probes:driver")).facts
    assert (says["init"], says["uid"]) == (100, os.geteuid())
    assert "cuInit returns 100 (no CUDA-capable device is detected)" in says["error"]


def test_a_driver_that_is_too_old_does_not_start(start_driver: Callable[..., None]) -> None:
    start_driver(0, 11020)
    says = run_probe(Probe("edge_server.board.doctor.probes:driver")).facts
    assert says["init"] is None
    assert says["error"].startswith("the CUDA driver is too old: it speaks CUDA 11.2, ")


_TENSORRT = """
__version__ = "10.3.0"
class Logger:
    ERROR = 1
    def __init__(self, level): pass
class Runtime:
    num_DLA_cores = 2
    def __init__(self, logger): __import__("pathlib").Path(MADE).touch()
    def __del__(self): __import__("os").abort()
"""


@pytest.mark.parametrize(("init", "made"), [(0, True), (100, False)])
def test_tensorrts_runtime_is_made_with_a_driver_only(
    start_driver: Callable[..., None],
    write_module: Callable[[str, str], None],
    tmp_path: Path,
    init: int,
    made: bool,
) -> None:
    start_driver(init)
    write_module("tensorrt", _TENSORRT.replace("MADE", repr(str(tmp_path / "made"))))
    answer = run_probe(Probe("edge_server.board.doctor.probes:nvdla"))
    assert (tmp_path / "made").exists() is made
    assert answer.facts == ({"cores": 2} if made else {"error": answer.facts["error"]})


def test_a_library_is_missing_broken_or_there(write_module: Callable[[str, str], None]) -> None:
    write_module("tensorrt", "__version__ = '10.3.0'")
    tensorrt = Probe("edge_server.board.doctor.probes:tensorrt")
    assert run_probe(tensorrt).facts["version"] == "10.3.0"
    write_module("tensorrt", "raise ImportError('libnvdla_compiler.so: cannot open\\nmore')")
    assert run_probe(tensorrt).facts == {"error": "ImportError: libnvdla_compiler.so: cannot open"}
    write_module("tensorrt", "import no_such_module_of_it")
    assert "no_such_module_of_it" in run_probe(tensorrt).facts["error"]
    write_module("tensorrt", "import ctypes; ctypes.string_at(0)")
    assert "SIGSEGV" in run_probe(tensorrt).failure
    assert run_probe(
        Probe("edge_server.board.doctor.probes:_imported", ("no_such_library",))
    ).facts == {"missing": True}


def test_pycuda_without_a_driver_is_there_and_cannot_be_used(
    write_module: Callable[[str, str], None],
) -> None:
    write_module("pycuda", "VERSION_TEXT = '2026.1'")
    says = run_probe(Probe("edge_server.board.doctor.probes:pycuda")).facts
    assert says["version"] == "2026.1"
    assert says["error"].startswith("ModuleNotFoundError")


def test_opencv_is_asked_for_gstreamer(write_module: Callable[[str, str], None]) -> None:
    for word, has in (("YES (1.20.3)", True), ("NO", False)):
        built = f"  Video I/O:\\n    GStreamer:                   {word}\\n"
        write_module("cv2", f"__version__ = '4.8.0'\ndef getBuildInformation(): return '{built}'")
        assert run_probe(Probe("edge_server.board.doctor.probes:opencv")).facts["gstreamer"] is has


def test_the_real_libraries_answer() -> None:
    assert run_probe(Probe("edge_server.board.doctor.probes:opencv")).facts["version"]
    says = run_probe(Probe("edge_server.board.doctor.probes:onnxruntime")).facts
    assert "CPUExecutionProvider" in says["providers"]


def test_the_kernel_says_whether_its_clock_is_kept() -> None:
    assert isinstance(probes.kernel_clock()["synchronized"], bool)


def test_a_broker_takes_connections_or_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])
        assert probes.broker("127.0.0.1", port) == {}
    assert probes.broker("127.0.0.1", port) == {"error": os.strerror(111)}


def test_a_port_is_free_taken_or_not_to_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])

        def hang_up() -> None:
            listening.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        says = run_probe(
            Probe("edge_server.board.doctor.probes:grpc_port", ("127.0.0.1", port))
        ).facts
        assert says["free"] is False
        assert says["error"]
    assert probes.grpc_port("127.0.0.1", port) == {"free": True}
    assert "--grpc-address" in probes.grpc_port("192.0.2.1", port)["error"]


def test_a_process_that_gives_no_dict_gives_the_reason_instead() -> None:
    crash = run_probe(Probe("os:abort"))
    assert crash == ProbeResult(failure="the process that tried died of SIGABRT")
    hang = run_probe(Probe("signal:pause", timeout_s=0.5))
    assert hang.failure == "the process that tried gave no result within 0.5 s"
    assert run_probe(Probe("os:getcwd")).failure


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can probe as another user")
def test_root_probes_as_the_account_that_is_named() -> None:
    ids = "(lambda os: {'ids': [*os.getresuid(), *os.getgroups()]})(__import__('os'))"
    for account, expected in (
        (Account("edge-server", 990, frozenset({990, 44})), [990, 990, 990, 44, 990]),
        (Account("root", 0, frozenset({0})), [0, 0, 0, *os.getgroups()]),
    ):
        result = run_probe(Probe("builtins:eval", (ids,), account=account))
        assert result == ProbeResult({"ids": expected})
