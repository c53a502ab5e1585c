"""Probes of libraries, the network and the kernel; each runs in its own process.

Each returns a dict that JSON can encode. A probe imports its library by name, because the import
itself is the test. `{"missing": true}` stands for a library that is not installed; for an installed
library whose import fails, `error` gives the reason.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib
import os
import re
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

from edge_server.board.board import UNIT
from edge_server.board.listening import host_and_port, listener, remedy
from edge_server.board.watch import kernel_synchronized

Facts = dict[str, Any]

# nvme_ioctl.h: NVME_IOCTL_ADMIN_CMD; and of the NVMe base specification: Get Log Page, log 2.
_NVME_ADMIN = 0xC0484E41
_GET_LOG_PAGE, _SMART_LOG, _SMART_BYTES = 0x02, 0x02, 512
_SMART_TIMEOUT_MS = 2000

# libcudart's names: with the development packages, then of CUDA 13, 12 and 11.
_CUDARTS = ("libcudart.so", "libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0")
_CUDART_DIRECTORIES = ("", "/usr/local/cuda/lib64/")

# By name: what touches CUDA lies above this room. Here: the user of a probe may not read it.
_gpu: Any = importlib.import_module("edge_server.gpu.device")


def driver() -> Facts:
    """Report whether CUDA's driver starts for the user of this process, its version, and its
    devices."""
    facts: Facts = _gpu.driver_facts()
    return facts


def cuda_runtime() -> Facts:
    for directory in _CUDART_DIRECTORIES:
        for name in _CUDARTS:
            try:
                library = ctypes.CDLL(directory + name)
            except OSError:
                continue
            version = ctypes.c_int()
            code = library.cudaRuntimeGetVersion(ctypes.byref(version))
            if code:
                return {"error": f"{directory}{name}: cudaRuntimeGetVersion gives {code}"}
            return {"version": _cuda_version(version.value), "library": directory + name}
    return {"missing": True}


def pycuda() -> Facts:
    """Report whether pycuda and its driver module can be imported."""
    facts = _imported("pycuda", "VERSION_TEXT")
    if "version" in facts:
        try:
            importlib.import_module("pycuda.driver")
        except Exception as error:  # noqa: BLE001 - a library's import may raise any exception
            facts["error"] = _summary(error)
    return facts


def tensorrt() -> Facts:
    return _imported("tensorrt")


def nvdla() -> Facts:
    """Report the number of NVDLA cores that TensorRT's runtime finds.

    Without a working driver such a runtime ends the process, so the driver is probed first.
    """
    found = driver()
    if found.get("init") != 0:
        return {"error": found["error"]}
    module: Any = importlib.import_module("tensorrt")
    runtime = module.Runtime(module.Logger(module.Logger.ERROR))
    # Never destroyed: where CUDA's versions do not fit, the destructor ends the process.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(runtime))
    return {"cores": int(runtime.num_DLA_cores)}


def opencv() -> Facts:
    facts = _imported("cv2")
    if "version" in facts:
        built: str = importlib.import_module("cv2").getBuildInformation()
        line = re.search(r"^\s*GStreamer:\s*(\S+)", built, re.MULTILINE)
        facts["gstreamer"] = line is not None and line[1] == "YES"
    return facts


def gstreamer() -> Facts:
    """Report GStreamer's version and decoders, and what each kind of camera lacks."""
    # By name: the reader of cameras lies above this room.
    facts: Facts = importlib.import_module("edge_server.cameras.gstreamer").report()
    return facts


def onnxruntime() -> Facts:
    facts = _imported("onnxruntime")
    if "version" in facts:
        facts["providers"] = importlib.import_module("onnxruntime").get_available_providers()
    return facts


def kernel_clock() -> Facts:
    """Report whether the kernel's clock is synchronized: every time daemon sets that flag."""
    synchronized = kernel_synchronized()
    return (
        {"error": "it may not be read"} if synchronized is None else {"synchronized": synchronized}
    )


def nvme_wear() -> Facts:
    """Report each NVMe drive's own account of its wear, which the kernel has in no file; only root
    may ask a drive."""
    found: Facts = {}
    for path in sorted(Path("/dev").glob("nvme[0-9]")):
        try:
            found[path.name] = parse_smart_log(_smart_log(path))
        except OSError as error:
            found[path.name] = {"error": error.strerror or str(error)}
    return found


def _smart_log(path: Path) -> bytes:
    """Return the SMART / Health Information log of a drive: Get Log Page of the NVMe base
    specification, by nvme_ioctl.h."""
    log = ctypes.create_string_buffer(_SMART_BYTES)
    dwords = _SMART_BYTES // 4 - 1
    command = struct.pack(
        "=BBHIIIQQIIIIIIIIII",
        *(_GET_LOG_PAGE, 0, 0, 0xFFFFFFFF, 0, 0, 0),
        *(ctypes.addressof(log), 0, _SMART_BYTES, dwords << 16 | _SMART_LOG, 0, 0, 0, 0, 0),
        *(_SMART_TIMEOUT_MS, 0),
    )
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if status := fcntl.ioctl(file, _NVME_ADMIN, bytearray(command)):
            raise OSError(f"the drive refuses: status {status:#x}")
    finally:
        os.close(file)
    return log.raw


def parse_smart_log(log: bytes) -> Facts:
    """Return the warning bits, the spare blocks and the used share of a drive's life, in percent.

    Beyond 100 the drive has outlived what its maker promised.
    """
    return {
        "critical_warning": log[0],
        "spare_percent": log[3],
        "spare_limit_percent": log[4],
        "used_percent": log[5],
    }


def unit() -> Facts:
    wanted = ["ActiveState", "SubState", "Result", "ExecMainStatus", "NRestarts", "UnitFileState"]
    done = subprocess.run(  # noqa: S603
        ["systemctl", "show", UNIT, f"--property={','.join(wanted)}"],  # noqa: S607
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    if done.returncode:
        return {"error": done.stderr.strip()}
    return dict(line.partition("=")[::2] for line in done.stdout.splitlines())


def grpc_port(host: str, port: str) -> Facts:
    try:
        listener(host, int(port)).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return {"error": remedy(error, "--grpc")}
    else:
        return {"free": True}
    facts: Facts = {"free": False}
    grpc: Any = importlib.import_module("tritonclient.grpc")
    wanted = host_and_port(host, int(port))
    client = grpc.InferenceServerClient(wanted)
    try:
        metadata = client.get_server_metadata(client_timeout=2)
    except grpc.InferenceServerException as error:
        facts["error"] = str(error)
    else:
        facts.update(name=metadata.name, version=metadata.version)
    return facts


def broker(host: str, port: str) -> Facts:
    try:
        socket.create_connection((host, int(port)), timeout=4).close()
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {}


def _imported(name: str, version: str = "__version__") -> Facts:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        return {"missing": True} if error.name == name else {"error": _summary(error)}
    except Exception as error:  # noqa: BLE001 - a library's import may raise any exception
        return {"error": _summary(error)}
    return {"version": str(getattr(module, version, "?")), "file": module.__file__ or ""}


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
