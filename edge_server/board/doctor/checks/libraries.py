"""The libraries that run models and read images on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.board.doctor.finding import fault, ok, warning

if TYPE_CHECKING:
    from edge_server.board.doctor.evidence import Evidence
    from edge_server.board.doctor.finding import Finding


def onnxruntime(evidence: Evidence) -> Finding:
    """ONNX Runtime, or TensorRT instead, can be imported."""
    answer = evidence.answer("onnxruntime")
    says = answer.says
    if answer.trouble or says.get("error"):
        found = f"ONNX Runtime cannot be imported: {answer.trouble or says['error']}"
        return fault(found, "pip install --force-reinstall onnxruntime")
    if says.get("missing"):
        found = "ONNX Runtime is not installed: ONNX models do not run"
        remedy = "pip install onnxruntime"
        if "version" in evidence.answer("tensorrt").says:
            return warning(f"{found}, TensorRT plans do", remedy)
        return fault(found, remedy)
    providers = ", ".join(
        name.removesuffix("ExecutionProvider") for name in says.get("providers", ())
    )
    return ok(f"ONNX Runtime {says['version']} ({providers})")


def opencv(evidence: Evidence) -> Finding:
    """OpenCV can be imported; on a Jetson it is JetPack's own, which has GStreamer."""
    answer, board = evidence.answer("opencv"), evidence.board
    says = answer.says
    jetpacks = "sudo apt install python3-opencv, in a venv with --system-site-packages"
    remedy = jetpacks if board.is_jetson else "pip install opencv-python-headless"
    if answer.trouble or says.get("error"):
        return fault(f"OpenCV cannot be imported: {answer.trouble or says['error']}", remedy)
    if says.get("missing"):
        return fault("OpenCV is not installed: no camera, no image can be read", remedy)
    found = f"OpenCV {says['version']}, GStreamer: {'YES' if says.get('gstreamer') else 'NO'}"
    if not board.is_jetson:
        return ok(found)
    if not says["file"].startswith("/usr/lib/"):
        return warning(
            f"{found}; a wheel hides JetPack's own: {says['file']}",
            f"pip uninstall opencv-python opencv-python-headless; {jetpacks}",
        )
    if not says.get("gstreamer"):
        return warning(
            f"{found}: neither CSI cameras nor the board's decoders can be used",
            "sudo apt install --reinstall libopencv-python",
        )
    return ok(found)
