"""Checks of the daemon's environment: its settings, port, broker and unit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.board.doctor.hardware import fault, join_groups, ok, warning
from edge_server.board.installation import remedy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.board.doctor.hardware import Evidence, Finding

# What OpenCV cannot read.
_GSTREAMER_ONLY = ("csi", "gst")
_KINDS = {"rtsps": "rtsp", "https": "http"}
_HARDWARE_DECODER = "nvv4l2decoder"


def cameras(evidence: Evidence) -> Finding:
    """The daemon's user may open every connected camera."""
    board = evidence.board
    user = board.account.name
    absent = [
        f"{name} ({uri})"
        for name, uri in _configured(evidence).items()
        if uri.startswith("/dev/video") and all(uri != each.path for each in board.cameras)
    ]
    if absent:
        return fault(
            f"configured, and not connected: {', '.join(absent)}",
            "connect it, or see what is there: edge-server cameras list",
        )
    if not board.cameras:
        return ok("no /dev/video*; cameras in the network and recordings need none")
    refused = [camera for camera in board.cameras if not camera.usable]
    if refused:
        names = ", ".join(camera.path for camera in refused)
        remedy = join_groups(refused, user) or f"sudo chgrp video {refused[0].path}, in a udev rule"
        return fault(f"closed to {user}: {names}", remedy)
    return ok(", ".join(f"{each.path} ({each.label or 'unnamed'})" for each in board.cameras))


def argus(evidence: Evidence) -> Finding:
    """Argus listens, if a CSI camera needs it."""
    board = evidence.board
    if not any(camera.is_csi for camera in board.cameras):
        if board.is_jetson and (needing := _cameras_of(evidence, ("csi",))):
            return fault(
                f"the kernel has found no CSI sensor: {needing} cannot be read",
                "look at its cable, and for it in the device tree: dmesg | grep -i imx",
            )
        return ok("no CSI camera is connected")
    if not board.argus:
        return warning(
            "a CSI camera is there, and Argus, which reads it, does not listen in /tmp",
            "sudo systemctl restart nvargus-daemon; in a container: -v /tmp:/tmp",
        )
    return ok("listens")


def gstreamer(evidence: Evidence) -> Finding:
    """GStreamer reads the configured cameras, and on a Jetson decodes in hardware."""
    result, is_jetson = evidence.result("gstreamer"), evidence.board.is_jetson
    facts = result.facts
    if result.problem or facts.get("missing"):
        reason, remedy = _split(result.problem or facts["reason"])
        remedy = remedy or "sudo apt install --reinstall python3-gi python3-gst-1.0"
        needing = _cameras_of(evidence, _GSTREAMER_ONLY)
        if needing:
            return fault(f"{reason}: {needing} cannot be read", remedy)
        if is_jetson:
            found = "CSI cameras are not read, others are decoded on the CPU"
            return warning(f"{reason}: {found}", remedy)
        return ok(f"{reason}: OpenCV reads cameras, without csi:// and gst:")
    lacking: Mapping[str, str] = facts["lacking"]
    for kind, text in lacking.items():
        reason, remedy = _split(text)
        if needing := _cameras_of(evidence, (kind,)):
            return fault(f"{reason}: {needing} cannot be read by it", remedy)
        if is_jetson:
            return warning(f"{reason}: {kind}:// is not read by it", remedy)
    decoders = ", ".join(f"{codec} by {name}" for codec, name in facts["decoders"].items())
    without = [f"; no {kind}://: {_split(text)[0]}" for kind, text in lacking.items()]
    found = f"{facts['version']}: {decoders}{''.join(without)}"
    if is_jetson and set(facts["decoders"].values()) != {_HARDWARE_DECODER}:
        return warning(
            f"{found}: decoded on the CPU",
            "sudo apt install nvidia-l4t-gstreamer; rm -r ~/.cache/gstreamer-1.0",
        )
    return ok(found)


def _configured(evidence: Evidence) -> Mapping[str, str]:
    settings = evidence.configuration.settings
    return {} if settings is None else {name: each.uri for name, each in settings.cameras.items()}


def _cameras_of(evidence: Evidence, kinds: tuple[str, ...]) -> str:
    return ", ".join(name for name, uri in _configured(evidence).items() if _kind_of(uri) in kinds)


def _kind_of(uri: str) -> str:
    if uri.startswith("/dev/video"):
        return "v4l2"
    scheme = uri.partition(":")[0].lower()
    return _KINDS.get(scheme, scheme)


