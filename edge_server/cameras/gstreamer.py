"""GStreamer as the reader of live cameras, and the choice between it and OpenCV.

`open_gstreamer` opens one, `gstreamer_missing` says why that cannot work here. Beside this file are
`gstreamer_pipelines` (the table), `gstreamer_player` and `gstreamer_frames`.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, Literal

from edge_server.board.installation import remedy
from edge_server.cameras.gstreamer_frames import load_gstreamer
from edge_server.cameras.gstreamer_pipelines import (
    CODEC_NAMES,
    first_decoder,
    missing_elements,
    pipeline_of,
)
from edge_server.cameras.gstreamer_player import GstreamerStream, registry_has
from edge_server.cameras.live_source import LiveSource
from edge_server.cameras.network import PORTS, addresses_of
from edge_server.errors import SourceError, SourceUriError
from edge_server.process.logs import log_once

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.cameras.frame import FrameSource
    from edge_server.cameras.source_uri import SourceOptions, SourceUri

log = logging.getLogger(__name__)

_FIRST_FRAME_S = 8.0
# A driver stamps a frame at the end of its exposure and transfer; Argus after its own queue.
_LATE_PERIODS = {"v4l2": 1, "csi": 3}
_CLOCKS: Mapping[str, Literal["sensor", "rtp"]] = {
    "csi": "sensor",
    "v4l2": "sensor",
    "rtsp": "rtp",
    "rtsps": "rtp",
}


def gstreamer_missing(scheme: str = "") -> str:
    """Return why GStreamer cannot read here, cameras of `scheme` where one is given, with the
    packages to install; "" if it can. They have the same names on Debian 12 and JetPack 6 and 7."""
    try:
        load_gstreamer()
    except ModuleNotFoundError as error:
        if error.name != "gi":
            raise
        version = "{}.{}".format(*sys.version_info)
        return f"PyGObject is not there for Python {version}; {remedy('gi')}"
    except ImportError as error:
        return f"PyGObject cannot be imported: {error}; {remedy('gi')}"
    except ValueError as error:
        return f"GStreamer's bindings are incomplete: {error}; {remedy('gi')}"
    if not registry_has("appsink"):
        return "GStreamer has no appsink; apt install gstreamer1.0-plugins-base"
    return missing_elements(scheme, registry_has) if scheme else ""


def report() -> dict[str, Any]:
    """Return what `edge-server doctor` reports: GStreamer's `version`, the `decoders` by codec, and
    what each kind of camera is `lacking`; or `missing`, and the `reason`."""
    missing = gstreamer_missing()
    if missing:
        return {"missing": True, "reason": missing}
    found = {name: first_decoder(codec, registry_has) for codec, name in CODEC_NAMES.items()}
    kinds = {kind: gstreamer_missing(kind) for kind in ("csi", "v4l2", "rtsp", "http")}
    return {
        "version": load_gstreamer().gst.version_string(),
        "decoders": {name: element for name, element in found.items() if element},
        "lacking": {kind: text for kind, text in kinds.items() if text},
    }


def open_gstreamer(uri: SourceUri, options: SourceOptions) -> LiveSource:
    """Open a live camera and read its first frame.

    Raises:
        SourceError: the camera delivers no frame; the text names the cause and the next step.
        SourceUriError: the URI is wrong.
    """
    missing = gstreamer_missing()
    if missing:
        raise uri.fault(missing)
    try:
        pipeline = pipeline_of(uri, options, registry_has)
        log.debug("%s: %s", uri.label, "a pipeline" if uri.scheme == "gst" else pipeline.text)
        hosts = addresses_of(uri) if uri.scheme in PORTS else ()
        stream = GstreamerStream(uri, pipeline, options, hosts)
    except SourceUriError:
        raise
    except SourceError as error:
        raise uri.fault(str(error), error.reason) from error
    return LiveSource(
        stream,
        uri,
        _CLOCKS.get(uri.scheme, "arrival"),
        first_frame_s=_FIRST_FRAME_S,
        late_periods=_LATE_PERIODS.get(uri.scheme, 0),
    )


# What only GStreamer reads, and where it can be.
_GSTREAMER_ONLY = {
    "csi": "a CSI camera is read by GStreamer with JetPack's nvarguscamerasrc, on a Jetson; "
    "elsewhere use /dev/video0, an rtsp:// camera or a video file",
    "gst": "a pipeline is run by GStreamer",
}
# What OpenCV's reader cannot do, of the kinds that both read.
_LOST = {
    "v4l2": "frames are converted to BGR on the CPU, and their time is that of their arrival",
    "http": "JPEG is decoded on the CPU",
    "rtsp": "decoding in hardware, the camera's NTP time, its own pixels and colours (frames are "
    "BGR, and OpenCV before 5 takes BT.709 for BT.601)",
}
_LOST |= {"https": _LOST["http"], "rtsps": _LOST["rtsp"]}


def open_live(uri: SourceUri, options: SourceOptions) -> FrameSource:
    """Open a live camera with GStreamer, or where `why_opencv` says why, with OpenCV.

    Raises:
        SourceError: the camera delivers no frame; the text names the cause and the next step.
        SourceUriError: the chosen reader never reads such a camera.
    """
    why = why_opencv(uri, options.reader)
    if not why:
        log_once(log, f"camera source {uri.label}: read by GStreamer")
        return open_gstreamer(uri, options)
    without = _LOST[uri.scheme]
    log_once(log, f"camera source {uri.label}: read by OpenCV, {why}; without: {without}")
    from edge_server.cameras.opencv_live import open_opencv  # noqa: PLC0415 - OpenCV

    return open_opencv(uri, options)


def why_opencv(uri: SourceUri, wanted: Literal["auto", "gstreamer", "opencv"]) -> str:
    """Return why OpenCV reads `uri`: it is chosen, or what GStreamer lacks; "" where GStreamer
    does. Where OpenCV is `wanted`, GStreamer is not loaded.

    Raises:
        SourceError: GStreamer is needed and missing.
        SourceUriError: OpenCV never reads such a camera.
    """
    needs = _GSTREAMER_ONLY.get(uri.scheme)
    if wanted == "opencv":
        if needs:
            raise uri.wrong(f"{needs}; OpenCV, the reader in its settings, cannot")
        return "as chosen"
    missing = gstreamer_missing(uri.scheme)
    if missing and (needs or wanted == "gstreamer"):
        needs = needs or "GStreamer is the reader in its settings"
        raise uri.fault(f"{needs}; {missing}", "no_decoder")
    sends_jpegs = uri.scheme in {"http", "https"}
    if not missing and wanted == "auto" and sends_jpegs and not _decodes_jpeg_in_hardware():
        # OpenCV decodes them at the scale that the model needs.
        missing = "GStreamer here has no hardware that decodes JPEG"
    return missing and f"as {missing}"


def _decodes_jpeg_in_hardware() -> bool:
    return first_decoder("JPEG", registry_has).startswith("nv")
