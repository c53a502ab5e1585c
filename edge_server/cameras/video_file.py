"""A video file as a source of frames."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import cv2

from edge_server.cameras.frame import FASTEST_FPS, SLOWEST_FPS, Pace
from edge_server.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

# The rate of a file that does not state its own.
DEFAULT_FPS = 25.0
_FFMPEG_QUIET = "-8"  # AV_LOG_QUIET
# FFmpeg plays any .txt file as ANSI art, which is never the user's intention.
ANSI_ART = int.from_bytes(b"ansi", "little")


class VideoFile:
    """Plays a video at its own frame rate; a FrameSource.

    A file that breaks off in the middle ends there. Each round of a loop reopens the file, so a
    replaced file is played in its new form.

    Args:
        path: a regular file.
        fps: frames per second instead of the file's own rate; 0 plays at the reading speed.
        loop: restart at the end.

    Raises:
        SourceError: no image can be decoded from the file.
    """

    def __init__(self, path: Path, *, fps: float | None = None, loop: bool = False) -> None:
        self._path = path
        self._loop = loop
        self._ahead: NDArray[np.uint8] | None
        self._capture, self._ahead = _open_video(path)
        self._expected = int(self._capture.get(cv2.CAP_PROP_FRAME_COUNT))
        self._given = 0
        self._pace = Pace(self._own_fps() if fps is None else fps)

    def read(self) -> NDArray[np.uint8] | None:
        """Return the next image, (H, W, 3) uint8 BGR, when it is due; None at the end.

        Raises:
            SourceError: the file of a loop can no longer be opened.
        """
        image = self._decode()
        if image is None and self._loop:
            self.close()
            self._capture, image = _open_video(self._path)
        if image is not None:
            self._pace.wait()
        return image

    def close(self) -> None:
        """Release the file; a second call does nothing."""
        self._capture.release()

    def _decode(self) -> NDArray[np.uint8] | None:
        image, self._ahead = self._ahead, None
        if image is None:
            image = self._capture.read()[1]
        if image is not None:
            self._given += 1
        elif self._given + 1 < self._expected:  # containers may count one too many
            log.warning(
                "video %s: broke off after %d of %d frames", self._path, self._given, self._expected
            )
            self._expected = 0
        return image

    def _own_fps(self) -> float:
        fps = float(self._capture.get(cv2.CAP_PROP_FPS))
        if SLOWEST_FPS <= fps <= FASTEST_FPS:
            return fps
        log.warning("video %s: has no usable frame rate, playing %g fps", self._path, DEFAULT_FPS)
        return DEFAULT_FPS


def _open_video(path: Path) -> tuple[cv2.VideoCapture, NDArray[np.uint8]]:
    """Return the opened file and its first image."""
    # FFmpeg's lines on stderr must not mix with the log: with --log-format json each line is an
    # object.
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", _FFMPEG_QUIET)
    capture = cv2.VideoCapture(str(path))
    image = None
    if capture.isOpened() and int(capture.get(cv2.CAP_PROP_FOURCC)) != ANSI_ART:
        image = capture.read()[1]
    if image is None:
        capture.release()
        raise SourceError(
            f"{path}: no video can be read from this file; it is damaged, incomplete or of an "
            "unknown format: play it elsewhere, or convert it to MP4 (H.264)"
        )
    return capture, image
