"""Checks of the cameras: device files, Argus, and GStreamer, which reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.board.doctor.checks.gpu import join_groups
from edge_server.board.doctor.evidence import fault, ok, warning

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.board.doctor.evidence import Evidence, Finding

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
