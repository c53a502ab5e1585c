"""Checks of TensorRT and of the NVDLA cores available to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.board.doctor.finding import fault, ok, warning

if TYPE_CHECKING:
    from edge_server.board.doctor.evidence import Evidence
    from edge_server.board.doctor.finding import Finding

_COMPILER = "libnvdla_compiler.so"
_REINSTALL = "sudo apt install --reinstall nvidia-l4t-dla-compiler"
_REFERENCE = "JetPack 6.2 supports them; see edge-server doctor --matrix"


def tensorrt(evidence: Evidence) -> Finding:
    """TensorRT can be imported, and on a Jetson it is JetPack's own."""
    answer, board = evidence.answer("tensorrt"), evidence.board
    says = answer.says
    if answer.trouble or says.get("error"):
        found = f"TensorRT cannot be imported: {answer.trouble or says['error']}"
        if _COMPILER in found:
            return fault(
                found,
                "in a container built for JetPack 6, use the host's TensorRT; "
                f"elsewhere: {_REINSTALL}",
            )
        return fault(
            found,
            "sudo apt install --reinstall python3-libnvinfer, and remove wheels: "
            "pip uninstall tensorrt",
        )
    if says.get("missing"):
        if not board.is_jetson:
            return ok("none: ONNX models run with ONNX Runtime, TensorRT plans do not run")
        return fault(
            f"TensorRT is not there for Python {evidence.python}: plans do not run",
            "sudo apt install python3-libnvinfer, in a venv with --system-site-packages",
        )
    found = f"TensorRT {says['version']}"
    if not board.is_jetson:
        return ok(found)
    if not says["file"].startswith("/usr/lib/"):
        return warning(
            f"{found} from {says['file']} hides JetPack's own, which fits the board",
            "pip uninstall tensorrt, and use python3-libnvinfer of JetPack",
        )
    brought = board.jetpack.tensorrt if board.jetpack else None
    if brought is not None and not _same_release(says["version"], brought):
        return ok(
            f"{found}; JetPack {board.jetpack.version if board.jetpack else '?'} "
            f"brought {brought}: plans must be built anew"
        )
    return ok(found)


def nvdla(evidence: Evidence) -> Finding:
    """TensorRT finds the module's NVDLA cores, where this JetPack supports them."""
    answer, board = evidence.answer("nvdla"), evidence.board
    if not board.is_jetson:
        return ok("none: Jetson Orin NX and AGX Orin have them")
    if board.module is not None and not board.module.nvdla_cores:
        return ok(f"{board.module.name} has none: models run on its GPU")
    cores = answer.says.get("cores")
    if cores is not None and (board.module is None or cores >= board.module.nvdla_cores):
        return ok(f"{cores} cores")
    why = _unsupported(evidence)
    if why:
        return warning(
            f"{why}: models that ask for it are UNAVAILABLE, or run on the GPU where they may",
            _REFERENCE,
        )
    if not evidence.driver_works or "version" not in evidence.answer("tensorrt").says:
        return warning("unknown until driver and TensorRT work", "mend those first")
    found = answer.trouble or answer.says.get("error") or f"{cores} cores"
    return fault(
        f"{found}, where {board.module.nvdla_cores if board.module else 'some'} should be",
        f"ls -l /dev/nvhost-*nvdla*; {_REINSTALL}",
    )


def nvdla_compiler(evidence: Evidence) -> Finding:
    """The NVDLA compiler library, required by TensorRT on JetPack 6, is installed.

    Without it `import tensorrt` fails, and models silently run on the CPU.
    """
    board = evidence.board
    if board.nvdla_compiler is not None:
        return ok(board.nvdla_compiler)
    if board.jetpack is None or board.jetpack.nvdla != "yes":
        return ok("none, and none belongs here")
    return fault(
        f"{_COMPILER} is not there: TensorRT of JetPack {board.jetpack.version} needs it",
        f"{_REINSTALL}; in a container: --runtime nvidia",
    )


def _unsupported(evidence: Evidence) -> str:
    """Return why the module's cores cannot be used here; empty where no reason is known."""
    board = evidence.board
    if board.jetpack is None:
        return ""
    version = evidence.answer("tensorrt").says.get("version", "")
    if board.jetpack.nvdla == "no":
        return f"JetPack {board.jetpack.version} does not support Orin's NVDLA"
    if board.jetpack.nvdla == "agx":
        if board.module is not None and board.module.family != "AGX":
            return f"JetPack {board.jetpack.version} supports NVDLA on AGX Orin only"
        if version and _numbers(version) < (11, 4):
            return f"TensorRT {version} does not support Orin's NVDLA, 11.4.1 does on AGX Orin"
    return ""


def _same_release(one: str, other: str) -> bool:
    """Return whether major and minor number agree."""
    return _numbers(one) == _numbers(other)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
