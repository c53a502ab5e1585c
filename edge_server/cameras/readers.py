"""The choice between the two readers of live cameras, GStreamer and OpenCV."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

from edge_server.cameras.gstreamer import (
    decodes_jpeg_in_hardware,
    gstreamer_missing,
    open_gstreamer,
)
from edge_server.cameras.opencv_live import open_opencv
from edge_server.errors import SourceError, SourceUriError
from edge_server.process.logs import log_once

if TYPE_CHECKING:
    from edge_server.cameras.frame import FrameSource
    from edge_server.cameras.source_uri import SourceOptions, SourceUri

log = logging.getLogger(__name__)

ReaderName = Literal["gstreamer", "opencv"]

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
    """Open a live camera with the reader that `choose_reader` names.

    Raises:
        SourceError: the camera delivers no frame; the text names the cause and the next step.
        SourceUriError: the chosen reader never reads such a camera.
    """
    missing = why_not_gstreamer(uri.scheme, options.reader)
    reader = choose_reader(uri, options.reader, missing)
    if reader == "gstreamer":
        log_once(log, f"camera source {uri.label}: read by GStreamer")
        return open_gstreamer(uri, options)
    why = "as chosen" if options.reader == "opencv" else f"as {missing}"
    without = _LOST[uri.scheme]
    log_once(log, f"camera source {uri.label}: read by OpenCV, {why}; without: {without}")
    return open_opencv(uri, options)


def why_not_gstreamer(scheme: str, wanted: Literal["auto", "gstreamer", "opencv"]) -> str:
    """Return why GStreamer cannot read cameras of `scheme` here, or gains nothing; else ""."""
    missing = gstreamer_missing(scheme)
    if missing or wanted != "auto" or scheme not in {"http", "https"}:
        return missing
    # OpenCV decodes a JPEG at the scale that the model needs.
    return "" if decodes_jpeg_in_hardware() else "GStreamer here has no hardware that decodes JPEG"


def choose_reader(
    uri: SourceUri, wanted: Literal["auto", "gstreamer", "opencv"], missing: str
) -> ReaderName:
    """Return the reader of `uri`: the wanted one; GStreamer if any, unless it is missing.

    Args:
        uri: of a live camera.
        wanted: see `SourceOptions`.
        missing: why GStreamer cannot be used; "" if it can.

    Raises:
        SourceError: GStreamer is needed and missing.
        SourceUriError: OpenCV never reads such a camera.
    """
    needs = _GSTREAMER_ONLY.get(uri.scheme)
    if needs and wanted == "opencv":
        raise SourceUriError(f"{uri.label}: {needs}; OpenCV, the reader in its settings, cannot")
    if missing and (needs or wanted == "gstreamer"):
        needs = needs or "GStreamer is the reader in its settings"
        raise SourceError(f"{uri.label}: {needs}; {missing}", reason="unavailable")
    return "opencv" if missing or wanted == "opencv" else "gstreamer"
