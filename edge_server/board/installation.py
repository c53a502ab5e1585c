"""How edge_server was installed, which decides how to get a library that is missing, and
the models that came with it."""

from __future__ import annotations

import platform
from enum import Enum
from importlib import metadata
from importlib.resources import files
from pathlib import Path

# Beside edge_server in a checkout; no wheel and no package has it.
_SCRIPT = Path(__file__).parents[2] / "scripts/install_pycuda"
_REINSTALL = "sudo apt install --reinstall edge-server"
_SYSTEMS = ", in a venv with --system-site-packages"


class Installation(Enum):
    """By what edge_server was installed."""

    PACKAGE = "dpkg"
    WHEEL = "pip"
    CHECKOUT = "git"


def installation() -> Installation:
    """Return how the running edge_server was installed; the package's INSTALLER file names dpkg."""
    if _SCRIPT.is_file():
        return Installation.CHECKOUT
    try:
        installer = metadata.distribution("edge-server").read_text("INSTALLER") or ""
    except metadata.PackageNotFoundError:
        installer = ""
    return Installation.PACKAGE if installer.strip() == "dpkg" else Installation.WHEEL


def shipped_models() -> Path:
    """Return the repository that comes with this package; in a checkout the one beside it."""
    return Path(str(files("edge_server") / "models")).resolve()


def remedy(module: str, *, how: Installation | None = None, machine: str = "") -> str:
    """Return what makes a module of Python importable that is missing, or does not import.

    A module that edge_server does not know has the remedy of a damaged installation. `machine` is
    as the kernel names the processor.
    """
    how = how or installation()
    is_board = (machine or platform.machine()) == "aarch64"
    if how is Installation.PACKAGE:
        table = _OF_A_BOARDS_PACKAGE if is_board else _OF_A_PCS_PACKAGE
        return table.get(module, _REINSTALL)
    if how is Installation.CHECKOUT and module == "pycuda":
        return "build it with scripts/install_pycuda"
    if is_board and module in _FROM_APT:
        return f"sudo apt install {_FROM_APT[module]}{_SYSTEMS}"
    return _OF_A_WHEEL.get(module, "pip install --force-reinstall edge-server")


def missing(error: ImportError) -> str:
    """Return which library a failed import lacks, and the remedy: `LIBRARY is missing; …`."""
    library = (error.name or "").partition(".")[0]
    return f"{library} is missing; {remedy(library)}"


# The module of each framework's backend, and what pip installs for it. With the package, each has a
# virtual environment of its own.
FRAMEWORKS = {
    "pytorch": ("torch", "torch"),
    "tensorflow": ("tensorflow", "tensorflow"),
    "openvino": ("openvino", "openvino"),
    "paddle": ("paddle", "paddlepaddle"),
}


def _environment_for(backend: str, package: str) -> str:
    there = f"/opt/edge-server-{backend}"
    return (
        f"sudo apt install python3-venv && sudo python3 -m venv {there} && sudo {there}/bin/pip "
        f"install {package} msgspec numpy, and in edge-server.toml [python] interpreters = "
        f'{{ {backend} = "{there}/bin/python" }}'
    )


# The names are the same on Debian 12 and on JetPack 6 and 7.
GSTREAMER_BINDINGS = "python3-gi python3-gst-1.0 gir1.2-gst-plugins-base-1.0"
_FROM_APT = {"cv2": "python3-opencv", "tensorrt": "python3-libnvinfer"}
_OF_A_WHEEL = {
    **dict.fromkeys(("onnxruntime", "cv2"), "pip install 'edge-server[onnxruntime]'"),
    "tensorrt": "a Jetson has it (TensorRT plans run there), others have ONNX Runtime",
    "pycuda": "pip install --force-reinstall pycuda, with nvcc of this machine's CUDA on PATH",
    "cryptography": "pip install 'edge-server[signing]'",
    "mcap": "pip install 'edge-server[recorder]'",
    "foxglove_schemas_protobuf": "pip install 'edge-server[recorder]'",
    "gi": f"sudo apt install {GSTREAMER_BINDINGS}, and make the virtual environment with the "
    "system's own Python and --system-site-packages",
    **dict.fromkeys(("boto3", "requests", "oras"), "pip install 'edge-server[pull]'"),
    **{
        module: f"pip install 'edge-server[{backend}]'"
        for backend, (module, _) in FRAMEWORKS.items()
    },
}
# Of what is not listed, the package has its own.
_OF_A_PCS_PACKAGE = {
    "tensorrt": _OF_A_WHEEL["tensorrt"],
    "pycuda": "the package for PCs runs models on the CPU; a checkout of the sources with "
    "scripts/install_pycuda runs them on the GPU",
    "cryptography": "sudo apt install python3-cryptography",
    "boto3": "sudo apt install python3-boto3",
    "requests": "sudo apt install python3-requests",
    "jsonschema": "send it from a PC, with pip install 'edge-server[pull]'",
    "gi": f"sudo apt install {GSTREAMER_BINDINGS}",
    **{module: _environment_for(name, package) for name, (module, package) in FRAMEWORKS.items()},
}
_OF_A_BOARDS_PACKAGE = {
    **_OF_A_PCS_PACKAGE,
    **{module: f"sudo apt install {package}" for module, package in _FROM_APT.items()},
    "pycuda": f"{_REINSTALL}; if that has none either, it was built without "
    "scripts/build_pycuda_wheel",
}