def _split(text: str) -> tuple[str, str]:
    """Return the cause and the next step, which the last semicolon parts."""
    cause, _, remedy = text.rpartition("; ")
    return (cause, remedy) if cause else (remedy, "")


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
            return ok("none: TensorRT plans do not run, and the lane network runs on the CPU")
        return fault(
            f"TensorRT is not there for Python {evidence.python}: plans do not run, and the lane "
            "network runs on the CPU, degraded",
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
        return warning("unknown until driver and TensorRT work", "fix those first")
    found = result.problem or f"{cores} cores"
    return fault(
        f"{found}, where {board.module.nvdla_cores if board.module else 'some'} should be",
        f"ls -l /dev/nvhost-*nvdla*; {_REINSTALL}",
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


_LATER = "unknown until the settings can be read"
# The daemon's exit code for a configuration error.
_CONFIGURATION = "78"


def models(evidence: Evidence) -> Finding:
    """Each model that prefers some of its configurations is served by the first of them."""
    if evidence.configuration.settings is None:
        return warning(_LATER, "fix those first")
    if evidence.configuration.path is None:
        return ok("no file of settings names a repository")
    result, check = evidence.result("models"), f"edge-server check{_config(evidence)}"
    if result.problem:
        return warning(f"which configurations would serve is unknown: {result.problem}", check)
    found: dict[str, list[str]] = {"error": [], "degraded": [], "serves": []}
    for name, facts in result.facts.items():
        for kind, text in facts.items():
            found[kind].append(f"{name}: {text}")
    text = "; ".join(each for texts in found.values() for each in texts)
    if found["error"]:
        return fault(text, check)
    if found["degraded"]:
        return warning(text, f"sudo systemctl restart edge-server-plans builds plans; {check}")
    return ok(text or "none prefers a further configuration")


def settings(evidence: Evidence) -> Finding:
    """The daemon can read its settings."""
    configuration = evidence.configuration
    if configuration.settings is None:
        return fault(configuration.error, f"fix it; then edge-server check{_config(evidence)}")
    notes = configuration.settings.without_effect()
    if notes:
        return warning("; ".join(notes), f"edge-server check{_config(evidence)}")
    if configuration.path is None:
        return ok("no file: the defaults count")
    return ok(f"{configuration.path} can be read")


def grpc_port(evidence: Evidence) -> Finding:
    """The port is free, or held by the daemon itself."""
    if evidence.configuration.settings is None:
        return warning(_LATER, "fix those first")
    wanted = evidence.configuration.settings.grpc
    if not wanted.enabled or wanted.port == 0:
        return ok("any that is free" if wanted.enabled else "gRPC is off")
    result = evidence.result("grpc_port")
    facts = result.facts
    where = f"{wanted.host}:{wanted.port}"
    if facts.get("free"):
        return ok(f"{where} is free")
    stop = "stop what holds it (sudo ss -ltnp), or choose another with --grpc-port"
    if result.failure or "free" not in facts:
        return fault(f"{where}: {result.problem}", stop)
    if "name" in facts:
        them = f"{facts['name']} {facts['version']}"
        ours = f"{evidence.configuration.settings.serving.name} {evidence.version}"
        if them == ours:
            return ok(f"{where} responds as {them}: the daemon runs")
        return fault(f"{where} is taken by {them}, and this is {ours}", stop)
    if evidence.result("unit").facts.get("ActiveState") == "active":
        return ok(f"{where} is taken, likely by the daemon, which runs")
    if wanted.tls.on or wanted.restricted:
        return warning(
            f"{where} is taken, by a daemon or something else: it does not identify itself", stop
        )
    return fault(f"{where} is taken by something that does not speak Triton's protocol", stop)


def broker(evidence: Evidence) -> Finding:
    """The configured MQTT broker accepts connections."""
    if evidence.configuration.settings is None:
        return warning(_LATER, "fix those first")
    wanted = evidence.configuration.settings.mqtt
    if wanted is None:
        return ok("none is configured: nothing is published")
    result = evidence.result("broker")
    where = f"{wanted.host}:{wanted.port}"
    if result.problem:
        return warning(
            f"{where}: {result.problem}; the daemon runs without it, and tries again",
            f"start it, or give its address: [mqtt] in the settings{_config(evidence)}",
        )
    return ok(f"{where} takes connections")


def unit(evidence: Evidence) -> Finding:
    """systemd restarts the daemon after a crash and a reboot."""
    board = evidence.board
    if not board.systemd:
        return ok("systemd does not run here")
    if board.unit is None:
        return warning(
            "not installed: after a restart of the machine no daemon runs",
            "put edge-server.service into /etc/systemd/system; "
            "sudo systemctl enable --now edge-server",
        )
    result = evidence.result("unit")
    state = result.facts.get("ActiveState")
    if state is None:
        problem = result.problem or "systemd does not report its state"
        return warning(f"{board.unit.path}: {problem}", "systemctl status edge-server")
    restarts = result.facts.get("NRestarts", "0")
    found = f"{state} ({result.facts.get('SubState', '?')})"
    if restarts not in ("0", ""):
        found += f", restarted {restarts} times"
    if state == "failed":
        wrong = result.facts.get("ExecMainStatus") == _CONFIGURATION
        return fault(
            f"{found}: {result.facts.get('Result', '?')}",
            f"edge-server check{_config(evidence)}" if wrong else "journalctl -u edge-server -n 50",
        )
    if result.facts.get("SubState") == "auto-restart":
        return fault(f"{found}: it ends and is tried again", "journalctl -u edge-server -n 50")
    if state not in ("active", "activating", "reloading"):
        return warning(found, "sudo systemctl enable --now edge-server")
    if result.facts.get("UnitFileState") == "disabled":
        return warning(
            f"{found}, but not after a restart of the machine", "sudo systemctl enable edge-server"
        )
    return ok(found)


def _config(evidence: Evidence) -> str:
    path = evidence.configuration.path
    return "" if path is None else f" --config {path}"
