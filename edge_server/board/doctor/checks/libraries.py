"""Checks of the libraries that run models and read images, and of the NVDLA cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.board.doctor.evidence import fault, ok, warning
from edge_server.board.installation import remedy

if TYPE_CHECKING:
    from edge_server.board.doctor.evidence import Evidence, Finding

_COMPILER = "libnvdla_compiler.so"
_REINSTALL = "sudo apt install --reinstall nvidia-l4t-dla-compiler"
_REFERENCE = "JetPack 6.2 supports them; see edge-server doctor --matrix"


def tensorrt(evidence: Evidence) -> Finding:
    """TensorRT can be imported, and on a Jetson it is JetPack's own."""
    result, board = evidence.result("tensorrt"), evidence.board
    facts = result.facts
    if result.problem:
        found = f"TensorRT cannot be imported: {result.problem}"
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
    if facts.get("missing"):
        if not board.is_jetson:
            return ok("none: ONNX models run with ONNX Runtime, TensorRT plans do not run")
        return fault(
            f"TensorRT is not there for Python {evidence.python}: plans do not run",
            remedy("tensorrt", machine="aarch64"),
        )
    found = f"TensorRT {facts['version']}"
    if not board.is_jetson:
        return ok(found)
    if not facts["file"].startswith("/usr/lib/"):
        return warning(
            f"{found} from {facts['file']} hides JetPack's own, which fits the board",
            "pip uninstall tensorrt, and use python3-libnvinfer of JetPack",
        )
    brought = board.jetpack.tensorrt if board.jetpack else None
    if brought is not None and not _same_release(facts["version"], brought):
        return ok(
            f"{found}; JetPack {board.jetpack.version if board.jetpack else '?'} "
            f"brought {brought}: plans must be built anew"
        )
    return ok(found)


def nvdla(evidence: Evidence) -> Finding:
    """TensorRT finds the module's NVDLA cores, where this JetPack supports them."""
    result, board = evidence.result("nvdla"), evidence.board
    if not board.is_jetson:
        return ok("none: Jetson Orin NX and AGX Orin have them")
    if board.module is not None and not board.module.nvdla_cores:
        return ok(f"{board.module.name} has none: models run on its GPU")
    cores = result.facts.get("cores")
    if cores is not None and (board.module is None or cores >= board.module.nvdla_cores):
        return ok(f"{cores} cores")
    why = _unsupported(evidence)
    if why:
        return warning(
            f"{why}: models that ask for it are UNAVAILABLE, or run on the GPU where they may",
            _REFERENCE,
        )
    if not evidence.driver_works or "version" not in evidence.result("tensorrt").facts:
        return warning("unknown until driver and TensorRT work", "mend those first")
    found = result.problem or f"{cores} cores"
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
    version = evidence.result("tensorrt").facts.get("version", "")
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


def onnxruntime(evidence: Evidence) -> Finding:
    """ONNX Runtime, or TensorRT instead, can be imported."""
    result = evidence.result("onnxruntime")
    facts = result.facts
    if result.problem:
        found = f"ONNX Runtime cannot be imported: {result.problem}"
        return fault(found, remedy("onnxruntime"))
    if facts.get("missing"):
        found = "ONNX Runtime is not installed: ONNX models do not run"
        if "version" in evidence.result("tensorrt").facts:
            return warning(f"{found}, TensorRT plans do", remedy("onnxruntime"))
        return fault(found, remedy("onnxruntime"))
    providers = ", ".join(
        name.removesuffix("ExecutionProvider") for name in facts.get("providers", ())
    )
    return ok(f"ONNX Runtime {facts['version']} ({providers})")


def opencv(evidence: Evidence) -> Finding:
    """OpenCV can be imported; on a Jetson it is JetPack's own."""
    result, board = evidence.result("opencv"), evidence.board
    facts = result.facts
    machine = "aarch64" if board.is_jetson else ""
    if result.problem:
        return fault(f"OpenCV cannot be imported: {result.problem}", remedy("cv2", machine=machine))
    if facts.get("missing"):
        found = "OpenCV is not installed: no camera, no image can be read"
        return fault(found, remedy("cv2", machine=machine))
    found = f"OpenCV {facts['version']}, GStreamer: {'YES' if facts.get('gstreamer') else 'NO'}"
    if not board.is_jetson:
        return ok(found)
    if not facts["file"].startswith("/usr/lib/"):
        return warning(
            f"{found}; a wheel hides JetPack's own: {facts['file']}",
            f"pip uninstall opencv-python opencv-python-headless; {remedy('cv2', machine=machine)}",
        )
    return ok(found)
