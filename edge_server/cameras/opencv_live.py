"""The OpenCV reader of live cameras: RTSP and MJPEG through FFmpeg, V4L2 devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.errors import SourceError

if TYPE_CHECKING:
    from edge_server.cameras.frame import FrameSource
    from edge_server.cameras.source import SourceOptions
    from edge_server.cameras.source_uri import SourceUri


def open_opencv(uri: SourceUri, options: SourceOptions) -> FrameSource:
    """Open a live camera and read its first frame.

    Raises:
        SourceError: the camera delivers no frame; the text names the cause and the next step.
    """
    del options
    raise SourceError(f"{uri.label}: the OpenCV reader is not finished", reason="unavailable")
