"""LaneVideo: a video of what is published of one camera, its lanes drawn into its frames."""

from __future__ import annotations

import threading
from collections import deque
from types import MappingProxyType
from typing import TYPE_CHECKING

import cv2

from edge_server.cameras.colour import bgr_of, resized
from edge_server.cameras.lane_overlay import draw_lane_frame
from edge_server.cameras.opencv_settings import settle_opencv
from edge_server.errors import SourceError
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from edge_server.cameras.frame import Frame
    from edge_server.lanes.types import LaneFrame

VIDEO_FPS = 30
# Each may hold a buffer of its camera's driver.
_MOST_WAITING = 4
_LOOK_S = 0.2
# A camera that is away for longer stands still for so many pictures.
_LONGEST_STAND = 5 * VIDEO_FPS
# Those that every OpenCV with FFmpeg can write.
_CODECS: Mapping[str, str] = MappingProxyType({".mp4": "mp4v", ".avi": "MJPG"})


class LaneVideo:
    """Writes each frame that it is called with; the call returns at once.

    A picture stands from its capture to the next one's, in steps of 1/30 s: a frame that the
    pipeline dropped shows as a picture that stands longer. Frames for which the encoder has no time
    are left out and counted.

    Args:
        path: .mp4 or .avi; a file of that name is replaced.

    Attributes:
        frames: number of frames in the video.
        missed: number of frames for which there was no time.

    Raises:
        SourceError: the file cannot be written, or its suffix is another.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix not in _CODECS:
            raise SourceError(f"{path}: videos are written as {' or '.join(_CODECS)}; rename it")
        try:
            path.write_bytes(b"")
        except OSError as error:
            raise SourceError(f"{path}: cannot be written: {error.strerror}") from error
        self.frames = 0
        self.missed = 0
        self._path = path
        self._arrived = threading.Condition()
        self._waiting: deque[tuple[LaneFrame, Frame]] = deque()
        self._worker = Worker("video", self._tick, on_end=self._end)
        # The following are the worker's alone.
        self._writer: cv2.VideoWriter | None = None
        self._size = (0, 0)
        self._picture: NDArray[np.uint8] | None = None  # is written once it has stood its time
        self._began_ns = 0
        self._written = 0
        self._fault: SourceError | None = None
        self._worker.start()

    def __call__(self, lane_frame: LaneFrame, frame: Frame | None) -> None:
        """Take a frame; a Listener."""
        if frame is None:
            return
        with self._arrived:
            if len(self._waiting) >= _MOST_WAITING:
                self.missed += 1
                return
            self._waiting.append((lane_frame, frame))
            self._arrived.notify()

    def close(self) -> None:
        """Write what waits, and complete the file.

        Raises:
            SourceError: the file cannot be written, or is empty, as there was no frame.
        """
        self._worker.stop(timeout_s=60.0)
        if self._fault is not None:
            raise self._fault
        if not self.frames:
            self._path.unlink(missing_ok=True)
            raise SourceError(f"{self._path}: not written, as there was no frame")

    # On the worker.

    def _tick(self, now: float) -> bool:
        del now
        with self._arrived:
            if not self._arrived.wait_for(lambda: bool(self._waiting), _LOOK_S):
                return True
            lane_frame, frame = self._waiting.popleft()
        try:
            self._put(lane_frame, frame)
        except SourceError as error:
            self._fault = error
        return self._fault is None

    def _put(self, lane_frame: LaneFrame, frame: Frame) -> None:
        """Draw a frame, and write the one before it.

        Raises:
            SourceError: OpenCV cannot write such a video.
        """
        drawn = draw_lane_frame(resized(bgr_of(frame.image), *frame.size), lane_frame)
        if self._writer is None:
            self._begin(frame)
        due = round((frame.capture_mono_ns - self._began_ns) * VIDEO_FPS / 1e9)
        if (beyond := due - self._written - _LONGEST_STAND) > 0:
            self._began_ns += round(beyond * 1e9 / VIDEO_FPS)
            due -= beyond
        self._write_until(due)
        self._picture = resized(drawn, *self._size)
        self.frames += 1

    def _begin(self, frame: Frame) -> None:
        settle_opencv()
        self._began_ns = frame.capture_mono_ns
        self._size = frame.size
        codec = cv2.VideoWriter.fourcc(*_CODECS[self._path.suffix])
        self._writer = cv2.VideoWriter(str(self._path), codec, VIDEO_FPS, frame.size)
        if not self._writer.isOpened():
            raise SourceError(
                f"{self._path}: this OpenCV cannot write it; choose .avi, which needs no FFmpeg"
            )

    def _write_until(self, due: int) -> None:
        """Write the picture that stands until place `due`."""
        if self._picture is None or self._writer is None:
            return
        while self._written < due:
            self._writer.write(self._picture)
            self._written += 1

    def _end(self) -> None:
        while self._waiting and self._fault is None:
            self._put(*self._waiting.popleft())
        self._write_until(self._written + 1)
        if self._writer is not None:
            self._writer.release()
