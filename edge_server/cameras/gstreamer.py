"""The GStreamer reader of live cameras."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.errors import SourceError

if TYPE_CHECKING:
    from edge_server.cameras.frame import FrameSource
    from edge_server.cameras.source import SourceOptions
    from edge_server.cameras.source_uri import SourceUri


def gstreamer_missing(scheme: str = "") -> str:
    """Return why GStreamer cannot read, with the packages to install; "" if it can."""
    del scheme
    return "the GStreamer reader is not part of this version"


def open_gstreamer(uri: SourceUri, options: SourceOptions) -> FrameSource:
    """Open a live camera and read its first frame.

    Raises:
        SourceError: the camera delivers no frame.
    """
    del options
    raise SourceError(f"{uri.label}: {gstreamer_missing()}", reason="unavailable")
