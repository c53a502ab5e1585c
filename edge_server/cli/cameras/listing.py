"""`edge-server cameras list`: video devices, CSI sensors, and the readers that can be used."""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING, Any

from edge_server.cameras.gstreamer import gstreamer_missing
from edge_server.cameras.opencv_settings import opencv_report
from edge_server.cameras.v4l2 import VideoDevice, video_devices
from edge_server.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from edge_server.cameras.gstreamer_pipelines import VideoMode

_KINDS = ("csi", "v4l2", "rtsp", "http")


def list_cameras(devices: Path, *, as_json: bool = False) -> Iterator[str]:
    """Yield lines about the cameras below `devices` (/dev), or one JSON object."""
    found = list(video_devices(devices))
    cameras = [each for each in found if isinstance(each, VideoDevice)]
    faults = [str(each) for each in found if isinstance(each, SourceError)]
    uris = _uris(cameras)
    gstreamer = {kind: gstreamer_missing(kind) for kind in _KINDS}
    opencv = opencv_report()
    if as_json:
        report = {
            "cameras": [_object(uri, each) for uri, each in zip(uris, cameras, strict=True)],
            "faults": faults,
            "readers": {
                "gstreamer": {kind: missing or None for kind, missing in gstreamer.items()},
                "opencv": opencv,
            },
        }
        yield json.dumps(report, indent=2)
        return
    for uri, camera in zip(uris, cameras, strict=True):
        yield f"{uri}  {camera.name} ({camera.driver})"
        for line in _modes(camera.modes):
            yield f"    {line}"
        if camera.other_formats and not uri.startswith("csi:"):
            yield f"    also {', '.join(camera.other_formats)}, which neither reader takes"
    for fault in faults:
        yield f"fault: {fault}"
    if not found:
        yield f"no camera in {devices}; cameras in the network are not searched for"
    for line in _readers(gstreamer, opencv):
        yield line


def _uris(cameras: Sequence[VideoDevice]) -> list[str]:
    """Return the URI of each camera: of a CSI sensor by its number among them, which is how Argus
    counts (not seen on a board)."""
    csi = [each.path for each in cameras if _is_csi(each)]
    return [f"csi://{csi.index(each.path)}" if each.path in csi else each.path for each in cameras]


def _is_csi(camera: VideoDevice) -> bool:
    """The driver of Tegra's CSI receiver names its devices like `vi-output, imx219 9-0010`."""
    return camera.name.startswith("vi-output")


def _modes(modes: Sequence[VideoMode]) -> Iterator[str]:
    """Yield a line for each format, with its sizes and their highest rate."""
    for form, group in groupby(sorted(modes, key=lambda mode: mode.format), lambda m: m.format):
        sizes: dict[tuple[int, int], float] = {}
        for mode in group:
            sizes[mode.size] = max(float(mode.fps), sizes.get(mode.size, 0.0))
        texts = (
            f"{size[0]} x {size[1]} at {fps:g}" for size, fps in sorted(sizes.items(), reverse=True)
        )
        yield f"{form}: {', '.join(texts)} fps"


def _readers(gstreamer: dict[str, str], opencv: dict[str, Any]) -> Iterator[str]:
    reasons = set(gstreamer.values())
    if len(reasons) == 1:
        (reason,) = reasons
        yield f"GStreamer: {reason or 'reads every kind of camera'}"
    else:
        for kind, missing in gstreamer.items():
            yield f"GStreamer, {kind}: {missing or 'can be read'}"
    backends = ", ".join(opencv["backends"]) or "neither FFmpeg nor V4L2, so it reads no camera"
    yield f"OpenCV {opencv['version']}: {backends}"


def _object(uri: str, camera: VideoDevice) -> dict[str, Any]:
    return {
        "uri": uri,
        "path": camera.path,
        "name": camera.name,
        "driver": camera.driver,
        "modes": [
            {
                "format": mode.format,
                "width": mode.size[0],
                "height": mode.size[1],
                "fps": round(float(mode.fps), 3),
            }
            for mode in camera.modes
        ],
        "other_formats": list(camera.other_formats),
    }
